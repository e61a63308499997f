"""What a SIGTERM means: a cancel, a preemption, or a late signal for the attempt before. No signal is sent here."""

import json
import tempfile
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.end_policy import LATE_SIGNAL_S, class_of_sigterm, end_by_script
from hpc_gpt.core.ends.state import is_inferred
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.request import Request, ScriptRequest
from hpc_gpt.launcher.submission import write_run
from tests.made_runs import add_attempt

AT = 1_700_000_000.0
# As Slurm 22.05 prints it when a task got SIGTERM.
SHOWN = "JobState={} Reason=None Dependency=(null)\n   PreemptEligibleTime=2026-11-20T10:00:00 PreemptTime={}"
RUNS = SHOWN.format("RUNNING", "None")


def second_attempt(folder: Path, job_before: str | None, ended_before_s: float | None) -> RunFolder:
    """A run whose second attempt is of job 4711, and whose first, if there is one, ended so long before AT."""
    run = RunFolder(folder)
    if job_before is not None:
        ended = None if ended_before_s is None else "requeued"
        add_attempt(run, [], ended, job_id=job_before, time=AT - (ended_before_s or 0.0))
    add_attempt(run, [], None)
    return run


@pytest.mark.parametrize(
    ("state", "since", "expected"),
    [
        ("RUNNING", "2026-11-20T10:01:00", "preempted"),
        ("RUNNING", "None", "cancelled"),
        ("SIGNALING", "2026-11-20T10:01:00", "preempted"),
        ("SIGNALING", "None", "cancelled"),
        ("COMPLETING", "None", "cancelled"),
        ("COMPLETING", "2026-11-20T10:01:00", "cancelled"),
    ],
)
def test_only_a_running_job_with_a_time_is_being_preempted(tmp_path, state, since, expected) -> None:
    run = second_attempt(tmp_path, None, None)
    assert class_of_sigterm(run, run.attempt(1), SHOWN.format(state, since), AT).ended == expected


@pytest.mark.parametrize("shown", ["", "slurm_load_jobs error: Invalid job id specified"])
def test_without_slurms_answer_it_is_a_cancel(tmp_path: Path, shown: str) -> None:
    """A cancel that is taken for anything else would restart what a user has ended."""
    run = second_attempt(tmp_path, "4711", 1.0)
    assert class_of_sigterm(run, run.attempt(2), shown, AT).ended == "cancelled"


@pytest.mark.parametrize(
    ("alone", "state", "ended"),
    [("rank 3", "RUNNING", "error"), ("rank 3", "COMPLETING", "cancelled"), ("", "RUNNING", "cancelled")],
)
def test_a_sigterm_of_one_rank_alone_is_nobodys_cancel(tmp_path: Path, alone: str, state: str, ended: str) -> None:
    run = second_attempt(tmp_path, None, None)
    end = class_of_sigterm(run, run.attempt(1), SHOWN.format(state, "None"), AT, alone)
    assert end.ended == ended
    unsent = "SIGTERM to rank 3 alone, which neither the scheduler nor hpc-gpt has sent"
    assert (end.cause == unsent) == (ended == "error")


def test_a_late_signal_puts_the_job_back_to_the_queue(tmp_path: Path) -> None:
    run = second_attempt(tmp_path, "4711", 71.0)
    end = class_of_sigterm(run, run.attempt(2), RUNS, AT)
    assert (end.ended, end.requeue) == ("requeued", True)
    assert end.cause == "SIGTERM 71 s after attempt 1 of the same job, which it was meant for"
    assert is_inferred(end.cause), "it counts like a failure"


def test_a_late_signal_is_believed_once_in_a_row(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    add_attempt(run, [], "requeued", time=AT - 90)
    late = class_of_sigterm(run, add_attempt(run, [], None), RUNS, AT - 60)
    add_attempt(run, [], late.ended, cause=late.cause, time=AT - 60)
    assert class_of_sigterm(run, add_attempt(run, [], None), RUNS, AT).ended == "cancelled"


@pytest.mark.parametrize(("signals", "expected"), [([15], "requeued"), ([12], "error"), ([], "error"), (None, "error")])
def test_a_script_with_143_was_signalled_if_its_shell_heard_it(tmp_path, signals, expected) -> None:
    """`exit 143`, `trap "kill 0" EXIT` and an early killer of memory end a script so at every start."""
    (file := tmp_path / "fit.slurm").write_text("#!/bin/bash\n#SBATCH -t 7\nexit 143\n")
    prepared = prepare(Request(str(file), "generic-slurm", None, {}, script=ScriptRequest(file, (), ())))
    run = write_run(prepared, tmp_path / "logs", {})
    add_attempt(run, [], "requeued", time=time.time() - 60)
    attempt = add_attempt(run, [], None)
    more = {} if signals is None else {"signals": signals}
    (attempt.folder / "exit.json").write_text(json.dumps({"code": 143, "seconds": 3, **more}))
    assert end_by_script(run, attempt, 143, "", RUNS, False)[0] == expected


@given(
    marked=st.booleans(),
    state=st.sampled_from(["", "PENDING", "RUNNING", "SIGNALING", "COMPLETING", "CANCELLED", "TIMEOUT"]),
    since=st.sampled_from(["None", "N/A", "(null)", "2026-11-20T10:01:00"]),
    job_before=st.sampled_from([None, "4711", "4710"]),
    ended_before_s=st.none() | st.floats(0.0, 2 * LATE_SIGNAL_S),
)
def test_every_condition_of_a_late_signal_is_needed(marked, state, since, job_before, ended_before_s) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = second_attempt(Path(folder), job_before, ended_before_s)
        attempt = run.attempts()[-1]
        if marked:
            run.mark_cancelled("4711")
        shown = SHOWN.format(state, since) if state else ""
        ended = class_of_sigterm(run, attempt, shown, AT).ended
        preempts = since.startswith("2026") and state in ("RUNNING", "SIGNALING")
        late = ended_before_s is not None and ended_before_s < LATE_SIGNAL_S and job_before == "4711"
        assert (ended == "preempted") is (preempts and not marked)
        assert (ended == "requeued") is (late and state == "RUNNING" and not marked and not preempts)
        assert ended in ("preempted", "requeued", "cancelled")


def test_ranks_that_the_late_signal_ended_unhandled(tmp_path: Path) -> None:
    """srun then names no rank that failed first, and its exit code is 143."""
    run = RunFolder(tmp_path)
    add_attempt(run, [], "requeued", time=time.time() - 60)
    attempt = add_attempt(run, [], None)
    attempt.log.write_text("")
    assert end_by_script(run, attempt, 143, "", RUNS, False)[0] == "requeued"
    assert end_by_script(run, attempt, 1, "", RUNS, False) == ("error", "exit code 1")
    failed = "n1: task 0: Exited with exit code 143"
    assert end_by_script(run, attempt, 143, failed, RUNS, False) == ("error", failed)
    run.mark_cancelled("4711")
    assert end_by_script(run, attempt, 143, "", RUNS, False)[0] == "cancelled"
