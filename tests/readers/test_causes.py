"""The first cause over any failures; that over lines of logs is in printed/causes.txt (test_printed.py)."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.ends.failures import ENDED
from hpc_gpt.readers.causes import first_cause
from hpc_gpt.readers.logs import Failure, Part, Place
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
