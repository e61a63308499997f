"""One answer to "how did it end?": the table of states, and every combination of facts through all who answer."""

import ast
import itertools
import json
import os
import platform
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import CLASSES, ENDED, LIVE, LONGEST_PAUSE_S, RETRIES, UNSPECIFIC
from hpc_gpt.core.ends.run_state import SILENT_S
from hpc_gpt.core.ends.state import SLURM_STATES, Facts, class_of, is_mistake, pause_s, slurm_state, state_of
from hpc_gpt.core.process import process_identity, start_time
from hpc_gpt.core.runs.run_folder import IN_QUEUE, Attempt, RunFolder
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.may_start import SlurmStates, decide_start
from hpc_gpt.launcher.watch import status
from hpc_gpt.launcher.watch.status import NO_ANSWER, read_status
from tests.made_runs import add_attempt, make_run, metrics_line, read_run, with_attempt, with_job

JOB = "7"
# Of ended.json; the trainer's own, what Slurm's doing looks like from inside, and none.
SAID = (None, "done", "cancelled", "error", "walltime")
# Slurm's words: no answer, not known, what lives, what is over.
SLURM = (None, "", "PENDING", "RUNNING", "COMPLETED", "CANCELLED", "NODE_FAIL", "FAILED", "REVOKED")


@dataclass(frozen=True)
class Case:
    """A run folder's facts. `judged` is (go_on, the run's class) of next.json, None without one."""

    said: str | None = None
    requeue: bool = False
    judged: tuple[bool, str] | None = None
    cancelled: bool = False
    recent: bool = False


def cases() -> Iterator[Case]:
    """Every folder that a run can leave: it asks for a requeue only after a walltime, and is silent once it is over."""
    for said, cancelled, recent in itertools.product(SAID, (False, True), (False, True)):
        verdicts = (None, (True, said), (False, said), (False, "no_progress")) if said else (None,)
        for judged in verdicts if not (said and recent) else ():
            yield Case(said, said == "walltime", judged, cancelled, recent)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """One folder for all cases: rendering a script for each would take minutes."""
    return with_job(make_run(tmp_path_factory.mktemp("runs"), "generic-slurm", submit=False), JOB, time=1.0)


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch):
    def say(words: dict[str, str] | None) -> None:
        found = None if words is None else {job: (word, "None") for job, word in words.items() if word}
        monkeypatch.setattr(status, "_slurm_states", lambda *_: (found, ""))

    return say


def prepare(run: RunFolder, case: Case) -> Attempt:
    """The folder with the case's files and no other."""
    attempt = run.attempt(1)
    if not attempt.folder.exists():
        add_attempt(run, [metrics_line(1)], None, job_id=JOB, node_list="n[3-4]")
    for name in ("ended.json", "next.json"):
        (attempt.folder / name).unlink(missing_ok=True)
    run.cancelled_mark(JOB).unlink(missing_ok=True)
    if case.said:
        end = {"ended": case.said, "cause": "its cause", "step": 1, "time": 2.0, "requeue": case.requeue}
        (attempt.folder / "ended.json").write_text(json.dumps(end))
    if case.judged:
        go_on, ended = case.judged
        verdict = {"go_on": go_on, "ended": ended, "attempt_ended": case.said, "cause": "its cause", "time": 3.0}
        (attempt.folder / "next.json").write_text(json.dumps(verdict))
    if case.cancelled:
        run.cancelled_mark(JOB).touch()
    moment = time.time() - (0 if case.recent else 2 * SILENT_S)
    for path in (attempt.metrics, attempt.folder):
        os.utime(path, (moment, moment))
    return attempt


def asked_of_status(run: RunFolder) -> str:
    return read_status([run])[0].state


def test_every_combination_has_one_answer(made: RunFolder, slurm_says) -> None:
    """`status` with Slurm's word, `report` without it, and the chain's classification of the attempt."""
    for case in cases():
        prepare(made, case)
        record = read_run(made)
        assert record.attempts is not None
        for slurm in SLURM:
            slurm_says(None if slurm is None else {JOB: slurm})
            shown = asked_of_status(made)
            assert {shown, record.ended, record.attempts[0]["ended"]} <= set(ENDED)
            assert slurm is not None or shown == record.ended, f"{case}: the same facts, another answer"
            if shown == record.ended:
                continue
            # Slurm's word is one fact more: it decides what the folder leaves open, and whether the job lives.
            word = slurm_state(str(slurm))
            assert word in LIVE or record.ended in (*LIVE, *UNSPECIFIC, "cancelled"), (
                f"{case}: {shown} by Slurm's {slurm}"
            )
            assert shown in (word, "unknown", case.said), (case, slurm)


def test_chain_status_and_report_classify_a_lost_attempt_alike(made: RunFolder, slurm_says) -> None:
    """An attempt without a word or with a vague one, whose job is over: what the next job's script is told of Slurm is
    what status is told. After the chain has classified it, all have its class."""
    own_state = made.path.parent / "state"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("HPC_GPT_STATE", str(own_state))
        words = ("", "COMPLETED", "CANCELLED", "NODE_FAIL", "FAILED", "TIMEOUT", "PREEMPTED", "OUT_OF_MEMORY")
        for said, cancelled, slurm in itertools.product((None, "error", "cancelled"), (False, True), words):
            case = Case(said, cancelled=cancelled)
            attempt = prepare(made, case)
            slurm_says({JOB: slurm})
            before = asked_of_status(made)
            later = add_attempt(made, [], None, job_id="8", started=time.time())
            decide_start(made, later, SlurmStates({}, {JOB: [slurm]} if slurm else {}), time.time())
            for path in later.folder.iterdir():
                path.unlink()
            later.folder.rmdir()
            assert attempt.verdict()["attempt_ended"] == before, (case, slurm)
            record = read_run(made)
            assert record.attempts
            assert record.attempts[0]["ended"] == before, case
            assert read_history(made, 4, time.time())[0].ended == before, case


def test_an_attempt_whose_job_started_again_is_the_same_to_all(made: RunFolder) -> None:
    for said, cancelled in itertools.product(SAID, (False, True)):
        prepare(made, Case(said, cancelled=cancelled))
        later = add_attempt(made, [metrics_line(2)], None, job_id=JOB)
        record = read_run(made)
        past = read_history(made, 4, time.time())
        for path in later.folder.iterdir():
            path.unlink()
        later.folder.rmdir()
        assert record.attempts
        assert record.attempts[0]["ended"] == past[0].ended == (said if said not in (None, "cancelled") else "requeued")


def test_status_and_report_agree_on_every_local_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, submit=False)
    here, mine = platform.node(), start_time(os.getpid())
    hosts, alive, said = (here, "elsewhere"), (mine, "another"), (None, "done", "cancelled", "error")
    answers = set()
    for number, (host, started, word, cancelled, queued, began) in enumerate(
        itertools.product(hosts, alive, said, (False, True), (False, True), (False, True))
    ):
        if (queued and began) or (word and not began):
            continue
        job_id = str(1000 + number)
        process = {**process_identity(os.getpid()), "pid_start": started}
        own = {"job_id": None, "queue": process} if queued else {"job_id": job_id, **process}
        # In the order in which a run does it: the attempt first.
        if began:
            add_attempt(run, [metrics_line(1)], word, job_id=job_id, started=time.time())
        run.add_submission({"scheduler": "local", "host": host, "refused": None, **own})
        mark = run.cancelled_mark(IN_QUEUE if queued else job_id)
        if cancelled:
            mark.touch()
        state, record = asked_of_status(run), read_run(run)
        mark.unlink(missing_ok=True)
        assert state == record.ended, (host, started == mine, word, cancelled, queued, began)
        if host == here and started == mine and word is None:
            assert state in LIVE or (queued and cancelled), "what lives goes before the mark"
        answers.add(state)
    assert {"running", "pending", "cancelled", "error", "done"} <= answers


def test_an_older_job_that_was_requeued_by_hand_decides(tmp_path: Path, slurm_says) -> None:
    run = make_run(tmp_path, "generic-slurm", submit=False)
    now = time.time()
    for job_id, moment in (("7", now - 30), ("8", now - 20)):
        with_job(run, job_id, time=moment)
        add_attempt(run, [metrics_line(1)], "walltime", job_id=job_id, started=moment, time=moment + 5)
    add_attempt(run, [metrics_line(2)], None, job_id="7", started=now)
    slurm_says({"7": "RUNNING", "8": "COMPLETED"})
    row, record = read_status([run])[0], read_run(run)
    assert (row.state, row.job_id) == (record.ended, record.job_id) == ("running", "7")


def test_a_done_run_stays_so_whatever_was_submitted_since(tmp_path: Path, slurm_says) -> None:
    run = with_attempt(make_run(tmp_path, "generic-slurm", submit=False), [metrics_line(1)], "done", job_id="7")
    with_job(run, "8")
    for words in (None, {}, {"8": "COMPLETED"}, {"8": "CANCELLED"}):
        slurm_says(words)
        assert asked_of_status(run) == read_run(run).ended == "done"


def test_without_an_answer_the_folder_decides_nothing_is_over(made: RunFolder, slurm_says) -> None:
    slurm_says(None)
    for recent, state in ((True, "running"), (False, "unknown")):
        prepare(made, Case(recent=recent))
        row = read_status([made])[0]
        assert (row.state, row.cause, row.is_over) == (state, NO_ANSWER, False)


# --- the table


def test_the_classes_are_of_the_one_list() -> None:
    """So are those that any module compares an end with, or gives to one."""
    classes = {*SLURM_STATES.values(), *(ended for row in CLASSES.values() for ended in (*row.explains, *row.replaces))}
    for path in Path("hpc_gpt").rglob("*.py"):
        text = path.read_text()
        if not re.search(r"\.(?:attempt_)?ended\b|(?<![\w.])(?:End|failure|echo)\(", text):
            continue  # parsing all of them takes a second
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Compare) and getattr(node.left, "attr", "") in ("ended", "attempt_ended"):
                classes |= {each.value for given in node.comparators for each in ast.walk(given) if _is_text(each)}
            elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("End", "failure", "echo"):
                classes |= {each.value for each in node.args[:1] if _is_text(each)}
    assert classes <= set(CLASSES)
    assert len(classes) > 15
    assert not [row for row in CLASSES.values() if row.in_log and (row.by_scheduler or row.unspecific)]


def _is_text(node: ast.AST) -> TypeGuard[ast.Constant]:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def test_every_combination_of_facts_is_a_state() -> None:
    """Also those that no run can come to."""
    told = (None, False, True)
    for values in itertools.product(told[1:], told[1:], ("", "error", "odd"), ("", "walltime"), told[1:], told[1:]):
        queued, began, said, judged, retried, cancelled = values
        facts = Facts(
            queued=queued, began=began, said=said, judged=judged, retried=retried, cancelled=cancelled, verdict=judged
        )
        for slurm, alive, recent in itertools.product((None, *ENDED, ""), told, told):
            more = replace(facts, slurm=slurm, alive=alive, recent=recent)
            assert state_of(more).ended in ENDED
            assert class_of(more) in (None, *RETRIES)
            assert slurm not in LIVE or state_of(more).ended == slurm


def test_a_run_judged_done_is_done_while_its_job_still_leaves() -> None:
    """Which may take a minute, if a staged environment is to be removed. A job that is to start again lives."""
    facts = Facts(slurm="running", said="done", judged="done", verdict="done")
    assert {state_of(replace(facts, slurm=slurm)).ended for slurm in ("running", "suspended")} == {"done"}
    for other in ({"judged": ""}, {"judged": "walltime", "retried": True}, {"slurm": "pending"}, {"began": False}):
        changed = replace(facts, **other)
        assert state_of(changed).ended == changed.slurm


# --- what mends itself


def test_every_class_that_an_attempt_can_end_with_is_there() -> None:
    assert list(RETRIES) == [ended for ended in ENDED if ended not in ("pending", "suspended", "running")]


def test_what_mends_itself() -> None:
    """As the documentation says it."""
    assert {ended for ended, retry in RETRIES.items() if retry.continues} == {
        "walltime", "preempted", "requeued", "port_taken", "node_failure", "hang", "collective_timeout", "error",
        "unknown",
    }  # fmt: skip
    assert {ended for ended, retry in RETRIES.items() if retry.fails} == {
        "node_failure", "hang", "collective_timeout", "error", "unknown", "port_taken",
    }  # fmt: skip
    assert {ended for ended, retry in RETRIES.items() if retry.continues and not retry.max_in_a_row} == {
        "preempted", "requeued",
    }  # fmt: skip


@given(st.integers(0, 10**5), st.integers(0, 10**6))
def test_a_pause_grows_up_to_an_hour(first_s: int, failures: int) -> None:
    pause, longer = pause_s(first_s, failures), pause_s(first_s, failures + 1)
    assert 0 <= pause <= longer <= LONGEST_PAUSE_S
    assert longer in (min(first_s, LONGEST_PAUSE_S), 2 * pause, LONGEST_PAUSE_S)


@pytest.mark.parametrize(
    ("cause", "mistake"),
    [
        ("rank 0: ModuleNotFoundError: No module named 'x'", True),
        ("rank 12: TypeError", True),
        ("SyntaxError: invalid syntax", True),
        ("rank 1: AttributeError: 'NoneType' object has no attribute 'step'", True),
        ("rank 1: RuntimeError: CUDA error: an illegal memory access was encountered", False),
        ("task 1: Killed", False),
        ("rank 0: OSError: [Errno 5] Input/output error: '/data/NameErrors.bin'", False),
        (None, False),
        ("", False),
    ],
)
def test_a_mistake_of_the_program_is_told_from_bad_luck(cause: str | None, mistake: bool) -> None:
    assert is_mistake(cause) is mistake
