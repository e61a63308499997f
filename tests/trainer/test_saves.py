"""Saves that are written while training goes on: the same files, the same figures, and nothing lost to a kill."""

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.experiment import Engine
from tests.conftest import Disk
from tests.trainer.launch import Launch, figures, lines, new_run, settings, train

pytestmark = pytest.mark.xdist_group("train-saves")

STEPS = 12
LAYOUT = {"tp": 1, "pp": 2, "dp": 1}


def resolved(tokens: Path, **more: Any) -> Any:
    return settings(tokens, LAYOUT, steps=STEPS, save_every=4, eval_every=5, **more)


@pytest.fixture(scope="module")
def foreground(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> RunFolder:
    """A run that stands still while it saves."""
    run = new_run(tmp_path_factory.mktemp("foreground"), resolved(tokens, save_in_background=False))
    launch = train(run, 2)
    assert launch.ended == ("done", STEPS, False), launch.log
    return run


def sums(run: RunFolder) -> dict[str, dict[str, Any]]:
    """Of every checkpoint the files' sizes and sums: nothing has drawn from a generator, so none is there."""
    found = {path.name: json.loads((path / "complete.json").read_text())["files"] for path in run.checkpoints.iterdir()}
    assert not [file for files in found.values() for file in files if file.startswith("generators")]
    return found


def test_a_background_save_has_the_same_bytes_and_figures(tmp_path, tokens, foreground):
    """The checkpoint of step 4 is written while steps 5 and 6 change all that it is made of."""
    run = new_run(tmp_path, resolved(tokens))
    launch = train(run, 2, SLOW_SAVE_OF="4")
    assert launch.ended == ("done", STEPS, False), launch.log
    assert "; the training waited " in launch.log
    assert "the training waited" not in foreground.attempts()[0].log.read_text()
    assert figures(run) == figures(foreground)
    assert min(map(len, sums(run).values())) > 1
    assert sums(run) == sums(foreground)


@pytest.mark.long
@pytest.mark.parametrize(
    ("engine", "layout"),
    [
        (Engine(name="ddp", sharded_optimizer=True), {"tp": 1, "pp": 1, "dp": 2}),
        (Engine(name="fsdp"), {"tp": 2, "pp": 1, "dp": 1}),
        (Engine(name="deepspeed-zero", zero_stage=3), {"tp": 1, "pp": 1, "dp": 2}),
        (Engine(name="deepspeed-zero", zero_stage=2, offload="optimizer"), {"tp": 1, "pp": 1, "dp": 2}),
    ],
    ids=["ddp", "fsdp", "zero-3", "zero-2 offloaded"],
)
def test_every_engine_can(tmp_path: Path, tokens: Path, engine: Engine, layout: dict[str, int]) -> None:
    """The checkpoint of step 2 is written while steps 3 and 4 change all that it is made of."""
    runs = []
    for background in (False, True):
        more = {"steps": 4, "save_every": 2, "save_in_background": background}
        runs.append(run := new_run(tmp_path, settings(tokens, layout, engine, **more)))
        launch = Launch(run, 2, SLOW_SAVE_OF="2" if background else "0")
        assert launch.wait() == [0, 0], launch.log
    assert figures(runs[0]) == figures(runs[1])
    once, meanwhile = (sums(run)["step-00000002"] for run in runs)
    assert once == meanwhile


def test_training_goes_on_during_a_save_and_a_kill_loses_nothing(tmp_path, tokens, foreground):
    run = new_run(tmp_path, resolved(tokens))
    launch = Launch(run, 2, HOLD_SAVE_OF="8")
    # Both ranks stand in the writing of step 8 while the steps up to the next save are trained.
    launch.await_words("step 11/")
    half = run.checkpoints / ".writing-step-00000008"
    assert {path.name for path in half.iterdir()} == {"begun-0", "begun-1"}
    assert "saved after step 8 " not in launch.log
    # The other waits for the one that is killed, and leaves.
    os.kill(launch.ranks[1].pid, signal.SIGKILL)
    assert launch.wait() == [1, -9], launch.log
    assert half.is_dir()
    again = train(run, 2)
    assert again.ended == ("done", STEPS, False), again.log
    assert f"skipping {half}: it was never completed" in again.log
    assert "resumed after step 4 of 12" in again.log
    assert not half.exists()
    expected = figures(foreground)
    found = figures(run)
    assert found == [expected[one[0] - 1] for one in found]
    assert [line["step"] for line in lines(run)][-8:] == list(range(5, STEPS + 1))
    assert sums(run).keys() == {"step-00000004", "step-00000008", "step-00000012"}


@pytest.mark.long
def test_too_little_host_memory_is_said_once_and_training_waits(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, resolved(tokens))
    launch = Launch(run, 2, NO_MEMORY_ON="1")
    assert launch.wait() == [0, 0], launch.log
    said = [line for line in launch.log.splitlines() if line.startswith("saves stop the training: rank 1 of ")]
    assert len(said) == 1
    assert "iB are free within the process's limit" in said[0]
    assert sums(run).keys() == {"step-00000004", "step-00000008", "step-00000012"}


@pytest.mark.long
def test_an_attempt_in_a_hurry_leaves_old_ones_to_the_next(tmp_path: Path, tokens: Path) -> None:
    run = new_run(tmp_path, resolved(tokens, keep_last=1))
    launch = Launch(run, 2, HOLD_AT_LINE="6")
    launch.await_hold()
    launch.signal(signal.SIGTERM)
    os.kill(launch.ranks[0].pid, signal.SIGCONT)
    assert launch.wait() == [0, 0], launch.log
    ended, step, _ = launch.ended
    assert ended == "cancelled"
    assert sums(run).keys() == {"step-00000004", f"step-{step:08d}"}
    again = train(run, 2)
    before, _, _ = again.log.partition(f"step {step + 1}/")
    assert "removed step-00000004, as train.keep_last says" in before, again.log
    assert sums(run).keys() == {"step-00000012"}


@pytest.mark.long
def test_a_disk_without_answer_ends_the_attempt_as_a_hang(tmp_path: Path, tokens: Path, disk_that_hangs: Disk) -> None:
    """The next save waits for the one that hangs, until the watchdog's limit of 60 s."""
    run = new_run(tmp_path, settings(tokens, LAYOUT, steps=1_000_000, save_every=4, hang_floor_s=5.0))
    run.checkpoints.symlink_to(disk_that_hangs.folder)
    launch = Launch(run, 2)
    launch.await_words("saved after step 4")
    disk_that_hangs.freeze()
    launch.await_words("\nhang: ")
    found = launch.attempt.ended()
    disk_that_hangs.thaw()
    launch.wait()
    assert found["ended"] == "hang"
    # It waits for a folder of the next save, or for the thread of the one before.
    assert re.search(r"; rank 0 .* saving, at pathlib\.py|; ranks? 0.* at threading\.py", found["cause"]), found
