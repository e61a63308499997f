"""Signals raise flags at once, even while the main thread is blocked; Slurm is asked at once."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.processes.requests import open_requests, write_request
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision.signals import Inbox, show_job
from tests.programs import put
from tests.trainer.filling import fill

SHOWN = "JobState=RUNNING Reason=None PreemptTime=2026-11-20T10:01:00"


def test_without_slurm_or_without_its_answer_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    assert (show_job("4711"), show_job(None)) == ("", "")


def test_a_controller_that_is_away_for_a_moment_is_asked_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    text = f"""#!/bin/sh
[ -e {tmp_path}/asked ] && echo "{SHOWN}" && exit
: >{tmp_path}/asked
exit 1
"""
    put(tmp_path / "scontrol", text)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert show_job("4711") == f"{SHOWN}\n"


def test_flags_rise_while_the_main_thread_stands_still() -> None:
    """The main thread holds a lock in C for ever; the second Ctrl-C still ends the process, and not before."""
    program = """
import signal, threading
from hpc_gpt.trainer.supervision.signals import Signals
from tests.programs import put

class Telling(Signals):
    def receive(self, number):
        super().receive(number)
        print(signal.Signals(number).name, flush=True)

signals = Telling()
signals.on_quit = lambda: print("quit", *sorted(signals.raised), flush=True)
signals.install()
signal.alarm(600)  # ends a process that nothing else ends
print("ready", flush=True)
lock = threading.Lock()
lock.acquire()
while True:
    lock.acquire()
"""
    clean = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_ID"}
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=clean)
    assert process.stdout.readline() == "ready\n"
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        process.send_signal(number)
        # Two that come at once are one.
        assert process.stdout.readline() == f"{number.name}\n"
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert (process.wait(300), process.stdout.read()) == (130, "quit interrupted terminated walltime\n")


def test_a_save_with_a_refused_answer_is_not_asked_for_again(small_disk, monkeypatch):
    """Each would be refused as well, and soon the attempt had refused too many."""
    monkeypatch.setattr("hpc_gpt.trainer.supervision.signals._LOOK_S", 0.0)
    attempt = RunFolder(small_disk).attempt(1)
    attempt.folder.mkdir(parents=True)
    request = write_request(attempt, "save")
    own = Inbox(attempt)
    assert own.look() == {"save"}
    filler = fill(small_disk)
    own.answer("save", 5, False, "the disk is full")
    assert open_requests(attempt) == [request]
    assert own.look() == frozenset()
    os.unlink(filler)
    own.answer("save", 9, True)
    assert open_requests(attempt) == []
    assert write_request(attempt, "save") != request
    assert own.look() == {"save"}
