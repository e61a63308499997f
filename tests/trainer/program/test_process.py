"""What is read of a program that is not ours: its rows of metrics, its last words, its loss, its pulse."""

import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable
from typing import Any

import pytest

from hpc_gpt.core.ends.exit_status import ExitStatus
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.program.process import ForeignLog, LastLines, trained_s
from hpc_gpt.trainer.program.signs_of_life import ForeignHeartbeat
from hpc_gpt.trainer.supervision.heartbeat import LEAVING
from tests.made_runs import unsubmitted_run

HERE = platform.node()
KILLED = "was ended by SIGKILL, by hand or by the kernel's memory killer"


def last(text: str) -> LastLines:
    lines = LastLines("a.out")
    for line in text.splitlines():
        lines.add(line)
    return lines


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("loading", 3, ("error", "a.out ended with exit code 3", True)),
        ("loading", -9, ("error", f"a.out on {HERE} {KILLED}", True)),
        ("loading", 137, ("error", f"a.out on {HERE} {KILLED}", True)),
        ("loading", -6, ("error", f"a.out on {HERE} was ended by SIGABRT", True)),
        ("loading", 139, ("error", "a.out ended with exit code 139", True)),
        ("loading", -70, ("error", "a.out ended with exit code -70", True)),
        ("KeyError: 'a'\nValueError:  b \nbye", 1, ("error", "ValueError: b", False)),
        ("ValueError: b\nfit.py: error: no x\n", 2, ("user_error", "no x", False)),
        ("fit.py: error: no x\nValueError\n", 2, ("error", "ValueError", False)),
        ("[rank0]: a.b.MyException: Disk quota exceeded", 1, ("disk_full", "MyException: Disk quota exceeded", False)),
        ("3: AssertionError: Found NaN in local grad norm", 1,
         ("nan", "AssertionError: Found NaN in local grad norm", False)),
        ("RuntimeError: Unexpected result inf (iteration 3)", 1,
         ("nan", "RuntimeError: Unexpected result inf (iteration 3)", False)),
        ("KeyboardInterrupt", 1, ("error", "KeyboardInterrupt", False)),
        ("RuntimeError: Connection closed by peer\n", 1, ("error", "RuntimeError: Connection closed by peer", True)),
        ("some text with an Error: x", 1, ("error", "a.out ended with exit code 1", True)),
    ],
)  # fmt: skip
def test_its_last_words_say_how_it_failed(text: str, code: int, said: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    assert last(text).failure(code) == said
    monkeypatch.setenv("SLURMD_NODENAME", "n7")
    assert last(text).failure(code) == (said[0], said[1].replace(f" on {HERE} ", " on n7 "), said[2])


TABLE = """\
[0]:  time      : 2026-01-01_00:00:00
Other Failures:
  rank      : 9 (local_rank: 1)
  exitcode  : -6 (pid: 8)
Root Cause (first observed failure):
[0]:  host      : {}
  rank      : {} (local_rank: 0)
  exitcode  : {} (pid: 7)
  rank      : 4 (local_rank: 1)
"""


@pytest.mark.parametrize(
    ("host", "rank", "code", "found"),
    [("n3", "2", "-9", ExitStatus("2", "n3", -9)), ("localhost", "0", "-11", ExitStatus("0", HERE, -11)),
     ("n3", "2", "-15", None), ("n3", "2", "1", None), ("n3", "x", "-9", None), ("n3", "2", "-x", None)],
)  # fmt: skip
def test_torchruns_table_names_the_worker_that_was_killed(host: str, rank: str, code: str, found) -> None:
    assert last(TABLE.format(host, rank, code)).killed_worker() == found


def test_the_last_dump_and_the_last_match_count() -> None:
    text = "step 1\nFatal Python error: Segmentation fault\na\nstep 2\nFatal Python error: Aborted\nb\n"
    assert last(text).stacks() == "Fatal Python error: Aborted\nb\n"
    assert last("step 1\n").stacks() == ""
    assert last(text).find(re.compile(r"step (\d)"))[1] == "2"
    assert last(text).find(re.compile("none")) is None
    assert last("ValueError\n" + "x\n" * 199).failure(1)[1] == "ValueError"
    assert last("ValueError\n" + "x\n" * 200).failure(1)[1] == "a.out ended with exit code 1"


def log_of(read: Callable[[str], Any], task: int = 0, run: RunFolder | None = None, **more: Any) -> ForeignLog:
    run = run or unsubmitted_run()
    return ForeignLog(run.attempts()[-1] if run.attempts() else run.new_attempt(), run.resolved(), task, read, **more)


def rows(log: ForeignLog) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log._attempt.metrics.read_text().splitlines()]
    assert all(abs(row.pop("time") - time.time()) < 600 for row in found)
    return [{name: value for name, value in row.items() if value is not None} for row in found]


def test_a_row_has_what_its_line_says_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo has 4 ranks, a global batch of 32 and 128 tokens a sequence."""
    said = {
        "a": {"step": 8, "loss": 3.0, "step_s": 0.5, "skipped": 1, "memory_reserved_gib": 2.0},
        "b": {"step": 10, "loss": 2.5, "grad_norm": 0.1, "lr": 0.2, "step_s": 0.25, "skipped": 2, "nan": 1.0,
              "balance_loss": 1.02, "expert_load": 1.5},
        "c": {"step": 12, "loss_eval": 2.0, "step_s": 0.1234567, "global_batch": 8, "nan": 0.0},
        "d": {"step": 12, "loss": 9.0}, "e": {"step": 13, "tokens_per_s": 77.77},
    }  # fmt: skip
    log = log_of(said.get, resumed=7, planned=lambda: 20)
    for line in ("other", *said):
        log.take(line)
    assert rows(log) == [
        {"step": 8, "loss": 3.0, "step_s": 0.5, "tokens_per_s": 8192.0, "tokens": 4096, "skipped": True,
         "memory_reserved_gib": 2.0, "steps_planned": 20},
        {"step": 10, "loss": 2.5, "grad_norm": 0.1, "lr": 0.2, "step_s": 0.25, "tokens_per_s": 16384.0, "tokens": 8192,
         "skipped": 2, "nan": 1, "steps_planned": 20, "balance_loss": 1.02, "expert_load": 1.5},
        {"step": 12, "loss_eval": 2.0, "step_s": 0.123457, "tokens_per_s": 8294.4, "tokens": 2048, "skipped": 0,
         "steps_planned": 20},
        {"step": 13, "tokens_per_s": 77.8, "tokens": 4096, "skipped": False, "steps_planned": 20},
    ]  # fmt: skip


def test_without_a_batch_the_rate_gives_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    log = log_of({"a": {"step": 1, "tokens_per_s_gpu": 10.0, "step_s": 2.0}, "b": {"step": 2, "step_s": 2.0}}.get)
    monkeypatch.setattr(log, "_global_batch", 0)
    log.take("a")
    log.take("b")
    plain = {"step_s": 2.0, "skipped": False}
    assert rows(log) == [{"step": 1, "tokens_per_s": 40.0, "tokens": 80, **plain}, {"step": 2, **plain}]


def test_the_first_task_that_prints_a_step_writes_the_rows() -> None:
    run = unsubmitted_run()
    logs = [log_of(lambda line: {"step": int(line)} if line else None, task, run) for task in (0, 1)]
    for number, line in ((0, ""), (1, "1"), (0, "1"), (1, "2")):
        logs[number].take(line)
    assert [row["step"] for row in rows(logs[0])] == [1, 2]
    assert (run.attempts()[0].folder / "prints").read_text() == "1\n"


def test_its_loss_is_kept_until_a_line_has_a_step() -> None:
    now: list[float | None] = [None]
    log = log_of(lambda line: {"step": 1} if line == "step" else None, loss=lambda: now[0])
    path, found = log._attempt.folder / "loss.json", []
    for loss, pause_s, line in (
        (None, 0, ""),
        (3.0, 0, ""),
        (2.0, 60, ""),
        (2.0, 0, ""),
        (1.0, 0, "step"),
        (0.5, 0, ""),
    ):
        now[0] = loss
        log.keep_loss(pause_s)
        found.append(json.loads(path.read_text())["loss"] if path.exists() else None)
        log.take(*filter(None, [line]))
    assert found == [None, 3.0, 3.0, 2.0, 1.0, 1.0]
    assert abs(json.loads(path.read_text())["time"] - time.time()) < 600
    other = log_of(lambda line: None, task=1, loss=lambda: 3.0)
    other.keep_loss(0)
    assert not (other._attempt.folder / "loss.json").exists()


def test_a_reader_that_fails_is_one_note_and_all_is_read_on(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    got: list[str] = []

    def read(line: str) -> dict[str, float]:
        got.append(line)
        raise KeyError("no such figure")

    log = log_of(read)
    words = ["python3", "-c", "import sys; sys.stdout.buffer.write(b'a\\rb\\xff\\n\\n' + b'c' * 5000 + b'\\nlast')"]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        log.follow(process)
        log.finish()
    assert got == ["a", "b\ufffd", "c" * 4000, "last"]
    said = capfdbinary.readouterr()
    assert said.out == b"a\rb\xff\n\n" + b"c" * 5000 + b"\nlast"
    note = "note: hpc-gpt could not follow a line of the program: KeyError: 'no such figure' (test_process.py:"
    (line,) = said.err.decode().splitlines()
    assert line.startswith(note)
    assert line.endswith("); it runs on, and steps may be missing")
    assert log.moves >= 1


def test_the_pulse_of_a_program_is_its_output_until_it_has_steps() -> None:
    heart = ForeignHeartbeat(20, 300.0, 50.0)
    heart.heard()
    assert (heart.moves, heart.limit_s(), ForeignHeartbeat(20, 300.0, None).limit_s()) == (1, 50.0, 0.0)
    for step in range(1, 9):
        heart.stepped(step)
    moves = heart.moves
    heart.heard()
    assert (heart.moves, heart.limit_s()) == (moves, 12 * 300.0), "a sign of life, and no step"
    heart.stepped(9)
    assert heart.limit_s() == 300.0
    heart.enter(LEAVING)
    assert heart.limit_s() == 0.0


def test_the_time_trained_is_that_of_all_attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = unsubmitted_run()
    for began, ended in ((100.0, 160.0), (None, 500.0), (400.0, 300.0), (950.0, None)):
        attempt = run.new_attempt()
        if ended is not None:
            (attempt.folder / "ended.json").write_text(json.dumps({"time": ended, "ended": "done"}))
        if began is not None:
            (attempt.folder / ForeignLog.TRAINS).touch()
            os.utime(attempt.folder / ForeignLog.TRAINS, (began, began))
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    assert trained_s(run) == 60 + 50
