"""Lines read, for the tests of dialects."""

from __future__ import annotations

from typing import Any

from hpc_gpt.readers.logs import Part
from tests.readers.reading import read_lines


def read_text(text: str) -> Part:
    """The only part of a text."""
    (part,) = read_lines("log", text.split("\n"))
    return part


def step_of(line: str, dialect: str) -> dict[str, float]:
    """Return the one step of a line, by field; the dialect must be the one that reads it."""
    part = read_text(line)
    assert list(part.steps) == [dialect]
    steps = part.steps[dialect]
    assert len(steps) == 1
    return {name: float(steps[name][0]) for name in steps.columns}


def facts_of(part: Part) -> dict[str, list[Any]]:
    """Every value stated of each field."""
    return {name: [fact.value for fact in facts] for name, facts in part.facts.items()}
