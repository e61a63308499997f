"""Ending runs: what is asked of the scheduler, in which order, and what is refused."""

import shutil
import signal
import subprocess
import sys
import time

import pytest

from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.launcher.local import queue
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.resumption import check_resumption, choose_resumption
from hpc_gpt.launcher.until import Until
from hpc_gpt.launcher.watch import control
from hpc_gpt.launcher.watch.control import cancel_run
from tests.cli.command import in_process
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_attempt, with_job
from tests.waiting import LIMIT_S


def resume_elsewhere(run):
    """With another setting, as a new run."""
    request = Request("", None, None, {}, given={"train.log_every": 1}, until=Until())
    return choose_resumption(run, request, from_start=False, dry=False)


def test_a_local_run_elsewhere_is_neither_ended_nor_begun():
    run = unsubmitted_run()
    line = {"scheduler": "local", "job_id": "7", "pid": 7, "pid_start": "1", "host": "elsewhere", "refused": None}
    run.add_submission(line)
    for verb in (cancel_run, check_resumption):
        with pytest.raises(RunFolderError, match="runs on elsewhere") as refusal:
            verb(run)
        assert "elsewhere" in refusal.value.hint
    assert len(run.submissions()) == 1
    assert not run.attempts()
    assert not list(run.path.glob("cancelled.*"))


def test_a_local_runs_process_is_never_taken_for_a_slurm_job(monkeypatch):
    run = with_attempt(unsubmitted_run(), [metrics_line(1)], None, job_id="4711", started=time.time())
    (run.path / "submissions.jsonl").write_text('{"scheduler": "lo')
    monkeypatch.setattr(control, "cancel_job", lambda *jobs: pytest.fail(f"scancel {jobs}"))
    with pytest.raises(RunFolderError, match="is damaged") as refusal:
        cancel_run(run)
    assert refusal.value.hint == f"hpc-gpt stop {run.run_id} saves and ends it"
    assert not list(run.path.glob("cancelled.*"))


@pytest.fixture
def removed():
    """A run whose folder was removed while its process, which waits for a word, runs; and the process."""
    run = unsubmitted_run()
    with subprocess.Popen([sys.executable, "-m", queue.QUEUE, str(run.path)], stdin=subprocess.PIPE) as process:
        shutil.rmtree(run.path)
        yield run, process
        process.kill()


@pytest.mark.parametrize("by", ["id", "folder", "process"])
def test_a_run_without_a_folder_is_cancelled(removed, by):
    run, process = removed
    assert run.run_id not in in_process("status").stdout
    assert in_process("stop", run.run_id, code=1).stdout == ""
    name = {"id": run.run_id, "folder": run.path, "process": process.pid}[by]
    done = in_process("cancel", name, "--yes", code=0)
    assert done.stdout == f"cancelled {run.run_id}, job {process.pid}\n"
    assert process.wait(LIMIT_S) == -signal.SIGTERM
    assert "no run" in in_process("status", run.run_id, code=5).stderr
    assert not run.path.exists()


def test_an_ended_local_run_elsewhere_has_nothing_to_cancel():
    run = unsubmitted_run()
    run.add_submission({"scheduler": "local", "job_id": "7", "pid": 7, "pid_start": "1", "host": "elsewhere"})
    add_attempt(run, 5, job_id="7")
    assert cancel_run(run) is None


def test_ctrl_c_leaves_the_mark_of_a_local_run_too(made_run, waiting_process):
    cancel_run(made_run, save=True)
    assert waiting_process.wait(LIMIT_S) != 0
    assert made_run.cancelled_mark(str(waiting_process.pid)).exists()


@pytest.mark.parametrize("state", ["PENDING", "RUNNING"])
@pytest.mark.parametrize("again", [check_resumption, resume_elsewhere])
def test_a_run_whose_job_is_still_there_is_not_started_twice(monkeypatch, state, again):
    run = with_job(unsubmitted_run("generic-slurm"), "7")
    monkeypatch.setattr("hpc_gpt.launcher.watch.status._slurm_states", lambda *_: ({"7": (state, "None")}, ""))
    with pytest.raises(RunFolderError, match=f"is {state.lower()}") as refusal:
        again(run)
    assert "cancel" in refusal.value.hint
    assert len(run.submissions()) == 1
