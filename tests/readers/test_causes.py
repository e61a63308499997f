"""The first cause over any failures; that over lines of logs is in printed/causes.txt (test_printed.py)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.reader.readers.causes import first_cause
from hpc_gpt.reader.readers.logs import Failure, Part, Place
from tests.readers.made_logs import timeout


def test_a_silent_ranks_node_is_not_that_of_the_reporting_one() -> None:
    reports = [Failure("collective_timeout", timeout(rank), Place("a", rank + 1), rank, "n1") for rank in (0, 1, 3)]
    cause = first_cause([Part("a", failures=reports)], False)
    assert (cause.rank, cause.node, cause.failed_node) == (2, None, None)


@pytest.mark.parametrize("echo", [False, True])
def test_many_failures_take_no_square_of_time(echo: bool) -> None:
    """A square of 40,000 would take minutes."""
    failures = [Failure("error", f"KeyError: {n}", Place("a", n), n % 64, None, None, echo) for n in range(1, 40_001)]
    parts = [Part(f"log_{rank}.txt", failures=failures[rank::64]) for rank in range(64)]
    assert len(first_cause(parts, False).ordered) == 40_000


def _at(ended: str, words: str, file: str, line: int, at: float | None, echo: bool = False) -> Failure:
    return Failure(ended, words, Place(file, line), None, None, at, echo)


@pytest.mark.parametrize(
    ("signal", "errors", "first"),
    [
        (("a", 5, None), [("a", 9, None)], True),
        (("a", 9, None), [("a", 5, None)], False),
        (("a", 5, None), [("b", 9, None)], False),  # nothing shows which of two files came first
        (("a", 5, 100.0), [("b", 2, 101.0)], True),
        (("a", 5, 100.0), [("b", 2, 100.0)], True),
        (("a", 5, 100.0), [("b", 9, 99.0)], False),
        (("a", 5, 100.0), [("b", 9, 101.0), ("a", 2, 99.0)], False),
        (("a", 5, 100.0), [("b", 9, 101.0), ("a", 7, None)], True),
    ],
)
def test_a_signal_is_the_cause_if_all_that_failed_is_after_it(signal, errors, first: bool) -> None:
    failures = [_at("cancelled", "received SIGTERM", *signal, echo=True)]
    failures += [_at("error", f"KeyError: {number}", *error) for number, error in enumerate(errors)]
    files = dict.fromkeys(failure.place.file for failure in failures)
    parts = [Part(file, failures=[each for each in failures if each.place.file == file]) for file in files]
    for order in (parts, parts[::-1]):
        assert (first_cause(order, False).ended == "cancelled") == first


@pytest.mark.parametrize(
    ("words", "line", "ended"),
    [
        ("SignalException: Process 7 got signal: 15", 9, "cancelled"),  # torchrun says so last of all
        ("received SIGTERM", 9, "error"),
        ("received SIGTERM", 2, "cancelled"),
    ],
)
def test_of_consequences_alone_a_signal_that_came_first_is_cause(words: str, line: int, ended: str) -> None:
    others = [_at("error", "exits with return code = 1", "a", 5, None, echo=True)]
    told = _at("cancelled", words, "a", line, None, echo=True)
    failures = sorted([*others, told], key=lambda each: each.place.line)
    assert first_cause([Part("a", failures=failures)], False).ended == ended


_FAILURES = st.builds(
    Failure,
    st.sampled_from(ENDED),
    st.text(max_size=60)
    | st.sampled_from(["rank     : 3 (local_rank: 3)", "exitcode  : 1 (pid: 2)", "host      : n1"]),
    st.builds(Place, st.just("x"), st.integers(1, 40)),
    st.none() | st.integers(0, 10**9),
    st.none() | st.sampled_from(["n1", "n2"]),
    st.none() | st.floats(0, 5e9) | st.integers(0, 5).map(float),
    st.booleans(),
)


@given(
    st.lists(st.tuples(st.sampled_from(["a.log", "rank_1.log"]), st.lists(_FAILURES, max_size=12)), max_size=3),
    st.booleans(),
)
def test_whatever_failures_each_is_told_once_the_cause_first(files, reached_end: bool) -> None:
    parts = [
        Part(name, failures=[replace(failure, place=Place(f"{name}{n}", failure.place.line)) for failure in failures])
        for n, (name, failures) in enumerate(files)
    ]
    cause = first_cause(parts, reached_end)
    places = [str(failure.place) for failure in cause.ordered]
    assert cause.ended in ENDED
    assert len(places) == len(set(places))
    assert {*places} <= {str(failure.place) for part in parts for failure in part.failures}
    assert cause.failure is None or cause.ordered[0] == cause.failure
    assert cause.text.isprintable()
    # A line that one pattern takes for a failure and another for a consequence is a consequence.
    told = [failure for part in parts for failure in part.failures]
    echoed = {str(failure.place) for failure in told if failure.echo}
    assert {str(failure.place) for failure in told} <= echoed or cause.failure is not None
