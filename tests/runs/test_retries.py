"""The table of what mends itself: whole, in one place, and its pauses bounded."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.report.advice import ADVICE
from hpc_gpt.runs.state import ENDED, LONGEST_PAUSE_S, RETRIES, is_mistake, pause_s, words_of


def test_every_class_that_an_attempt_can_end_with_is_in_the_table() -> None:
    assert list(RETRIES) == [ended for ended in ENDED if ended not in ("pending", "running")]


def test_what_mends_itself() -> None:
    """As the documentation says it."""
    assert {ended for ended, retry in RETRIES.items() if retry.goes_on} == {
        "walltime", "preempted", "requeued", "node_failure", "hang", "collective_timeout", "error", "unknown",
    }  # fmt: skip
    assert {ended for ended, retry in RETRIES.items() if retry.fails} == {
        "node_failure", "hang", "collective_timeout", "error", "unknown",
    }  # fmt: skip
    assert {ended for ended, retry in RETRIES.items() if retry.goes_on and not retry.most} == {
        "preempted", "requeued",
    }  # fmt: skip


def test_help_says_what_the_table_does() -> None:
    assert {ended: advice.chain for ended, advice in ADVICE.items()} == {ended: words_of(ended) for ended in ENDED}


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
