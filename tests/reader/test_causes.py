"""The first cause over any failures; that over lines of logs is in printed/causes.txt (test_printed.py)."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.failures import ENDED
from hpc_gpt.reader.failures.causes import first_cause
from hpc_gpt.reader.failures.failure_families import GPU_MISSING, GPU_MISSING_ON_NODE
from hpc_gpt.reader.failures.part_failures import (
    join_blocks,
    without_ignored,
)
from hpc_gpt.reader.lines.part import Fact, Failure, Part, Place
from hpc_gpt.reader.lines.steps import StepTable
from tests.reader.made_logs import timeout


def test_a_silent_ranks_node_is_not_that_of_the_reporting_one() -> None:
    reports = [Failure("collective_timeout", timeout(rank), Place("a", rank + 1), rank, "n1") for rank in (0, 1, 3)]
    cause = first_cause([Part("a", failures=reports)], False)
    assert (cause.rank, cause.node, cause.failed_node) == (2, None, None)


def test_many_failures_take_no_square_of_time() -> None:
    """A square of 40,000 would take minutes."""
    failures = [Failure("error", f"KeyError: {n}", Place("a", n), n % 64, None, None) for n in range(1, 40_001)]
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


def _failure(text: str) -> Failure:
    """`CLASS FILE:LINE words`, before the words also `@SECONDS`, `rRANK`, `on=NODE` and `echo`."""
    found = re.fullmatch(r"(\w+) ([\w.]+):(\d+)(?: @([\d.]+))?(?: r(\d+))?(?: on=(\w+))?( echo)? (.+)", text)
    assert found is not None, text
    ended, file, line, at, rank, node, echo, words = found.groups()
    place = Place(file, int(line))
    return Failure(ended, words, place, int(rank) if rank else None, node, float(at) if at else None, bool(echo))


def _parts(failures: str, steps: Sequence[tuple[str, int, float]] = (), **more: object) -> list[Part]:
    """A part of each file of these failures, which ` | ` separates; with lines of steps as (file, line, second)."""
    several = [_failure(each) for each in failures.split(" | ")]
    files = dict.fromkeys([*(file for file, *_ in steps), *(failure.place.file for failure in several)])
    parts = [Part(file, failures=[each for each in several if each.place.file == file], **more) for file in files]  # type: ignore[arg-type]
    for part in parts:
        if own := [(line, at) for file, line, at in steps if file == part.file]:
            lines, times = (np.array(each) for each in zip(*own, strict=True))
            columns = {"step": np.arange(1.0, len(own) + 1), "at": times.astype(float)}
            part.steps["nanogpt"] = StepTable(columns, lines, count=len(own))
    return parts


OOM, KEY = "CUDA out of memory", "KeyError: 'x'"
CHOICES = [line for line in Path(__file__).with_name("choices.txt").read_text().splitlines() if line[0] != "#"]


@pytest.mark.parametrize("choice", CHOICES)
def test_which_of_several_failures_is_the_cause(choice: str) -> None:
    failures, _, chosen = choice.partition(" -> ")
    cause = first_cause(_parts(failures), False)
    assert "; ".join(filter(None, (str(cause.failure and cause.failure.place), cause.sure))) == chosen


# (failures, lines of steps, whether all planned steps were trained) -> the failures that may have ended the run.
SURVIVED = [
    (f"error a:5 {KEY}", [("a", 4, 0), ("a", 5, 0)], False, "a:5"),
    (f"error a:5 {KEY}", [("a", 4, 0), ("a", 6, 0)], False, ""),
    (f"error a:5 r3 {KEY}", [("a", 4, 0), ("a", 6, 0)], False, "a:5"),
    (f"error a:5 r3 {KEY}", [("a", 6, 0), ("a", 7, 0)], False, ""),
    (f"error a:5 r3 {KEY}", [("a", 4, 0), ("a", 6, 0)], True, ""),
    ("disk_full a:9 full", [("a", 4, 0), ("a", 5, 0)], True, "a:9"),
    (f"error b:5 @97 {KEY}", [("a", 4, 99), ("a", 6, 100)], False, ""),
    (f"error b:5 @98 {KEY}", [("a", 4, 99), ("a", 6, 100)], False, "b:5"),
    (f"error b:5 {KEY}", [("a", 4, 99), ("a", 6, 100)], True, "b:5"),
    ("user_error b:5 python: command not found", [("a", 4, 99)], False, ""),
    ("user_error a:5 python: command not found", [("a", 4, 99)], False, "a:5"),
    (f"user_error a:5 bash: x: command not found | error a:9 {KEY}", [], False, "a:9"),
    (f"user_error a:9 bash: x: command not found | error a:5 {KEY}", [], False, "a:5 a:9"),
    (f"port_taken a:5 in use | error a:9 r0 {KEY}", [], False, "a:9"),
    (f"port_taken a:5 in use | error a:9 {KEY}", [], False, "a:5 a:9"),
    (f"port_taken a:5 on=n1 in use | error a:9 r0 {KEY}", [], False, "a:5 a:9"),
    (f"data a:5 bad | error a:9 r0 {KEY}", [], False, "a:5 a:9"),
    (f"error a:5 gone | error a:9 r0 srun: error: {KEY}", [], False, "a:5 a:9"),
    (f"error a:5 r1 {KEY} | error b:9 python: can't open file 'x'", [], False, "a:5"),
    (f"error a:5 r1 {KEY} | error b:9 r2 execve(): x", [], False, "a:5"),
]  # fmt: skip


@pytest.mark.parametrize(("failures", "steps", "reached_end", "left"), SURVIVED)
def test_what_a_run_survived(failures: str, steps: list[tuple[str, int, float]], reached_end: bool, left: str) -> None:
    cause = first_cause(_parts(failures, steps), reached_end)
    assert " ".join(str(each.place) for each in cause.ordered if each not in cause.survived) == left


LEFT, SRUN = "on=n4 echo exit code 1", "on=n5 echo srun: error: n5: task 1"
SAID = {
    f"error a:1 r3 {KEY}": "rank 3: KeyError: 'x'; 3, None; ",
    "error a:1 r3 rank 3 is gone": "rank 3 is gone; 3, None; ",
    "error a:1 r3 task 3: x": "task 3: x; 3, None; ",
    f"error rank_7.log:1 {KEY}": "rank 7: KeyError: 'x'; 7, None; ",
    f"error rank_7.log:1 r3 {KEY}": "rank 3: KeyError: 'x'; 3, None; ",
    f"error a:1 {KEY} | error a:2 r4 {LEFT}": f"rank 4: {KEY}; 4, n4; the launcher says that this rank ended first",
    f"error a:1 r4 {KEY} | error a:2 r4 {LEFT}": "rank 4: KeyError: 'x'; 4, n4; ",
    f"error a:1 {KEY} | error a:2 {SRUN}": f"{KEY}; None, n5; the launcher names this node first",
    f"gpu_memory a:1 {OOM} | error a:2 on=n6 echo NCCL WARN x": "CUDA out of memory; None, n6; ",
    "node_failure a:1 gone | error a:2 on=n6 echo NCCL WARN x": "gone; None, None; ",
    f"walltime a:1 limit | error a:2 r4 {LEFT}": "limit; None, None; ",
    f"hang a:1 r1 on=n1 silent | error a:2 {SRUN}": "rank 1: silent; 1, n1; ",
}


@pytest.mark.parametrize("failures", SAID)
def test_what_is_made_of_the_cause(failures: str) -> None:
    cause = first_cause(_parts(failures), False)
    assert f"{cause.text}; {cause.rank}, {cause.node}; {cause.sure}" == SAID[failures]


def test_a_missing_gpu_is_the_nodes_if_its_job_asked_for_one() -> None:
    part = Part("a", failures=[Failure("user_error", "no GPU", Place("a", 1), None, "n1", None, False, GPU_MISSING)])
    for facts, asked in (({}, True), ({"device": [Fact("h100", Place("a", 1), "x")]}, False)):
        part.facts = facts
        cause = first_cause([part], False, asked)
        assert (cause.ended, cause.failed_node, cause.ordered[0].to_do) == ("node_failure", "n1", GPU_MISSING_ON_NODE)
    part.facts = {}
    assert first_cause([part], False).ended == "user_error"


def _blocks(text: str) -> list[str]:
    """The failures of lines that are joined, each as it is said: `line words`; ` | ` separates the lines."""
    failures = [_failure(f"error a:{each.replace(' ', ' echo ', 1)}") for each in text.split(" | ")]
    failures = [replace(each, rank=7, node="n7") if re.match("rank|host", each.message) else each for each in failures]
    joined = join_blocks(failures)
    return [f"{each.place.line} {each.message} {each.rank or '-'} {each.node or '-'}" for each in joined]


@pytest.mark.parametrize(
    ("lines", "joined"),
    [
        (
            "1 host : n7 | 2 rank : 7 (local_rank: 3) | 3 exitcode : 1 (pid: 2)",
            ["3 rank 7 ended with exit code 1 7 n7"],
        ),
        ("1 rank : 7 (local_rank: 3) | 3 exitcode : -9 (", ["3 rank 7 was ended by signal 9 (SIGKILL) 7 -"]),
        ("1 rank : 7 (local_rank: 3) | 3 exitcode : -99 (", ["3 rank 7 was ended by signal 99 7 -"]),
        ("1 rank : 7 (local_rank: 3) | 3 exitcode : 0 (", ["3 rank 7 ended with exit code 0 7 -"]),
        (
            "1 Root Cause (first | 2 rank : 7 (local_rank: 3) | 9 exitcode : 1",
            ["9 rank 7 ended with exit code 1, the first that its launcher saw fail 7 -"],
        ),
        (
            "1 Root Cause (first | 2 rank : 7 (local_rank: 3) | 10 exitcode : 1",
            ["1 Root Cause (first - -", "2 rank : 7 (local_rank: 3) 7 n7", "10 exitcode : 1 - -"],
        ),
        ("1 host : n7 | 3 exitcode : 1", ["1 host : n7 7 n7", "3 exitcode : 1 - -"]),
        (
            "1 host : n7 | 2 host : n7 | 3 rank : 7 (local_rank: 3) | 4 exitcode : 1",
            ["1 host : n7 7 n7", "4 rank 7 ended with exit code 1 7 n7"],
        ),
        ("5 exitcode : 1 | 6 gone", ["5 exitcode : 1 - -", "6 gone - -"]),
    ],
)
def test_torchelastics_blocks(lines: str, joined: list[str]) -> None:
    assert _blocks(lines.replace("(pid: 2)", "")) == joined


IGNORES, THREAD, ATEXIT = "echo Exception ignored in: x", "echo Exception in thread T", "echo Error in atexit._run"
# Failures of a log whose program is done in line 50 -> the lines of those that count.
IGNORED = {
    f"error a:1 {IGNORES} | error a:41 {KEY}": "",
    f"error a:1 {IGNORES} | error a:42 {KEY}": "42",
    f"error a:1 {IGNORES} | error a:2 {KEY} | error a:3 {KEY}": "3",
    f"error a:1 r1 {IGNORES} | error a:2 r2 {KEY} | error a:3 r1 {KEY}": "2",
    f"error a:1 r1 {IGNORES} | error a:2 {KEY}": "",
    f"error a:1 {IGNORES} | error a:2 r2 {KEY}": "",
    f"error a:49 {THREAD} | error a:50 {KEY}": "50",
    f"error a:50 {THREAD} | error a:51 {KEY}": "51",
    f"error a:51 {THREAD} | error a:52 {KEY}": "",
    f"error a:51 {ATEXIT} | error a:52 {KEY}": "",
    f"error a:51 Exception in thread T | error a:52 {KEY}": "51 52",
    "error a:51 Fatal Python error: PyGILState_Release | error a:52 Fatal Python error: Segmentation fault": "52",
    "error a:50 Fatal Python error: PyGILState_Release | error a:51 Fatal Python error: Bus error": "50 51",
    "error a:51 Fatal Python error: Floating point | error a:52 Fatal Python error: Illegal instruction": "51 52",
    f"error a:51 {KEY}": "51",
}


@pytest.mark.parametrize("failures", IGNORED)
def test_what_an_interpreter_ignores_or_says_at_its_end(failures: str) -> None:
    kept = without_ignored([_failure(each) for each in failures.split(" | ")], 50)
    assert " ".join(str(each.place.line) for each in kept) == IGNORED[failures]


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
