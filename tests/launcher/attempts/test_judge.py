"""The judge: by the table, and by what holds for any history."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import LONGEST_PAUSE_S, RETRIES
from hpc_gpt.core.ends.state import PUT_BACK
from hpc_gpt.launcher.attempts.judge import EndedAttempt, Rules, gpu_hours, is_too_much, judge, without_progress

RULES = Rules(retry_pause_s=30)


def past(*attempts: tuple[str, int]) -> list[EndedAttempt]:
    """A history of (how it ended, the step of the newest checkpoint then), on 4 GPUs for an hour each."""
    made: list[EndedAttempt] = []
    for number, (ended, saved) in enumerate(attempts, 1):
        resumed = made[-1].saved if made else 0
        made.append(EndedAttempt(number, ended, f"cause {number}", saved=saved, resumed=resumed, gpu_seconds=4 * 3600))
    return made


@pytest.mark.parametrize(
    ("ended", "cause"),
    [
        ("error", "ends by itself at 5 of 500,000 steps, with exit code 0"),
        *((ended, "exit code 0, but it failed") for ended in ("error", "hang", "node_failure", "port_taken")),
    ],
)
def test_a_program_that_exits_with_0_is_not_started_again(ended: str, cause: str) -> None:
    verdict = judge([EndedAttempt(1, ended, cause, saved=5)], RULES)
    assert (verdict.go_on, verdict.ended, verdict.why) == (False, ended, cause)


@pytest.mark.parametrize(
    ("ended", "cause", "goes_on"),
    [
        ("error", "exit code 1", False),
        ("hang", "no output for 300 s", False),
        ("walltime", "the time limit ended it, exit code 137", False),
        ("preempted", "preempted before it had ended, exit code 137", False),
        ("requeued", "put back to the queue by Slurm or by hand", True),  # by the script itself, for its next stage
        ("requeued", "SIGTERM 7 s after attempt 1 of the same job, which it was meant for", False),
    ],
)
def test_after_the_last_step_only_a_requeue_starts_it_again(ended: str, cause: str, goes_on: bool) -> None:
    attempt = EndedAttempt(1, ended, cause, saved=60, complete=60)
    verdict = judge([attempt], RULES)
    assert (verdict.go_on, verdict.ended) == (goes_on, ended)
    assert ("it has made its last planned step, 60" in verdict.why) is not goes_on
    assert judge([replace(attempt, complete=0, saved=50)], RULES).go_on, "--checkpoints shows that step 60 is not saved"


@pytest.mark.parametrize(
    ("ends", "goes_on"), [("l", True), ("ll", False), ("s", True), ("ss", False), ("es", False), ("ps", True),
                          ("ls", False), ("s+s", True), ("s+ss", False), ("xx", False), ("wws", True),
                          ("rrrr", True), ("rrrrr", False), ("rr+rrr", True)]
)  # fmt: skip
def test_what_is_inferred_counts_like_a_failure(ends: str, goes_on: bool) -> None:
    """r: put back by its script; l: a late signal; s: the script's own --signal; x: a taken port; p: preempted;
    w: an unseen limit; +: a step."""
    kinds = {
        "l": ("requeued", "SIGTERM 7 s after attempt 1 of the same job, which it was meant for"),
        "s": ("walltime", "--signal sent USR1 before the time limit, exit code 0"),
        "x": ("port_taken", "in use"),
        "p": ("preempted", "SIGTERM"),
        "e": ("error", "exit code 1"),
        "w": ("walltime", "the time limit ended it"),
        "r": ("requeued", f"ValueError: no such rate; {PUT_BACK}"),
    }
    made: list[EndedAttempt] = []
    for letter in ends:
        if letter == "+":
            made[-1] = replace(made[-1], saved=made[-1].saved + 1)
        else:
            saved = made[-1].saved if made else 0
            unseen = letter in "ws" and not saved
            made.append(EndedAttempt(len(made) + 1, *kinds[letter], saved=saved, resumed=saved, unseen=unseen))
    verdict = judge(made, RULES)
    assert (verdict.go_on, verdict.ended) == (goes_on, made[-1].ended if goes_on else "no_progress")
    assert (verdict.pause_s > 0) is (goes_on and "r" not in ends)


@pytest.mark.parametrize(
    ("attempts", "goes_on"),
    [
        ([("error", True, 0)], False),
        ([("error", False, 0)], True),
        ([("error", True, 5)], True),  # it left a checkpoint
        ([("hang", True, 0)], True),
        ([("requeued", False, 0), ("error", True, 0)], False),  # Slurm ended the first one early
        ([("walltime", False, 0), ("error", True, 0)], False),  # the second in a row without progress
        ([("walltime", False, 5), ("error", True, 5)], True),  # it has trained: not its words are wrong
        ([("node_failure", True, 0), ("error", True, 0)], False),
    ],
)
def test_a_script_that_exits_within_seconds_is_not_started_again(attempts, goes_on) -> None:
    history = [
        replace(each, quick=quick)
        for each, (_, quick, _) in zip(past(*((ended, saved) for ended, _, saved in attempts)), attempts, strict=True)
    ]
    verdict = judge(history, RULES)
    assert verdict.go_on is goes_on
    if not goes_on and len([each for each in history if each.quick]) == len(attempts):
        assert (verdict.ended, verdict.retries) == ("error", 0)
        assert "exited within 20 s, before a step or a checkpoint: a retry would do the same" in verdict.why


@pytest.mark.parametrize(
    ("attempts", "ended", "pause_s", "retries"),
    [
        ([("error", 0)], "error", 30, 1),
        ([("error", 0), ("error", 0)], "no_progress", 0, 0),
        ([("error", 10), ("error", 10)], "error", 60, 2),
        ([("error", 10), ("hang", 10), ("error", 10)], "no_progress", 0, 0),
        ([("error", 10), ("hang", 20), ("node_failure", 30)], "node_failure", 30, 1),
        ([("error", 10), ("preempted", 10), ("preempted", 10), ("preempted", 10)], "preempted", 0, 0),
        ([("error", 10), ("preempted", 10), ("hang", 10)], "hang", 60, 2),
        ([("error", 0), ("requeued", 0), ("error", 0)], "no_progress", 0, 0),
        ([("error", 0), ("refused", 0), ("error", 0)], "no_progress", 0, 0),
        ([("walltime", 0), ("walltime", 0)], "no_progress", 0, 0),
        ([("walltime", 10), ("walltime", 10)], "walltime", 0, 0),
        ([("error", 0), ("preempted", 5), ("error", 5)], "no_progress", 0, 0),
        ([("hang", 5), ("nan", 5)], "nan", 0, 0),
        ([("node_failure", 0)] * 4, "node_failure", 240, 4),
        ([("node_failure", 0)] * 5, "no_progress", 0, 0),
        ([("node_failure", 0), ("error", 0)], "error", 60, 2),
        ([("error", 0), ("node_failure", 0), ("error", 0)], "no_progress", 0, 0),
        ([("hang", 5), ("done", 9)], "done", 0, 0),
    ],
)
def test_histories(attempts: list[tuple[str, int]], ended: str, pause_s: float, retries: int) -> None:
    verdict = judge(past(*attempts), RULES)
    assert (verdict.ended, verdict.pause_s, verdict.retries) == (ended, pause_s, retries)
    assert verdict.go_on is (RETRIES[ended].continues)


def test_a_start_by_hand_after_the_run_had_ended_counts_anew() -> None:
    first, second, third, fourth = past(("error", 0), ("error", 0), ("error", 0), ("error", 0))
    assert judge([first, second, third], RULES).ended == "no_progress"
    by_hand = [first, replace(second, stopped=True), third]
    assert (judge(by_hand, RULES).go_on, judge(by_hand, RULES).retries) == (True, 1)
    assert judge([*by_hand, fourth], RULES).ended == "no_progress"


def test_a_mistake_in_the_program_stops_at_once() -> None:
    verdict = judge([EndedAttempt(1, "error", "rank 3: NameError: name 'x' is not defined", saved=10)], RULES)
    assert (verdict.go_on, verdict.ended) == (False, "error")
    assert "fail with the same message" in verdict.why


def test_no_progress_says_what_it_saw() -> None:
    assert "no checkpoint; the last end was cause 2" in judge(past(("error", 0), ("hang", 0)), RULES).why
    logged = [replace(each, logged=True) for each in past(("error", 10), *[("error", 10)] * 2)]
    assert "step further: the last step is still 10; the last end was cause 3" in judge(logged, RULES).why
    silent = [replace(each, logged=True) for each in past(("error", 0), ("hang", 0))]
    assert "step further: its log shows no step; the last end" in judge(silent, RULES).why
    assert "one of step 10; the last end was cause 3" in judge(past(("walltime", 10), *[("error", 10)] * 2), RULES).why


def test_a_budget_is_hard_and_says_what_is_spent() -> None:
    attempts = past(("walltime", 10), ("walltime", 20))
    assert gpu_hours(attempts) == 8
    verdict = judge(attempts, Rules(max_gpu_hours=8))
    assert (verdict.go_on, verdict.ended) == (False, "budget")
    assert verdict.why.startswith("8 GPU-hours of 8 are spent")
    assert judge(attempts, Rules(max_gpu_hours=8.1)).go_on


@pytest.mark.parametrize("asked", ["cancelled", "stopped"])
def test_who_asked_for_an_end_gets_it_others_say_why(asked: str) -> None:
    assert judge(past(("walltime", 10)), RULES, asked).ended == asked
    assert judge(past(("error", 10)), RULES, asked).ended == asked
    assert judge(past(("nan", 10)), RULES, asked).ended == "nan"
    assert judge(past(("done", 10)), RULES, asked).ended == "done"


def test_where_no_job_can_follow_the_end_keeps_its_class() -> None:
    verdict = judge(past(("walltime", 10)), Rules(cannot_continue='chain = "none" in profile here'))
    assert (verdict.go_on, verdict.ended) == (False, "walltime")
    assert verdict.why.endswith('chain = "none" in profile here')


histories = st.lists(st.tuples(st.sampled_from(sorted(RETRIES)), st.integers(0, 3)), min_size=1, max_size=12).map(
    lambda steps: past(*((ended, sum(more for _, more in steps[: i + 1])) for i, (ended, _) in enumerate(steps)))
)


@given(histories, st.floats(0, 1e4), st.sampled_from(["", "cancelled", "stopped"]))
def test_what_holds_for_any_history(history: list[EndedAttempt], first_s: float, asked: str) -> None:
    verdict = judge(history, Rules(retry_pause_s=first_s), asked)
    last = history[-1]
    assert verdict.attempt_ended == last.ended
    assert 0 <= verdict.pause_s <= LONGEST_PAUSE_S
    assert verdict.why
    if verdict.go_on:
        assert not asked
        assert RETRIES[last.ended].continues
        assert verdict.ended == last.ended
        assert not is_too_much(without_progress(history))
        assert (verdict.retries > 0) is RETRIES[last.ended].fails
    else:
        assert verdict.pause_s == 0


@given(histories)
def test_a_run_that_goes_nowhere_ends_after_two_attempts(history: list[EndedAttempt]) -> None:
    """Whatever came before: two more failures that save nothing newer are the last."""
    saved = history[-1].saved
    longer = [*history, *(EndedAttempt(90 + n, "error", "again", saved=saved, resumed=saved) for n in range(2))]
    assert judge(longer, RULES).ended == "no_progress"


@given(histories)
def test_progress_keeps_it_going_and_the_pause_short(history: list[EndedAttempt]) -> None:
    last = EndedAttempt(99, "hang", "again", saved=history[-1].saved + 1, resumed=history[-1].saved)
    verdict = judge([*history, last], RULES)
    assert (verdict.go_on, verdict.retries, verdict.pause_s) == (True, 1, 30)


@pytest.mark.parametrize(
    ("ends", "goes_on"),
    [
        ("w" * 4, True), ("w" * 5, False), ("we", True), ("wewe", False), ("ewwe", False), ("ewwww", False),
        ("ww+w", True), ("wwww+w", True),
    ],
)  # fmt: skip
def test_a_script_that_shows_nothing_is_retried_within_bounds(ends: str, goes_on: bool) -> None:
    """w: its time limit, with nothing to show how far it came; e: an exit code; +: a step at last."""
    made, saved = [], 0
    for number, letter in enumerate(ends, 1):
        before, saved = saved, saved + (letter == "+")
        kind = "error" if letter == "e" else "walltime"
        made.append(
            EndedAttempt(number, kind, "cause", saved=saved, resumed=before, unseen=letter == "w" and not saved)
        )
    verdict = judge(made, RULES)
    assert (verdict.go_on, verdict.ended) == (goes_on, verdict.attempt_ended if goes_on else "no_progress")
    assert ("nothing shows" in verdict.why) is (not goes_on and ends[-1] == "w")
