"""What stands beside a file until it is finished never stays, and a damaged text is one kind of fault."""

import json
import os
from pathlib import Path

import pytest

from hpc_gpt.core import files
from hpc_gpt.core.checkpoints.find_checkpoints import newest_checkpoint
from hpc_gpt.core.ends.program_end import PrintedEnd, end_of_program, facts_of
from hpc_gpt.core.files import aside, json_lines_from_end, read_json_lines, read_start, read_text_end
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.reader.runs import attempt_cause
from tests.made_runs import add_attempt, make_run


def _fail_beside(path: Path, kind: str, kept: Path) -> None:
    with aside(path) as own:
        if kind == "file":
            own.touch()
        elif kind == "folder":
            (own / "inner").mkdir(parents=True)
        elif kind == "link":
            own.symlink_to(kept)
        raise ZeroDivisionError


@pytest.mark.parametrize("kind", ["file", "folder", "link", "nothing"])
def test_what_was_begun_beside_a_file_is_removed_if_it_fails(tmp_path: Path, kind: str) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "mine").touch()
    with pytest.raises(ZeroDivisionError):
        _fail_beside(tmp_path / "name", kind, kept)
    assert list(tmp_path.rglob("*")) == [kept, kept / "mine"]


def test_what_is_no_file_is_refused_and_left_closed(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="it is not a regular file"):
        read_start(tmp_path, 9)
    assert len(os.listdir("/proc/self/fd")) == before


def test_of_a_file_above_the_limit_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, submit=False)
    attempt = add_attempt(run, [])
    lines = [json.dumps({"step": step, "time": 1e9 + step}) for step in range(1, 101)]
    attempt.metrics.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(files, "MOST_BYTES", 1000)
    steps = [line["step"] for line in read_json_lines(attempt.metrics)]
    assert steps == list(range(steps[0], 101))
    assert steps[0] > 1
    assert [line["step"] for line in json_lines_from_end(attempt.metrics)] == list(range(100, 0, -1))
    end = end_of_program(facts_of(attempt, 0, 100, PrintedEnd()))
    assert end is not None
    assert end.ended == "done"
    (saved := run.path / "newest").write_text("weights")  # an empty one is not whole
    os.utime(saved, (1e9 + 7, 1e9 + 7))
    assert newest_checkpoint(run, Command(run="true", checkpoints="{run}/newest")) == (saved, 7)


def test_of_a_long_log_the_end_is_shown_and_judged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, submit=False)
    attempt = add_attempt(run, [])
    failure = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.\n"
    attempt.log.write_text("a line of the program\n" * 200 + failure)
    size = attempt.log.stat().st_size
    assert read_text_end(attempt.log, size) == attempt.log.read_text()
    shown = read_text_end(attempt.log, 100)
    assert shown == f"[the first {size - 100:,} bytes are left out: {attempt.log}]\n{attempt.log.read_text()[-100:]}"
    whole = attempt_cause.read_cause(attempt)
    monkeypatch.setattr(attempt_cause, "_MOST_BYTES", 1000)
    assert attempt_cause.read_cause(attempt) == whole
    assert whole.ended == "gpu_memory"
