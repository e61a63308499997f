"""Lines of a log taken together, and which of them are of what kind."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from hpc_gpt.readers.log_files.armed import Found
from hpc_gpt.readers.log_files.digit_columns import Places
from hpc_gpt.readers.log_files.line_kinds import LineKind, LineKinds
from hpc_gpt.readers.log_files.lines import LineReader
from hpc_gpt.readers.part import Column, Place


def _no_places() -> Places:
    return np.zeros(0, np.int64)


@dataclass
class Block:
    """Lines of a log. `starts`, `stops`: where each is in `data`. `numbers`: its line in the log.

    `kinds`: its number in the table of kinds. `steps`, `timers`: which lines are such.
    """

    data: bytes
    starts: Places
    stops: Places
    numbers: Places
    kinds: Places = field(default_factory=_no_places)
    steps: Places = field(default_factory=_no_places)
    timers: Places = field(default_factory=_no_places)
    step: Column = field(default_factory=lambda: np.zeros(0))  # by line of steps: its step
    rank: Column | None = None  # its label, NaN without one; None where no line has one
    dialect: Places = field(default_factory=_no_places)  # and the number of its dialect
    dialects: list[str] = field(default_factory=list)
    table: LineKinds = field(default_factory=LineKinds)

    def line(self, index: int) -> bytes:
        """The bytes of a line."""
        return self.data[self.starts[index] : self.stops[index]]

    def text(self, index: int) -> str:
        """A line as text."""
        return self.line(index).decode("utf-8", "replace")

    def found(self, index: int) -> tuple[str, list[Found]]:
        """A line of a known kind as text, and what is found in it."""
        text, each = self.text(index), self.table.kind(int(self.kinds[index])).each
        match = each.regex.search(text)
        assert match
        return text, [(match, each)]

    def place(self, reader: LineReader, index: int) -> Place:
        """Where a line is."""
        return Place(reader.file, int(self.numbers[index]))

    def sort_lines(self, table: LineKinds) -> None:
        """Find the lines of steps and of timers by their kinds, and what of every line of steps must be known."""
        self.table = table
        is_steps, is_timers = table.sorts()
        self.steps = np.flatnonzero(is_steps[self.kinds])
        self.timers = np.flatnonzero(is_timers[self.kinds])
        self.step = self.column("step", self.steps)
        self.dialect = np.zeros(len(self.steps), np.int64)
        for kind, rows in self.by_kind(self.steps):
            name = kind.each.dialect.name
            if name not in self.dialects:
                self.dialects.append(name)
            self.dialect[rows] = self.dialects.index(name)
            if kind.rank is not None:
                self.rank = np.full(len(self.steps), np.nan) if self.rank is None else self.rank
                self.rank[rows] = kind.rank.read(self.data, self.starts[self.steps[rows]])

    def by_kind(self, lines: Places) -> list[tuple[LineKind, Places]]:
        """Of some lines, (kind, which of them are of it)."""
        if not len(lines):
            return []
        kinds = self.kinds[lines].astype(np.int16)  # a type that is sorted without comparing
        if (kinds == kinds[0]).all():
            return [(self.table.kind(int(kinds[0])), np.arange(len(lines)))]
        order = np.argsort(kinds, kind="stable")
        rows = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        return [(self.table.kind(int(kinds[of_kind[0]])), of_kind) for of_kind in rows]

    def column(self, name: str, lines: Places) -> Column:
        """A field of some lines of steps, NaN where one lacks it."""
        if not len(lines):
            return np.zeros(0)
        layout, kinds = self.table.layout(name), self.kinds[lines]
        places = self.starts[lines] + layout.starts[kinds]
        forms = layout.forms[kinds]
        if (forms == forms[0]).all():
            return layout.read(int(forms[0]), self.data, places)
        found = np.full(len(lines), np.nan)
        for form in np.flatnonzero(np.bincount(forms)).tolist():
            rows = np.flatnonzero(forms == form)
            found[rows] = layout.read(form, self.data, places[rows])
        return found
