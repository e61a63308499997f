"""Files of a run that are none, or too large, and folders of a host that no longer answers: no verb hangs or takes all
memory, and the other runs are shown."""

import itertools
import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpc_gpt.core import files
from hpc_gpt.core.files import read_bytes
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.snapshot import take_snapshot
from hpc_gpt.launcher.watch.status import RunStatus, read_status
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, add_checkpoint, make_run, metrics_line
from tests.waiting import patient


def _large(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(20 << 30)


KINDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "large": _large,
}
FILES = (
    *("resolved.json", "submissions.jsonl", "provenance.json", "code.zip", "job.sh", "experiment.toml"),
    *(f"attempts/1/{name}" for name in ("attempt.json", "ended.json", "next.json", "metrics.jsonl", "trainer.json")),
    *("attempts/1/log", "checkpoints/step-00000002/complete.json"),
)


def odd_run(logs: Path, name: str, kind: str) -> RunFolder:
    run = make_run(logs)
    take_snapshot().place(run.path)
    attempt = add_attempt(run, [metrics_line(1), metrics_line(2)])
    attempt.log.write_text("step 1\n")
    add_checkpoint(run, 2)
    (run.path / name).unlink(missing_ok=True)
    KINDS[kind](run.path / name)
    return run


# Each verb in one process, which gives codes and outputs.
VERBS = """
import json, sys
from tests.cli.command import in_process
done = [in_process(*words) for words in json.loads(sys.argv[1])]
print(json.dumps([(each.code, each.stdout[-200000:], len(each.stdout), each.stderr) for each in done]))
"""


def verbs(*all_words: tuple[str, ...]) -> list[tuple[int, str, int, str]]:
    """(exit code, end of stdout, its length, stderr) of each verb; together they have 3 GiB."""
    done = subprocess.run(
        [sys.executable, "-c", VERBS, json.dumps(all_words)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OPENBLAS_NUM_THREADS": "1"},
        cwd=REPOSITORY,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30)),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [tuple(each) for each in json.loads(done.stdout)]


def test_no_verb_waits_for_a_file_that_is_none(tmp_path: Path) -> None:
    """Each file of a run in turn is one of the kinds, which all are opened in one place."""
    logs, kinds = tmp_path / "logs", itertools.cycle(KINDS)
    runs = {name: odd_run(logs, name, next(kinds)) for name in FILES}
    fifo = odd_run(logs, "attempts/1/log", "fifo")
    sound = make_run(logs)
    wrong = [str(runs[name].path) for name in ("code.zip", "job.sh", "resolved.json", "attempts/1/ended.json")]
    status, until, large, none, *others = verbs(
        ("status", "--all", "--json", str(logs)),
        ("submit", "demo", "--cluster", "local", "--until", "steps=9", "--dry-run"),
        ("logs", str(runs["attempts/1/log"].path), "--tail", "3"),
        ("logs", str(fifo.path), "--tail", "3"),
        *(("submit", "--resume", each, "--dry-run") for each in wrong),
        ("why", wrong[-1]),
    )
    shown = {row["run"]: row for row in json.loads(status[1])["runs"]}
    assert set(shown) == {run.run_id for run in (*runs.values(), fifo, sound)}
    assert "resolved.json" in shown[runs["resolved.json"].run_id]["cause"]
    assert until[0] == 0, until[3]
    assert [(each[0], each[2]) for each in (none, large)] == [(1, 0), (0, 64 << 20)], (none[3], large[3])
    assert not [each for each in others if "Traceback" in each[3]]


def test_what_is_larger_than_any_of_ours_is_not_read(tmp_path: Path) -> None:
    _large(path := tmp_path / "ended.json")
    with pytest.raises(OSError, match="larger than 64 MiB"):
        read_bytes(path)


@pytest.fixture
def dead_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system whose server never answers: whoever looks into it waits until it is gone."""
    (folder := tmp_path / "dead").mkdir()
    try:
        number = os.open("/dev/fuse", os.O_RDWR)
    except OSError:
        pytest.skip("needs /dev/fuse")
    options = f"fd={number},rootmode=40000,user_id=0,group_id=0"
    mounted = subprocess.run(
        ["mount", "-t", "fuse", "-o", options, "dead", folder], pass_fds=[number], capture_output=True, check=False
    )
    if mounted.returncode:
        os.close(number)
        pytest.skip("a file system of its own needs root")
    yield folder
    os.close(number)
    subprocess.run(["umount", "-l", folder], check=True)


def test_a_run_on_a_host_that_does_not_answer_is_a_line(tmp_path, dead_disk, monkeypatch):
    logs = tmp_path / "logs"
    sound = make_run(logs)
    (gone := sound.path.parent / "20990101-000000-dead").symlink_to(dead_disk / "run")
    monkeypatch.setattr(files, "ANSWER_S", patient(3))
    looking = threading.Thread(target=lambda: found.append((runs := list_runs(logs), read_status(runs))), daemon=True)
    found: list[tuple[list[RunFolder], list[RunStatus]]] = []
    looking.start()
    looking.join(patient(300))
    assert found, "it waits for ever"
    ((runs, rows),) = found
    assert {run.path for run in runs} == {sound.path, gone}
    causes = {row.run: row.cause or "" for row in rows}
    assert "its folder does not answer" in causes[gone.name]
    assert "does not answer" not in causes[sound.run_id]
