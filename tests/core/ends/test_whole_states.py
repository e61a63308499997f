"""What is made of a run folder's files, whole: each value is another, so that each can only come from its key."""

import json
import os
import platform
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.ends.failures import CLASSES
from hpc_gpt.core.ends.run_state import RunState, failure_note, moved_note, read_run_state, retry_note
from hpc_gpt.core.ends.state import Facts, State
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.processes import lock
from hpc_gpt.core.runs.run_folder import IN_QUEUE, Attempt, RunFolder
from hpc_gpt.launcher.attempts.notify import event_keys
from tests.made_runs import add_attempt, make_run, metrics_line

HERE = process_identity(os.getpid())
GONE = {**HERE, "pid_start": -1}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_run(tmp_path_factory.mktemp("runs"), "generic-slurm", submit=False)


def prepared(base: RunFolder, folder: Path, prepare: Callable[[RunFolder], object]) -> RunFolder:
    run = RunFolder(shutil.copytree(base.path, folder / base.run_id))
    prepare(run)
    return run


def submit(run: RunFolder, job_id: str | None, scheduler: str = "slurm", **more: Any) -> None:
    run.add_submission({"scheduler": scheduler, "job_id": job_id, "refused": None, **more})


def judge(attempt: Attempt, **verdict: Any) -> None:
    (attempt.folder / "next.json").write_text(json.dumps({"attempt_ended": "error", "time": 30.0, **verdict}))


def silent(attempt: Attempt, seconds: float) -> Attempt:
    moment = time.time() - seconds
    for path in (*attempt.folder.rglob("*"), attempt.folder):
        os.utime(path, (moment, moment))
    return attempt


def attempt_of(run: RunFolder, job_id: str, ended: str | None = None, **more: Any) -> Attempt:
    return add_attempt(run, [metrics_line(3, step_s=100.0)], ended, job_id=job_id, **more)


Step = Callable[[RunFolder], object]


def sent(job_id: str | None, scheduler: str = "slurm", **more: Any) -> Step:
    return lambda run: submit(run, job_id, scheduler, **more)


def tried(job_id: str, ended: str | None = None, verdict: dict[str, Any] | None = None) -> Step:
    def make(run: RunFolder) -> None:
        attempt = attempt_of(run, job_id, ended, cause="boom" if verdict else "limit")
        if verdict:
            judge(attempt, **verdict)

    return make


def locked(run: RunFolder) -> None:
    lock.take(run, lock.process_holder(os.getpid()))


def steps(*each: Step) -> Step:
    return lambda run: [step(run) for step in each]


def told(run: RunFolder, slurm: dict[str, str] | None) -> str:
    """A run's state in words; of the facts those that are not as they are by default."""
    found = read_run_state(run, 2, slurm)
    usual = asdict(Facts())
    words = [f"{key}={value}" for key, value in asdict(found.facts).items() if value != usual[key]]
    of_job = {"line": found.line.get("mark"), "job": found.job_id, "waits": found.waits or None,
              "attempt": found.attempt and found.attempt.number, "moved_from": found.moved_from,
              "end": found.end and f"{found.end.cause}/{found.end.why}/{found.end.judged_at:g}"}  # fmt: skip
    words += [f"{key}={value}" for key, value in of_job.items() if value is not None]
    return f"{found.state.ended} by {found.state.by}: {' '.join(words)}"


AGAIN = {"go_on": True, "ended": "error", "cause": "lost", "why": "again"}
ENDS = {"go_on": False, "ended": "no_progress", "attempt_ended": "nan", "why": "twice", "cause": "NaN"}
A, NAN = [sent("7", mark="a"), tried("7", "error", AGAIN)], tried("7", "nan", ENDS)
ERROR = "said=error judged=error verdict=error retried=True"
STATES: dict[str, tuple[Step, dict[str, str] | None, str]] = {
    "nothing": (lambda run: None, None,
        "unknown by nothing: submitted=False began=False"),
    "refused": (lambda run: run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "no"}), None,
        "refused by submission: refused=True began=False waits=True"),
    "no answer of sbatch": (sent(None, lost="no answer", mark="l"), None,
        "unknown by submission: lost=True began=False line=l waits=True"),
    "waits in slurm": (sent("7", mark="a"), {"7": "PENDING"},
        "pending by slurm: began=False slurm=pending line=a job=7 waits=True"),
    "waits here": (sent(None, "local", queue=HERE, mark="q"), None,
        "pending by process: queued=True began=False alive=True line=q waits=True"),
    "its queue is gone": (sent(None, "local", queue=GONE), None,
        "cancelled by process: queued=True began=False alive=False waits=True"),
    "cancelled in a queue": (steps(sent(None, "local", queue=HERE), lambda run: run.mark_cancelled(IN_QUEUE)), None,
        "cancelled by mark: queued=True began=False cancelled=True alive=True waits=True"),
    "runs here": (steps(sent("5", "local", **HERE), tried("5")), None,
        "running by process: alive=True recent=True job=5 attempt=1 end=None/None/0"),
    "killed here": (steps(sent("5", "local", **GONE), tried("5")), None,
        "error by process: alive=False recent=True job=5 attempt=1 end=None/None/0"),
    # Its process holds the lock until it has decided that no attempt follows.
    "failed here, undecided": (steps(sent("5", "local", **HERE), tried("5", "error"), locked), None,
        "running by process: alive=True said=error undecided=True job=5 attempt=1 end=limit/limit/0"),
    "failed here, decided": (steps(sent("5", "local", **HERE), tried("5", "error")), None,
        "error by ended: alive=True said=error job=5 attempt=1 end=limit/limit/0"),
    "failed here, as no retry mends": (steps(sent("5", "local", **HERE), tried("5", "nan"), locked), None,
        "nan by ended: alive=True said=nan job=5 attempt=1 end=limit/limit/0"),
    "failed here, retried": (steps(sent("5", "local", **HERE), tried("5", "error", AGAIN), locked), None,
        f"pending by next: alive=True {ERROR} job=5 attempt=1 end=lost/lost/30"),
    "elsewhere": (steps(sent("5", "local", **GONE, host="far"), tried("5")), None,
        "running by recent: recent=True job=5 attempt=1 end=None/None/0"),
    "of this host": (steps(sent("5", "local", **GONE, host=platform.node()), tried("5")), None,
        "error by process: alive=False recent=True job=5 attempt=1 end=None/None/0"),
    # A healthy one may write nothing for ten steps of 100 s.
    "silent, not for long": (lambda run: silent(attempt_of(run, "7"), 990), None,
        "running by recent: recent=True job=7 attempt=1 end=None/None/0"),
    "silent for too long": (lambda run: silent(attempt_of(run, "7"), 1010), None,
        "unknown by nothing: recent=False job=7 attempt=1 end=None/None/0"),
    "goes on": (steps(*A), None,
        f"pending by next: {ERROR} line=a job=7 attempt=1 end=lost/lost/30"),
    "goes on, by another job": (steps(*A, sent("8", chained_to="7", mark="b")), {"8": "PENDING"},
        f"pending by slurm: slurm=pending {ERROR} line=b job=8 attempt=1 end=lost/lost/30"),
    "was to go on": (steps(*A), {"7": "FAILED"},
        f"error by not_retried: slurm=error {ERROR} line=a job=7 attempt=1 end=lost/lost/30"),
    "ended, and resumed": (steps(A[0], NAN, sent("9", attempts_before=1, mark="c")), None,
        "pending by queue: began=False line=c job=9 waits=True attempt=1 end=NaN/twice/30"),
    "ended, as judged": (steps(A[0], NAN), None,
        "no_progress by next: said=nan judged=nan verdict=no_progress line=a job=7 attempt=1 end=NaN/twice/30"),
    "ended, its script said": (steps(A[0], tried("7", "walltime")), {"7": ""},
        "walltime by ended: slurm= said=walltime line=a job=7 attempt=1 end=limit/limit/0"),
    "a later job runs": (steps(A[0], sent("8", link=2, mark="d")), {"7": "COMPLETED", "8": "RUNNING"},
        "running by slurm: began=False slurm=running line=d job=8 waits=True"),
    "one of a chain is suspended": (steps(A[0], sent("8", link=2, mark="d")), {"7": "PENDING", "8": "SUSPENDED"},
        "suspended by slurm: began=False slurm=suspended line=d job=8 waits=True"),
    "moved": (sent("7", folder="/gone/away"), {"7": "PENDING"},
        "pending by slurm: began=False slurm=pending moved=True job=7 waits=True moved_from=/gone/away"),
    "moved, and ended": (steps(sent("7", folder="/gone/away"), tried("7")),
                         {"7": "FAILED"},
        "user_error by slurm: slurm=error moved=True job=7 attempt=1 moved_from=/gone/away end=None/None/0"),
    "stepped aside": (steps(*A, sent("8", mark="e"), tried("8", "refused")), None,
        f"pending by next: {ERROR} line=a job=7 attempt=1 end=lost/lost/30"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_a_state_rests_on_these_facts_alone(base: RunFolder, tmp_path: Path, name: str) -> None:
    prepare, slurm, words = STATES[name]
    assert told(prepared(base, tmp_path, prepare), slurm) == words


NOW = 1_700_000_000.0
NEXT = {"go_on": True, "attempt_ended": "hang", "begin": NOW + 60, "pause_s": 60, "exclude": ["n3", "n4"], "retries": 2}


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (NEXT, "continues after hang, at {}, without n3, n4; 2nd failure in a row"),
        ({**NEXT, "retries": 1, "exclude": []}, "continues after hang, at {}"),
        ({**NEXT, "begin": NOW, "retries": 3}, "continues after hang, without n3, n4; 3rd failure in a row"),
        ({**NEXT, "pause_s": 0, "exclude": None}, "continues after hang; 2nd failure in a row"),
        ({**NEXT, "go_on": False}, None),
        ({"attempt_ended": "hang"}, None),
    ],
)
def test_what_a_run_waits_for_is_when_without_what_and_how_often(base, tmp_path, verdict, words) -> None:
    run = prepared(base, tmp_path, lambda run: attempt_of(run, "7", "hang", cause="rank 3 stands"))
    judge(attempt := run.attempt(1), **verdict)
    at = time.strftime("%H:%M", time.localtime(NOW + 60))
    found = retry_note(attempt, NOW)
    assert found == (words and words.format(at))
    failed = "attempt 1 ended as hang: rank 3 stands"
    assert failure_note(attempt) == failed
    with_why = words and words.format(at).replace("continues after hang", f"{failed}; continues")
    assert retry_note(attempt, NOW, why=True) == with_why
    (attempt.folder / "requeue-refused").write_text(" not\n now ")
    assert retry_note(attempt, NOW) is None


@pytest.mark.parametrize(
    ("state", "facts", "words"),
    [
        ("pending", {}, ""),
        ("running", {"began": True}, ""),
        ("user_error", {"began": True}, "its folder was moved from /old while it ran"),
        ("user_error", {"began": False}, "its folder was moved from /old before it began"),
    ],
)
def test_a_moved_folder_is_said_with_what_follows(state: str, facts: dict[str, bool], words: str) -> None:
    found = RunState(State(state, ""), Facts(**facts), {}, None, False, None, None, Path("/old"))
    assert moved_note(found) == words
    assert moved_note(replace(found, moved_from=None)) == ""


KEYS = {"event": "retried", "attempt": 1, "job": "7", "ended": "error", "cause": "lost", "node": "n9", "rank": None,
        "share": None, "checkpoint": None, "step": 3,
        "loss": 4.5, "gpu_hours": 1.2346, "hours_left": 0.0167, "steps": 15, "next": "attempt 2 in 45 s"}  # fmt: skip
VERDICT = {"go_on": True, "ended": "error", "cause": "lost", "node": "n9", "pause_s": 45, "gpu_hours": 1.23456}
STOPS = {**VERDICT, "go_on": False, "why": "twice"}


@pytest.mark.parametrize(
    ("event", "verdict", "more", "changed"),
    [
        ("retried", VERDICT, {}, {}),
        ("failed", STOPS, {}, {"next": "no other attempt: twice"}),
        ("failed", {**STOPS, "why": None}, {}, {"next": "no other attempt"}),
        # What is left of it comes from ended.json; an evaluation's line has no step_s.
        ("failed", {"gpu_hours": 2.0, "go_on": False}, {"lines": ['{"step": 14, "loss": 2.5}\n']},
         {"ended": "hang", "cause": "boom", "node": "n5", "step": 14, "loss": 2.5, "gpu_hours": 2.0, "hours_left": None,
          "next": "no other attempt"}),
        ("ended", STOPS, {}, {"hours_left": 0.0, "next": "no other attempt: twice"}),
        ("ended", {**STOPS, "why": ""}, {"lines": []},
         {"step": 5, "loss": None, "hours_left": 0.0, "next": "no other attempt"}),
        ("first_step", VERDICT, {}, {"ended": None, "cause": None, "node": None, "next": "it trains",
                                     "gpu_hours": None}),
        ("failed", STOPS, {"follows": True}, {"next": "attempt 2 has begun"}),
    ],
)  # fmt: skip
def test_an_event_has_each_key_from_its_place(base, tmp_path, event, verdict, more, changed) -> None:
    run = prepared(base, tmp_path, lambda run: None)
    # Of 1 s, 5 s and 9 s, a step takes 5 s, and 12 are left.
    lines = more.get("lines", [metrics_line(step, step_s=4.0 * step - 3, loss=1.5 * step) for step in (1, 2, 3)])
    attempt = add_attempt(run, lines, None, job_id="7")
    end = {"ended": "hang", "cause": "boom", "node": "n5", "step": 5, "time": 9.0, "requeue": False}
    (attempt.folder / "ended.json").write_text(json.dumps(end))
    judge(attempt, **verdict)
    if more.get("follows"):
        attempt_of(run, "8")
    resolved = replace(run.resolved(), train=replace(run.resolved().train, steps=15))
    found = event_keys(run, resolved, attempt, event)
    places = {"run": run.run_id, "name": resolved.name, "folder": str(run.path)}
    if event == "first_step":  # counted anew: 2023 is long ago
        found["gpu_hours"] = None
    assert found == {**KEYS, **places, "event": event, **changed}


def test_which_class_explains_others_and_whom_it_replaces() -> None:
    """The order in which one goes before another, and whom the scheduler's word replaces."""
    order = sorted((row.precedence, ended) for ended, row in CLASSES.items() if row.precedence < 99)
    assert [number for number, _ in order] == list(range(1, len(order) + 1))
    assert " ".join(ended for _, ended in order) == (
        "gpu_memory host_memory disk_full nan data node_failure port_taken user_error walltime preempted requeued "
        "stopped error cancelled hang collective_timeout"
    )
    seen = {"error", "unknown"}
    assert {ended: set(row.replaces) - seen for ended, row in CLASSES.items() if row.replaces} == {
        **{each: {"cancelled"} for each in ("walltime", "preempted", "requeued")}, "cancelled": set(),
        "host_memory": set(),
        "node_failure": {"cancelled", "collective_timeout", "hang"},
    }  # fmt: skip
    assert all(seen <= set(row.replaces) for row in CLASSES.values() if row.replaces)
    assert [ended for ended, row in CLASSES.items() if row.by_hand is True] == ["stopped"]
    assert [ended for ended, row in CLASSES.items() if row.by_hand is None] == [
        "done", "cancelled", "error", "pending", "suspended", "running", "unknown",
    ]  # fmt: skip
