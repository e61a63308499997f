"""A log line by line, as its program writes it: the figures of its steps, and what went wrong last.

For the supervisor of a program that is not ours. A log that is there is read by `readers.logs`, whole and in blocks.
"""

from __future__ import annotations

import collections
import re
from dataclasses import dataclass

from hpc_gpt.readers.logs.matches import find, float_of, rank_of, row_of, values_of, without_colours
from hpc_gpt.readers.pattern import MEMORY_FIELDS, Pattern
from hpc_gpt.secrets import hide_secrets

# A failure further up is not why the program ended.
_KEPT_LINES = 200
_LONGEST = 4000


@dataclass(frozen=True)
class LiveFailure:
    """A line that says what went wrong: its class of state.ENDED. `echo`: another failure caused it."""

    ended: str
    words: str
    echo: bool


class LiveLines:
    """The lines of one program, in their order. Dialects read its steps, or `pattern`, a regex, if it is given."""

    def __init__(self, pattern: str | None = None) -> None:
        self._own = None if pattern is None else (re.compile(pattern), Pattern("step", "", pattern))
        self._failures: collections.deque[tuple[int, LiveFailure]] = collections.deque(maxlen=_KEPT_LINES)
        self._count = 0
        self._rank: int | None = None
        # The figures of a step whose number the next bar has, and of an evaluation that the next step has.
        self._waits: dict[str, float] | None = None
        self._loss_eval: float | None = None

    def take(self, line: str) -> dict[str, float] | None:
        """The figures of a step by the fields of readers/pattern.py, `step` among them, if the line has one."""
        self._count += 1
        line = without_colours(line[:_LONGEST])
        row: dict[str, float] | None = None
        failures: list[LiveFailure] = []
        if self._own is not None and (own := self._own[0].search(line)):
            row = _figures(values_of(line, own, self._own[1]))
        for match, each in find(line):
            kind = each.pattern.kind
            if kind == "failure":
                values = values_of(line, match, each.pattern)
                words = hide_secrets(str(values.get("words") or line.strip()))[:400]
                failures.append(LiveFailure(str(each.pattern.ended), words, each.pattern.echo))
            elif self._own is None and kind in ("step", "progress", "eval"):
                row = row or self._by_dialect(kind, values_of(line, match, each.pattern), rank_of(line))
        if failures:  # of one line the most specific, as in causes.py: each exception is also an `error`
            self._failures.append((self._count, min(failures, key=_plainness)))
        if row is None or "step" not in row or not row["step"] >= 0:
            return None
        if self._loss_eval is not None:
            row, self._loss_eval = {"loss_eval": self._loss_eval, **row}, None
        return row

    def _by_dialect(self, kind: str, values: dict[str, float | str], rank: int | None) -> dict[str, float] | None:
        """The row that is whole with these values. Of ranks that all print, the first one's lines count."""
        if kind == "eval":
            self._loss_eval = float_of(values, "loss_eval")
            return None
        if kind == "progress":
            step, waits = float_of(values, "step"), self._waits
            self._waits = None
            return None if waits is None or step is None else {**waits, "step": step}
        if rank is not None and self._rank is not None and rank != self._rank:
            return None
        self._rank = rank if self._rank is None else self._rank
        row = _figures(values)
        if "step" in row:
            return row
        self._waits = row
        return None

    @property
    def failure(self) -> LiveFailure | None:
        """The first failure in the last lines that no other caused, else the first one; None without one."""
        late = [each for number, each in self._failures if number > self._count - _KEPT_LINES]
        return next((each for each in late if not each.echo), late[0] if late else None)


def _plainness(failure: LiveFailure) -> tuple[bool, bool]:
    return failure.ended == "error" and not failure.echo, failure.ended == "error"


def _figures(values: dict[str, float | str]) -> dict[str, float]:
    memory = {name: gib for name in MEMORY_FIELDS if (gib := float_of(values, name)) is not None}
    return {**row_of(values, None), **memory}
