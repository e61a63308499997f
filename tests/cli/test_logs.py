"""Which log is shown, and how it is followed; Slurm's answers and the time are put in by hand."""

import io
import os
import signal
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import NoSuchRun, RunFolderError
from hpc_gpt.launcher.watch import logs
from hpc_gpt.launcher.watch.logs import follow_logs, log_path
from hpc_gpt.launcher.watch.status import NO_ANSWER, PATIENCE, read_status
from tests.cli.command import error_of, in_process
from tests.conftest import REPOSITORY
from tests.made_runs import unsubmitted_run
from tests.programs import put
from tests.terminal import on_a_terminal
from tests.waiting import LIMIT_S, patient, wait_for

# The command, which leaves a file once it has found no log and is about to look again.
FOLLOW = """
import os, sys, time
from pathlib import Path
from hpc_gpt import cli
from hpc_gpt.launcher.watch import logs
from tests.programs import put

class Clock:
    monotonic = staticmethod(time.monotonic)

    @staticmethod
    def sleep(seconds):
        Path(os.environ["LOOKED"]).touch()
        time.sleep(seconds)

logs.time = Clock
cli.main()
"""


class Clock:
    """A time that passes only while one sleeps."""

    now = 100.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def scheduler_says(made_run, monkeypatch):
    """Sets (state, cause) at each second; gives the clock times at which it was asked."""
    clock, asked = Clock(), []
    template = read_status([made_run])[0]

    def say(answer):
        def answer_all(runs, limit_s):
            asked.append(clock.now)
            state, cause = answer(clock.now - 100)
            return [replace(template, state=state, cause=cause)], ""

        monkeypatch.setattr(logs, "ask_status", answer_all)
        return asked

    monkeypatch.setattr(logs, "time", clock)
    return say


def followed(run, tail=None):
    out = io.BytesIO()
    follow_logs(run, None, tail, out)
    return out.getvalue().decode()


def add_log(run, text, ended=None, requeue=False):
    attempt = run.new_attempt()
    attempt.log.write_text(text)
    if ended:
        attempt.write_ended(ended, None, 1, requeue)
    return attempt


def test_an_attempt_without_output_does_not_hide_another(made_run):
    (made_run.path / "slurm-7.out").write_text("the script's own\n")
    assert log_path(made_run).name == "slurm-7.out"
    first = add_log(made_run, "one\n")
    made_run.new_attempt()
    assert log_path(made_run) == first.log
    with pytest.raises(NoSuchRun, match="no attempt 3; it has 2"):
        log_path(made_run, 3)


def test_a_scripts_standard_error_follows_its_log_as_it_grows(made_run, scheduler_says):
    attempt = add_log(made_run, "one\ntwo\n")
    attempt.err.write_text("")
    assert in_process("logs", str(made_run.path)).stdout == "one\ntwo\n"

    def answer(second):
        attempt.err.write_text("oh\n")
        return ("running" if second < 6 else "error"), None

    scheduler_says(answer)
    assert followed(made_run, tail=1) == "two\n--- attempts/1/err ---\noh\n"
    said = in_process("logs", str(made_run.path), "--tail", "1").stdout
    assert said == "two\n--- attempts/1/err ---\noh\n"


def test_a_requeued_run_is_asked_for_every_five_seconds(made_run, scheduler_says):
    add_log(made_run, "one\n", "preempted", requeue=True)
    asked = scheduler_says(lambda second: ("pending" if second < 30 else "cancelled", None))
    assert followed(made_run) == "one\n"
    assert len(asked) <= 8


def test_an_end_that_is_new_is_asked_about_at_once(made_run, scheduler_says):
    attempt = add_log(made_run, "one\n")

    def answer(second):
        if second == 0:
            attempt.write_ended("done", None, 1)
            return "running", None
        return "done", None

    asked = scheduler_says(answer)
    followed(made_run)
    assert asked[1] - asked[0] == logs.POLL_S


def test_no_answer_of_slurms_does_not_end_it(made_run, scheduler_says):
    def answer(second):
        if second > 11 and len(made_run.attempts()) == 1:
            add_log(made_run, "two\n")
        return ("unknown", NO_ANSWER) if second < 12 else ("done", None)

    add_log(made_run, "one\n")
    scheduler_says(answer)
    assert followed(made_run) == "one\n--- attempts/2/log ---\ntwo\n"


@given(st.lists(st.sampled_from([b"a", b"\n", b"\r", b"\r\n", b"bcd\n"])), st.integers(0, 5), st.integers(0, 12))
def test_a_tail_is_the_last_lines_wherever_a_block_ends(tmp_path_factory, parts, shift, lines):
    """Blocks end 8 KiB, then 24 KiB before the end of the file."""
    text = b"".join(parts)
    path = tmp_path_factory.mktemp("tail") / "log"
    path.write_bytes(content := text + b"x" * (8192 - shift) + text + b"y" * (16384 - len(text)) + text[:shift])
    out = io.BytesIO()
    assert logs.copy_tail(path, lines, out) == len(content)
    assert out.getvalue() == b"".join(content.splitlines(keepends=True)[-lines:] if lines else [])


def test_what_is_written_while_the_tail_is_read_is_not_lost(made_run, scheduler_says, monkeypatch):
    attempt = add_log(made_run, "one\ntwo\n")
    copy_tail = logs.copy_tail

    def copy_slowly(path, lines, out):
        found = copy_tail(path, lines, out)
        with attempt.log.open("a") as file:
            file.write("three\n")
        return found

    monkeypatch.setattr(logs, "copy_tail", copy_slowly)
    scheduler_says(lambda second: ("done", None))
    assert followed(made_run, tail=1) == "two\nthree\n"


def test_logs_f_waits_for_the_first_log_and_goes_on_as_it_grows(made_run, waiting_process, tmp_path):
    following = subprocess.Popen(
        [sys.executable, "-c", FOLLOW, "logs", made_run.run_id, "-f"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "LOOKED": str(tmp_path / "looked")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    killer = threading.Timer(LIMIT_S, following.kill)
    killer.start()
    try:
        wait_for("a look", lambda: (tmp_path / "looked").exists() or following.poll() is not None)
        attempt = add_log(made_run, "one\n")
        (attempt.folder / "attempt.json").write_text(f'{{"job_id": "{waiting_process.pid}"}}')
        assert following.stdout.readline() == "one\n"
        with attempt.log.open("a") as log:
            log.write("two\n")
        assert following.stdout.readline() == "two\n"  # while the run lives
        attempt.write_ended("done", None, 1)
        assert following.communicate() == ("", "")
        assert following.returncode == 0
    finally:
        killer.cancel()
        following.kill()


def test_a_squeue_that_hangs_holds_no_line_back(made_run, tmp_path, monkeypatch, capsys):
    """What is written meanwhile is copied; that it gave no answer is said once."""
    squeue, hangs = tmp_path / "bin" / "squeue", tmp_path / "hangs"
    put(squeue, f"#!/bin/bash\n[ -e {hangs} ] || {{ echo $$ >{hangs}; exec sleep 600; }}\necho '7|COMPLETED|None'\n")
    monkeypatch.setenv("PATH", f"{squeue.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv(PATIENCE, str(patient(60)))
    made_run.add_submission({"scheduler": "slurm", "job_id": "7", "refused": None})
    attempt = add_log(made_run, "one\n")
    (attempt.folder / "attempt.json").write_text('{"job_id": "7"}')

    def write_while_it_hangs():
        wait_for("squeue", lambda: hangs.exists() and hangs.read_text())
        with attempt.log.open("a") as log:
            log.write("two\n")

    class Out(io.BytesIO):
        def write(self, text):
            if text == b"two\n":
                os.kill(int(hangs.read_text()), signal.SIGKILL)  # raises if it was not waited for any more
            return super().write(text)

    silence_note, said = logs.silence_note, []

    def note(silence):
        said.append(silence)
        attempt.write_ended("done", None, 1)
        return silence_note(silence)

    monkeypatch.setattr(logs, "silence_note", note)
    threading.Thread(target=write_while_it_hangs).start()
    out = Out()
    follow_logs(made_run, None, None, out)
    assert out.getvalue() == b"one\ntwo\n"
    assert len(said) == capsys.readouterr().err.count("Slurm did not answer") == 1


def test_logs_f_of_a_folder_that_was_moved_says_so(made_run, scheduler_says):
    add_log(made_run, "one\n")

    def answer(second):
        if second == 0:
            made_run.path.rename(made_run.path.with_name("moved"))
            return "running", None
        return "unknown", "it has gone"

    scheduler_says(answer)
    with pytest.raises(RunFolderError, match="does not exist any more"):
        followed(made_run)


def test_logs_f_of_a_run_that_ended_without_a_log(made_run):
    done = in_process("logs", made_run.run_id, "-f", code=5)
    assert error_of(done) == (
        f"run {made_run.run_id} ended without a log",
        f"hpc-gpt status {made_run.run_id} says how",
    )


def test_a_terminal_gets_no_control_sequence_a_pipe_the_bytes(made_run):
    hidden = "\x1b]0;title\x07\x1b[2J\x9b31mloss\x1b[31m 3\x1b[0m\tü\rstep 2\n"
    add_log(made_run, hidden)
    assert in_process("logs", made_run.run_id).stdout == hidden
    shown = "?]0;title??[2J?31mloss 3\tü\nstep 2\n"
    assert on_a_terminal("-m", "hpc_gpt", "logs", made_run.run_id) == (0, shown)
    (made_run.attempts()[-1].folder / "ended.json").write_text('{"ended": "done", "step": 2, "time": 1}')
    assert on_a_terminal("-m", "hpc_gpt", "logs", made_run.run_id, "-f") == (0, shown)


def test_one_ranks_output_of_any_program(tmp_path):
    """Its lines of the log by their label, then its files: as srun --output names them, as torchrun does."""
    run = unsubmitted_run()
    attempt = run.new_attempt()
    attempt.log.write_text("step 1\n0: a\n1: b\n[rank1]: c\nrank 11: d\n[default1]:e\n")
    attempt.elsewhere.mkdir()
    names = ("rank-0.txt", "rank-1.txt", "out-0.log", "out-1.log", "logs/none_x/attempt_0/1/stderr.log", "all.log")
    for number, name in enumerate(names, 1):
        (path := tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"in {name}\n")
        (attempt.elsewhere / f"{number:03}").symlink_to(path)
    (attempt.stacks).mkdir()
    (attempt.stacks / "1.txt").write_text("waits\n")
    own = ["rank-1.txt", "logs/none_x/attempt_0/1/stderr.log", "out-1.log"]
    files = [line for name in own for line in (f"--- {tmp_path / name} ---", f"in {name}")]
    expected = ["1: b", "[rank1]: c", "[default1]:e", *files, "--- attempts/1/stacks/1.txt ---", "waits"]
    assert in_process("logs", run.run_id, "--rank", 1, code=0).stdout.splitlines() == expected
    assert in_process("logs", run.run_id, "--rank", 1, "--tail", 1, code=0).stdout.splitlines() == expected[2:]
    assert in_process("logs", run.run_id, "--rank", 0, code=0).stdout.splitlines()[:2] == ["step 1", "0: a"], "our own"
    paths = in_process("logs", run.run_id, "--rank", 1, "--path", code=0).stdout.splitlines()
    assert paths == [str(attempt.log), *(str(tmp_path / name) for name in own), str(attempt.stacks / "1.txt")]
    in_process("logs", run.run_id, "--rank", 7, code=5)
    in_process("logs", run.run_id, "--rank", 1, "-f", code=2)
