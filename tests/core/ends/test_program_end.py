"""How a program that is not ours ended: a table of facts and ends, without a process."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core.ends.end_policy import End
from hpc_gpt.core.ends.program_end import (
    PrintedEnd,
    ProgramFacts,
    at_limit,
    end_of_program,
    facts_of,
    read_said,
    write_said,
)
from hpc_gpt.core.ends.state import is_after_exit_0
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.made_runs import add_attempt

RAISED = End("user_error", "ImportError: no name x")
OF_PROGRAM = PrintedEnd(failed=RAISED, of_program=True)
SURE = PrintedEnd(failed=RAISED, of_program=True, failed_s=0.3, note=RAISED.cause or "")
HANDLED = PrintedEnd(failed=RAISED, of_program=True, failed_s=9.0, note=RAISED.cause or "")
EXIT_7 = PrintedEnd(failed=End("error", "task 0: Exited with exit code 7"), failed_s=0.3, note="task 0: Exited")
WORDS = PrintedEnd(note="No space left on device")
OWN = PrintedEnd(limit="exiting program after 1180 minutes")
OVER = PrintedEnd(over="Early stopping at step 5")
AGAIN = PrintedEnd(over="Training completed.")
BOTH = PrintedEnd(limit="exiting program after 1180 minutes", failed=RAISED, of_program=True, failed_s=0.3)
NEXT = PrintedEnd(queued="626")
OTHER = PrintedEnd(others="627")
USR1 = "--signal sent USR1 before the time limit"
ASKED = End("walltime", "SIGUSR2: the time limit is near")


@pytest.mark.parametrize(
    ("facts", "ended", "words"),
    [
        # exit code 0: the last planned step
        ({"step": 500, "planned": 500, "spacing": 1}, "done", "500 of 500 steps"),
        ({"step": 499, "planned": 500, "spacing": 1}, "done", "500 of 500 steps"),  # counted from 0
        ({"step": 1000, "planned": 1200, "spacing": 500}, "done", "1,200 of 1,200 steps"),  # no line after the last
        ({"step": 500, "planned": 500, "said": OWN}, "done", "500 of 500 steps"),
        ({"step": 500, "planned": 500, "stepped": True, "said": SURE}, "done", "500 of 500 steps"),  # at its exit
        ({"step": 499, "planned": 500, "spacing": 1, "stepped": True, "said": SURE}, "done", "500 of 500 steps"),
        # (a) a sure failure after steps, of a total that is not reached or not known
        ({"step": 3, "stepped": True, "said": SURE}, "user_error", "exit code 0, but ImportError: no name x"),
        ({"step": 3, "planned": 9, "stepped": True, "said": SURE}, "user_error", "exit code 0, but ImportError"),
        ({"step": 3, "stepped": True, "said": EXIT_7}, "error", "exit code 0, but task 0: Exited with exit code 7"),
        ({"step": 3, "stepped": True, "said": HANDLED}, "user_error", "exit code 0, but ImportError"),
        # (b) before any step, the failure of a program right before the end
        ({"said": SURE}, "user_error", "exit code 0, but ImportError: no name x"),
        ({"said": SURE, "step": 5}, "user_error", "exit code 0, but ImportError: no name x"),  # of a checkpoint
        ({"said": HANDLED}, "done", "exit code 0"),
        ({"said": HANDLED, "ran_s": 4.0}, "user_error", "exit code 0, but ImportError: no name x"),
        ({"said": OF_PROGRAM, "ran_s": 9.0}, "done", "exit code 0"),
        ({"said": OF_PROGRAM, "ran_s": 4.0}, "user_error", "exit code 0, but ImportError"),
        ({"said": EXIT_7, "ran_s": 1.0}, "done", "exit code 0"),
        # (c) a known total that is not reached
        ({"step": 5, "planned": 500_000, "spacing": 1}, "error", "ends by itself at 5 of 500,000 steps"),
        ({"planned": 500}, "error", "ends by itself at 0 of 500 steps, with exit code 0"),
        ({"planned": 500, "said": HANDLED}, "error", "ends by itself at 0 of 500 steps"),
        ({"step": 5, "planned": 9, "stepped": True, "said": WORDS}, "error", "ends by itself at 5 of 9 steps"),
        # else done, with words as a note
        ({}, "done", "exit code 0"),
        ({"step": 5, "stepped": True}, "done", "after step 5; the number of planned steps is not known"),
        ({"step": 5, "stepped": True, "said": WORDS}, "done", "exit code 0, after step 5"),
        # limits: the program's own words are sure, a time that fits is not
        ({"step": 5, "planned": 500_000, "said": OWN}, "walltime", "1180 minutes, at 5 of 500,000 steps"),
        ({"step": 5, "stepped": True, "said": OWN}, "walltime", "1180 minutes, after step 5"),
        ({"said": OWN}, "done", "exit code 0"),
        ({"step": 5, "planned": 9, "stepped": True, "said": OVER}, "done", "Early stopping at step 5, at 5 of 9"),
        ({"planned": 9, "said": OVER}, "error", "ends by itself at 0 of 9 steps"),
        # a finished training, started once more
        ({"planned": 9, "said": AGAIN}, "done", "Training completed.; it had no step to train"),
        ({"planned": 9, "said": replace(AGAIN, note="data: is empty")}, "error", "ends by itself at 0 of 9 steps"),
        ({"planned": 9, "step": 5, "said": AGAIN}, "error", "ends by itself at 5 of 9 steps"),  # its checkpoint's
        ({"step": 5, "stepped": True, "said": BOTH}, "user_error", "exit code 0, but ImportError"),
        ({"step": 5, "planned": 9, "near_limit": "the time limit is near"}, "walltime", "the time limit is near, at 5"),
        ({"step": 5, "stepped": True, "near_limit": "the time limit is near"}, "done", "exit code 0, after step 5"),
        # the script's own --signal
        ({"signal": USR1, "heard": True}, "walltime", f"{USR1}, exit code 0"),
        ({"signal": USR1, "heard": True, "code": 9}, "walltime", f"{USR1}, exit code 9"),
        ({"signal": USR1, "heard": False}, "done", "exit code 0"),
        ({"signal": USR1, "heard": False, "code": 1}, None, ""),
        ({"signal": USR1, "heard": False, "step": 5, "planned": 9}, "error", "ends by itself at 5 of 9 steps"),
        ({"signal": USR1}, "done", "exit code 0"),
        ({"signal": USR1, "step": 5, "planned": 9}, "walltime", f"{USR1}, at 5 of 9 steps"),
        ({"signal": USR1, "step": 9, "planned": 9, "heard": True}, "done", "9 of 9 steps"),
        ({"signal": USR1, "code": 1}, "walltime", f"{USR1}, exit code 1"),
        ({"signal": USR1, "code": 1, "said": EXIT_7}, "walltime", f"{USR1}, exit code 1"),
        ({"signal": USR1, "code": 1, "said": SURE}, None, ""),
        # signals and other exit codes, after the last planned step and before
        ({"step": 60, "planned": 60, "code": 143}, "done", "60 of 60 steps; exit code 143"),
        ({"step": 60, "planned": 60, "code": 130}, "done", "60 of 60 steps; exit code 130"),
        ({"step": 60, "planned": 60, "code": 137, "at_limit": True}, "done", "60 of 60 steps; the time limit ended it"),
        ({"step": 60, "planned": 60, "code": 143, "said": WORDS}, "done", "60 of 60 steps; exit code 143"),
        ({"step": 60, "planned": 60, "code": 143, "said": SURE}, None, ""),
        ({"step": 60, "planned": 60, "code": 137}, None, ""),
        ({"step": 60, "planned": 60, "code": 1}, None, ""),
        ({"step": 935, "planned": 936, "spacing": 1, "code": 143}, None, ""),
        ({"step": 3, "planned": 936, "code": 143}, None, ""),  # of a second epoch
        ({"step": 60, "code": 143}, None, ""),
        ({"step": 5, "planned": 60, "code": 137, "at_limit": True}, None, ""),
        # a script that has queued its next job itself
        ({"signal": USR1, "heard": True, "said": NEXT}, "walltime", f"exit code 0, but {USR1}, exit code 0; it has"),
        ({"asked": ASKED, "said": NEXT}, "walltime", "the time limit is near; it has queued its next job, 626"),
        ({"step": 5, "planned": 9, "said": NEXT}, "error", "with exit code 0; it has queued its next job, 626"),
        ({"signal": USR1, "heard": True, "code": 1, "said": NEXT}, "walltime", f"{USR1}, exit code 1"),
        ({"signal": USR1, "heard": True, "said": OTHER}, "walltime", "exit code 0; it has queued another job, 627"),
        ({"step": 9, "planned": 9, "said": OTHER}, "done", "9 of 9 steps"),
        # what it was asked
        ({"step": 5, "planned": 60, "asked": ASKED}, "walltime", "SIGUSR2: the time limit is near"),
        ({"step": 5, "planned": 60, "code": 143, "asked": ASKED}, "walltime", "SIGUSR2: the time limit is near"),
        ({"step": 59, "planned": 60, "spacing": 1, "asked": ASKED}, "walltime", "SIGUSR2"),
        ({"step": 60, "planned": 60, "asked": ASKED}, "done", "60 of 60 steps"),
        ({"step": 60, "planned": 60, "code": 143, "asked": ASKED}, "done", "60 of 60 steps; exit code 143"),
        ({"step": 60, "planned": 60, "code": 1, "asked": ASKED}, "walltime", "SIGUSR2: the time limit is near"),
    ],
)  # fmt: skip
def test_the_end_of_a_program_by_its_facts(facts, ended, words) -> None:
    end = end_of_program(ProgramFacts(**facts))
    assert (None if end is None else end.ended) == ended
    assert words in str(end and end.cause)
    if end is not None and facts.get("said") == NEXT:
        assert is_after_exit_0(end.cause) is (facts.get("code", 0) == 0), "nothing is started beside the next job"


@pytest.mark.parametrize(
    ("facts", "note"),
    [
        ({"said": WORDS}, "exit code 0, but its log says No space left on device"),
        ({"said": HANDLED}, "exit code 0, but its log says ImportError: no name x"),
        ({"said": SURE, "step": 9, "planned": 9}, "exit code 0, but its log says ImportError: no name x"),
        ({"said": WORDS, "step": 9, "planned": 9, "code": 143}, "exit code 143, but its log says No space left"),
        ({"signal": USR1}, f"exit code 0, but {USR1}"),
        ({"signal": USR1, "heard": False}, None),
        ({"near_limit": "the time limit is near"}, "exit code 0, but the time limit is near"),
        ({"near_limit": "the time limit is near", "step": 9, "planned": 9}, None),
        ({}, None),
    ],
)
def test_what_is_guessed_is_a_note_beside_done(facts, note) -> None:
    end = end_of_program(ProgramFacts(**facts))
    assert end is not None
    assert end.ended == "done"
    assert (end.note or "").startswith(note or "")
    assert bool(end.note) is bool(note)


def test_what_all_tasks_said_and_the_facts_of_a_folder(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    attempt = add_attempt(run, [], None)
    assert read_said(attempt) == PrintedEnd()
    write_said(attempt, 0, EXIT_7)
    write_said(attempt, 1, PrintedEnd(planned=9, limit="its limit", over="its end"))
    write_said(attempt, 2, SURE)
    said = read_said(attempt)
    assert (said.planned, said.limit, said.over, said.failed, said.of_program, said.failed_s) == (
        9,
        "its limit",
        "its end",
        RAISED,
        True,
        0.3,
    )
    (attempt.folder / "exit.json").write_text('{"code": 143, "seconds": 3}')
    attempt.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in (6, 8, 9, 2)))
    facts = facts_of(attempt, -15, 0, said)
    assert (facts.code, facts.step, facts.stepped, facts.planned, facts.ran_s) == (143, 2, True, 9, 3.0)
    assert facts.spacing == 0, "a next epoch began"


@pytest.mark.parametrize(
    ("given", "said", "says"),
    [
        (0, PrintedEnd(loaded=9), "9 of 9 steps"),
        (9, PrintedEnd(), "9 of 9 steps"),
        (0, PrintedEnd(), "ends by itself at 0 of 9 steps"),
        (5, PrintedEnd(loaded=5), "ends by itself at 5 of 9 steps"),
        (9, SURE, "exit code 0, but ImportError"),
    ],
)
def test_a_checkpoint_of_the_last_step_leaves_none(tmp_path: Path, given: int, said: PrintedEnd, says: str) -> None:
    attempt = add_attempt(RunFolder(tmp_path), [], None)
    attempt.resume.write_text(json.dumps({"path": "out/step", "step": given}))
    end = end_of_program(facts_of(attempt, 0, 9, said))
    assert end is not None
    assert str(end.cause).startswith(says)


@pytest.mark.parametrize(
    ("starts", "planned", "says"),
    [
        ([[5500]], 10_000, "ends by itself at 5,500 of 10,000 steps"),
        ([[500]], 900, "ends by itself at 500 of 900 steps"),
        ([[100, 200, 300], [700]], 900, "ends by itself at 700 of 900 steps"),
        ([[100, 200, 300], [400]], 440, "440 of 440 steps"),  # the lines of the start before are 100 steps apart
        ([[10, 20], [97], [98]], 99, "99 of 99 steps"),
        ([[97], [98]], 99, "ends by itself at 98 of 99 steps"),
    ],
)
def test_a_single_line_says_nothing_of_the_steps_between_lines(tmp_path: Path, starts, planned, says) -> None:
    for steps in starts:
        attempt = add_attempt(RunFolder(tmp_path), [], None)
        attempt.metrics.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    end = end_of_program(facts_of(attempt, 0, planned, PrintedEnd()))
    assert end is not None
    assert str(end.cause).startswith(says)


@pytest.mark.parametrize(
    ("step", "said", "ended"), [(9, PrintedEnd(), "done"), (8, PrintedEnd(), "walltime"), (9, SURE, "walltime")]
)
def test_the_time_limit_after_the_last_planned_step(tmp_path: Path, step: int, said: PrintedEnd, ended: str) -> None:
    attempt = add_attempt(RunFolder(tmp_path), [], None)
    attempt.metrics.write_text(json.dumps({"step": step, "steps_planned": 9}) + "\n")
    write_said(attempt, 0, said)
    assert at_limit(attempt, 0, "walltime", "the time limit ended it")[0] == ended
    assert at_limit(attempt, 0, "cancelled", "x") == ("cancelled", "x")
