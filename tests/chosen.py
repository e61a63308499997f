"""Chooses the tests that a session runs, by two variables.

- Neither: all but those marked `long` (`make test`).
- CI_DAY=2026-12-01: those, the long ones marked `always`, and of the other long ones the sixth whose turn it is on that
  day (`.ci/run`). In six days in a row each has its turn once.
- ALL_TESTS=true: all (`make test-all`).
"""

import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from tests import ALL_TESTS

DAY = None if ALL_TESTS else os.environ.get("CI_DAY")
TURNS = 6
# What pytest-xdist appends to the name of a test in a group.
GROUP = re.compile(r"@[\w-]+$")


@dataclass(frozen=True)
class Long:
    """A long test runs `always` in continuous integration, or when the turn of its `name` comes."""

    always: bool
    name: str


def turn_of(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % TURNS


def turn_of_day(day: str) -> int:
    """The turn of a UTC day, given as 2026-12-01; ValueError for a text that is no date."""
    return (date.fromisoformat(day) - date(1970, 1, 1)).days % TURNS


def runs_today(test: Long, day: str | None = DAY) -> bool:
    return ALL_TESTS or (day is not None and (test.always or turn_of(test.name) == turn_of_day(day)))


def long_tests(items: Iterable[pytest.Item]) -> dict[pytest.Item, Long]:
    """The tests marked `long`, less the cases that the mark's `but` leaves in `make test`."""
    tables: dict[tuple[pytest.Item, str], list[pytest.Function]] = defaultdict(list)
    marked = {item: list(item.iter_markers("long")) for item in items}
    for item, marks in marked.items():
        if marks and isinstance(item, pytest.Function) and all("but" in mark.kwargs for mark in marks):
            tables[item.parent, item.originalname].append(item)
    short = set().union(*(_kept(cases, marked[cases[0]][0].kwargs["but"]) for cases in tables.values()))
    return {item: _long(item, marks) for item, marks in marked.items() if marks and item not in short}


def _long(item: pytest.Item, marks: Sequence[pytest.Mark]) -> Long:
    names = [mark.kwargs["launch"] for mark in marks if "launch" in mark.kwargs]
    return Long(any(mark.kwargs.get("always") for mark in marks), names[0] if names else GROUP.sub("", item.nodeid))


def _kept(cases: list[pytest.Function], but: str) -> set[pytest.Function]:
    """The first case, or few that hold every value of each parameter that any of them holds."""
    if but == "first":
        return {cases[0]}
    # By identity: a value may have no hash.
    values = {case: {(name, id(value)) for name, value in case.callspec.params.items()} for case in cases}
    missing = set().union(*values.values())
    kept = []
    while missing:
        kept.append(max(cases, key=lambda case: len(values[case] & missing)))
        missing -= values[kept[-1]]
    return set(kept)


def asked(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """The values of a parameter among the tests that this session runs of a fixture's module, each once.

    A fixture that many tests read does no more than these ask for.
    """
    found: list[Any] = []
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == request.path and hasattr(item, "callspec"):
            value = item.callspec.params.get(name)
            found += [value] * (name in item.callspec.params and value not in found)
    return found
