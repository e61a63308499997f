"""A disk that fills up under a run, and one that turns read-only: small file systems of their own."""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from tests.trainer.filling import fill
from tests.trainer.launch import Launch, lines, new_run, settings

PP2 = {"tp": 1, "pp": 2, "dp": 1}
LONG = 1_000_000
EVERY = 100
# Each size in the largest unit of which there is a tenth.
ROOM = re.compile(r"the disk has (0 bytes|[\d.]+ [KM]iB) free, the checkpoint needs \d\.\d\d MiB")


def checkpoints(run: RunFolder) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir())


@pytest.mark.long
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_stops_the_save_and_not_the_run(small_disk: Path, tokens: Path, background: bool) -> None:
    """Neither metrics nor the log, which lie on it too, are lost: they are written when there is space again."""
    train = {"save_every": EVERY, "save_in_background": background, "keep_last": 2}
    run = new_run(small_disk, settings(tokens, PP2, steps=LONG, **train))
    launch = Launch(run, 2)
    launch.await_words(f"saved after step {EVERY} ")
    first = launch.writes()
    launch.await_words(f"saved after step {2 * EVERY} ")
    between_saves = launch.writes() - first
    full = fill(small_disk)
    seen = -1
    while seen != (seen := launch.attempt.metrics.stat().st_size):
        # What is left of a file's last page takes some more lines.
        launch.await_steps_unseen()
    launch.await_steps_unseen(between_saves)  # one save or two; three would end the attempt
    full.unlink()
    launch.await_words("not saved after step ")
    launch.await_words("metrics.jsonl is written again")
    launch.await_words("saved after step ", after="metrics.jsonl is written again")
    launch.signal(signal.SIGINT)
    assert launch.wait() == [0, 0], launch.log
    ended, step, _ = launch.ended
    assert ended == "stopped"
    assert ROOM.search(launch.log), launch.log
    assert "; the training continues (failed save 1 of 3)" in launch.log
    assert [line["step"] for line in lines(run)] == list(range(1, step + 1))
    said = [int(line.split("/")[0][5:]) for line in launch.log.splitlines() if line.startswith("step ")]
    assert said == list(range(1, step + 1))
    assert (checkpoints(run)[-1], len(checkpoints(run))) == (f"step-{step:08d}", 2)
    assert not (launch.attempt.folder / ".reserve").exists()


def test_a_disk_that_stays_full_ends_the_attempt(small_disk: Path, tokens: Path) -> None:
    """Some checkpoints fit; the next do not, and those before stay good."""
    run = new_run(small_disk, settings(tokens, PP2, steps=LONG, save_every=1))
    launch = Launch(run, 2)
    assert launch.wait() == [1, 1], launch.log
    assert launch.ended[0] == "disk_full", launch.log
    cause = str(launch.attempt.ended()["cause"])
    assert cause.startswith("3 saves in a row were refused; not saved after step ")
    assert ROOM.search(cause) or "No space left on device" in cause
    good = checkpoints(run)
    assert good
    assert all(name.startswith("step-") for name in good)

    # Then the disk turns read-only.
    shutil.rmtree(run.checkpoints / good[0])
    attempt = run.new_attempt()
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    last = Launch(run, 2, attempt, log=tokens.parent / "last-log")
    assert last.wait() == [2, 2], last.log
    assert f"Error: cannot write {attempt.folder}" in last.log
    assert "Traceback" not in last.log


def test_the_last_save_refused_is_no_done_run(small_disk: Path, tokens: Path) -> None:
    run = new_run(small_disk, settings(tokens, PP2, steps=8, save_every=4, save_in_background=False))
    launch = Launch(run, 2, HOLD_AT_LINE="6")
    launch.await_hold()
    launch.await_words("saved after step 4 ")
    fill(small_disk)
    os.kill(launch.ranks[0].pid, signal.SIGCONT)
    assert launch.wait() == [1, 1], launch.log
    assert launch.ended == ("disk_full", 8, False)
    cause = str(launch.attempt.ended()["cause"])
    assert cause.startswith("not saved after the last step: ")
    assert checkpoints(run) == ["step-00000004"]
