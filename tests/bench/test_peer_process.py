"""A peer's command: run by the user's shell, its output kept, and nothing of its group left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from hpc_gpt.bench.peer_process import run_peer
from hpc_gpt.errors import RunFolderError
from tests.conftest import REPOSITORY

BENCH = """
import sys
from pathlib import Path
from hpc_gpt.bench.peer_process import run_peer
run_peer(sys.argv[1], Path(sys.argv[2]))
"""


def lives(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def poll(condition, seconds=240.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def test_the_users_shell_runs_the_command_as_it_is_given_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GREETING", "two  words")
    log = tmp_path / "log"
    end = run_peer('echo "$GREETING"; pwd; echo wrong >&2; exit 7', log)
    assert end.code == 7
    assert log.read_text().splitlines() == ["two  words", str(tmp_path), "wrong"]


def test_without_a_shell_that_is_there_it_is_the_systems(tmp_path, monkeypatch):
    monkeypatch.setenv("SHELL", "/no/such/shell")
    assert run_peer("echo here", tmp_path / "log").code == 0


def test_a_log_is_never_written_over(tmp_path):
    log = tmp_path / "log"
    log.write_text("kept\n")
    with pytest.raises(RunFolderError, match="cannot write"):
        run_peer("echo new", log)
    assert log.read_text() == "kept\n"


def test_what_a_command_leaves_running_is_ended_with_it(tmp_path):
    log = tmp_path / "log"
    assert run_peer("sleep 300 >/dev/null & echo $!", log).code == 0
    assert not lives(log.read_text().strip())


def test_ctrl_c_ends_the_whole_group(tmp_path):
    log = tmp_path / "log"
    line = [sys.executable, "-c", BENCH, "sleep 300 & echo $!; wait", str(log)]
    bench = subprocess.Popen(line, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, stderr=subprocess.PIPE)
    poll(lambda: log.exists() and log.read_text().endswith("\n"))
    child = log.read_text().strip()
    assert lives(child)
    bench.send_signal(signal.SIGINT)
    _, errors = bench.communicate(timeout=300)
    assert b"KeyboardInterrupt" in errors
    assert not lives(child)


def test_a_group_that_takes_no_notice_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("hpc_gpt.bench.peer_process.GRACE_S", 0.3)
    log = tmp_path / "log"
    started = "trap '' TERM; (trap '' TERM; while :; do sleep 0.1; done) >/dev/null & echo $!"
    assert run_peer(started, log).code == 0
    assert not lives(log.read_text().strip())


def test_a_ctrl_c_while_it_is_started_ends_it_as_well(tmp_path, monkeypatch):
    started = []

    class Interrupted(subprocess.Popen):
        def __init__(self, *words, **options):
            super().__init__(*words, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("hpc_gpt.bench.peer_process.subprocess.Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_peer("sleep 300", tmp_path / "log")
    assert not lives(started[0])
