"""`--wait` and Ctrl-C, however often and whenever it comes. squeue and scancel are scripts that note their calls."""

import os
import signal
from pathlib import Path

import pytest

from hpc_gpt.cli.submit_answer import with_interrupts
from hpc_gpt.core.errors import JobRefused, SlurmUnreachable
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import cancel_job
from tests.made_runs import unsubmitted_run, with_job
from tests.programs import put, python

# Ctrl-C comes while the calls of $CTRL_C are under way, which it ends.
SQUEUE = """#!/bin/bash
echo squeue >>"$0.calls"
case " $CTRL_C " in *" $(grep -c squeue "$0.calls") "*) kill -INT $PPID && exec sleep 600 ;; esac
cat "$0.queue"
"""
SCANCEL = """#!/bin/bash
echo "scancel $*" >>"${0%/*}/squeue.calls"
[ -z "$SAYS" ] || { echo "scancel: error: $SAYS" >&2; exit 1; }
case "$*" in --signal*) ;; *) [ -n "$SLOW" ] || echo '7|CANCELLED|None' >"${0%/*}/squeue.queue" ;; esac
"""
WAIT = (
    "import sys; from pathlib import Path; "
    "from hpc_gpt.launcher.watch import control; from hpc_gpt.core.runs.run_folder import RunFolder; "
    "control.SLURM_POLL_S = 0.1; control.wait_for(RunFolder(Path(sys.argv[1])))"
)


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the two clients, first on PATH."""
    folder = tmp_path / "clients"
    for name, text in (("squeue", SQUEUE), ("scancel", SCANCEL)):
        put(folder / name, text)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


@pytest.fixture
def run(own_folders) -> RunFolder:
    return with_job(unsubmitted_run("generic-slurm"), "7")


def wait(clients: Path, run: RunFolder, state: str, ctrl_c: str, **more: str) -> list[str]:
    """What was called from the first squeue to the end of a wait that Ctrl-C ended."""
    (clients / "squeue.queue").write_text(f"7|{state}|None\n")
    done = python("-c", WAIT, run.path, env={**os.environ, "CTRL_C": ctrl_c, **more})
    assert "KeyboardInterrupt" in done.stderr.splitlines()[-1], done.stderr
    return (clients / "squeue.calls").read_text().splitlines()


def test_ctrl_c_just_after_a_submission_is_the_waits():
    said = []

    def show() -> None:
        signal.raise_signal(signal.SIGINT)
        said.append("the run's job")

    assert with_interrupts(show, wait=True) == len(said) == 1
    with pytest.raises(KeyboardInterrupt):
        with_interrupts(show, wait=False)
    assert len(said) == 1


def test_ctrl_c_cancels_a_job_that_waits(clients, run):
    assert wait(clients, run, "PENDING", "1") == ["squeue", "squeue", "scancel 7", "squeue"]
    assert run.cancelled_mark("7").exists()


def test_a_second_ctrl_c_while_the_first_is_answered_cancels(clients, run):
    assert wait(clients, run, "PENDING", "1 2")[-2:] == ["scancel 7", "squeue"]
    assert run.cancelled_mark("7").exists()


def test_the_first_saves_and_stops_the_second_cancels_unasked(clients, run):
    calls = wait(clients, run, "RUNNING", "2 4")
    assert calls == ["squeue"] * 3 + ["scancel --signal=INT 7", "squeue", "scancel 7", "squeue"]


def test_a_third_ends_the_wait_at_once(clients, run):
    assert wait(clients, run, "RUNNING", "2 4 5", SLOW="1")[-2:] == ["scancel 7", "squeue"]


def test_ctrl_c_on_a_job_of_which_nothing_is_known_cancels_it(clients, run):
    assert "scancel 7" in wait(clients, run, "REVOKED", "1")


@pytest.mark.parametrize("save", [False, True])
def test_what_scancel_says_is_passed_on(clients, monkeypatch, save):
    monkeypatch.setenv("SAYS", "Unable to contact slurm controller (connect failure)")
    with pytest.raises(SlurmUnreachable):
        cancel_job("7", save=save)
    monkeypatch.setenv("SAYS", "Kill job error on job id 7: Access/permission denied")
    with pytest.raises(JobRefused):
        cancel_job("7", save=save)
    for gone in ("Invalid job id specified", "Job/step already completing or completed"):
        monkeypatch.setenv("SAYS", f"Kill job error on job id 7: {gone}")
        cancel_job("7", save=save)


def test_a_run_of_which_slurm_says_nothing_is_not_over(run, monkeypatch):
    from hpc_gpt.launcher.watch import status

    monkeypatch.setattr(status, "_slurm_states", lambda *_: (None, "gone"))
    assert not status.read_status([run])[0].is_over
