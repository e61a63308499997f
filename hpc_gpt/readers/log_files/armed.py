"""The patterns of all dialects, ready to search a line with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.pattern import Dialect, Pattern


@dataclass(frozen=True)
class Armed:
    """A pattern of a dialect, ready to search with. `number`: its place among all."""

    dialect: Dialect
    pattern: Pattern
    number: int

    @cached_property
    def regex(self) -> re.Pattern[str]:
        """The pattern's, compiled when a line first needs it."""
        return re.compile(self.pattern.regex)


Found = tuple[re.Match[str], Armed]


@cache
def armed() -> tuple[Armed, ...]:
    """Every pattern of every dialect."""
    every = [(dialect, pattern) for dialect in dialects() for pattern in dialect.patterns]
    return tuple(Armed(*pair, number) for number, pair in enumerate(every))


@cache
def by_literal() -> tuple[tuple[str, tuple[Armed, ...]], ...]:
    """The patterns by the words that stand in every line they match."""
    found: dict[str, list[Armed]] = {}
    for each in armed():
        found.setdefault(each.pattern.literal, []).append(each)
    return tuple((literal, tuple(group)) for literal, group in found.items())


def find(line: str, tried: Sequence[Armed] | None = None) -> list[Found]:
    """What the patterns say of a line, or of a piece of one between carriage returns, colours gone.

    `tried`: those that may match it, in the order of their numbers, where they are known.
    """
    if tried is None:
        wanted = [each for literal, group in by_literal() if literal in line for each in group]
        wanted.sort(key=lambda each: each.number)
    else:
        wanted = [each for each in tried if each.pattern.literal in line]
    first = [each for each in wanted if not each.dialect.last_resort]
    found = [(match, each) for each in first for match in each.regex.finditer(line)]
    if not found:
        found = [(match, each) for each in wanted if each.dialect.last_resort for match in each.regex.finditer(line)]
    steps = [(match, each) for match, each in found if each.pattern.kind == "step"]
    if not steps:
        return found
    # A line is of one dialect: that whose match begins first, then the longest.
    _, winner = min(steps, key=lambda pair: (pair[0].start(), -pair[0].end()))
    return [pair for pair in found if pair[1].pattern.kind != "step" or pair[1].dialect is winner.dialect]
