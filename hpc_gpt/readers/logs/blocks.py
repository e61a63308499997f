"""Lines of steps and of timers whose kinds are known, many at once, into the part that they are of.

What a line does to a part depends on the lines before it: it may open another part, or be one of another rank or one
printed before. So stretches in which nothing of that sort happens are taken at once, and the line that ends one is read
by itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hpc_gpt.readers.fields import MEMORY_FIELDS, STEP_FACTS, STEP_FIELDS
from hpc_gpt.readers.logs.line_kinds import LineKind, LineKinds
from hpc_gpt.readers.logs.lines import (
    ALL_TIMERS,
    FULL,
    MOST_GIB,
    OTHER_RANKS,
    PRINTED_BEFORE,
    SOME_TIMERS,
    LineReader,
)
from hpc_gpt.readers.logs.matches import DialectPattern, Found, rank_of, row_of, time_of, values_of
from hpc_gpt.readers.logs.part import Place
from hpc_gpt.readers.steps import SUMMED, Column, Mask, Places

_FEW = 3  # lines that are sooner read one by one
_MOST_VALUES = 16  # distinct values of a fact that are looked at in a stretch


def _no_places() -> Places:
    return np.zeros(0, np.int64)


@dataclass
class Block:
    """Lines of a log. `starts`, `stops`: where each is in `data`. `numbers`: its line in the log.

    `kinds`: its number in the table of kinds. `steps`, `timers`: the lines of steps and of timers.
    """

    data: bytes
    starts: Places
    stops: Places
    numbers: Places
    kinds: Places = field(default_factory=_no_places)
    steps: Places = field(default_factory=_no_places)
    timers: Places = field(default_factory=_no_places)
    step: Column = field(default_factory=lambda: np.zeros(0))  # by line of steps: its step
    rank: Column | None = None  # its label, NaN without one; None if no line has one
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

    def sort_lines(self, table: LineKinds) -> None:
        """Find the lines of steps and of timers by their kinds, and step, dialect and rank of each line of steps."""
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
        """A field of some lines of steps, NaN for one that lacks it."""
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


# Lines between those of known kinds whose order does not matter, by index: text, what is found in it.
Between = dict[int, tuple[str, list[Found]]]
# What is done after the lines of a stretch are in, by the index of its line.
Later = list[tuple[int, Callable[[], None]]]


def is_between(each: DialectPattern) -> bool:
    """Whether what a pattern says of a line does not depend on the lines of steps before it in the part."""
    return each.pattern.kind in ("eval", "save") and not each.pattern.facts


def take_known(reader: LineReader, block: Block, start: int, stop: int, between: Between) -> None:
    """The lines of known kinds between two of a block, and those between them."""
    if start == stop:
        return None
    row, last_row = np.searchsorted(block.steps, (start, stop)).tolist()
    timer, last_timer = np.searchsorted(block.timers, (start, stop)).tolist()
    if last_row - row + last_timer - timer <= _FEW:
        lines = np.concatenate((block.steps[row:last_row], block.timers[timer:last_timer]))
        return _one_by_one(reader, block, lines, between)
    while row < last_row:
        cut = _first_apart(reader, block, row, last_row)
        until = int(block.steps[cut]) if cut < last_row else stop
        next_timer = int(np.searchsorted(block.timers, until))
        here = {index: line for index, line in between.items() if index < until}
        between = {index: line for index, line in between.items() if index >= until}
        _stretch(reader, block, np.arange(row, cut), block.timers[timer:next_timer], here)
        if cut < last_row:
            _one_by_one(reader, block, block.steps[cut : cut + 1], {})
        row, timer = cut + 1, next_timer
    return _stretch(reader, block, np.zeros(0, np.int64), block.timers[timer:last_timer], between)


def _one_by_one(reader: LineReader, block: Block, lines: Places, between: Between) -> None:
    for index in sorted([*lines.tolist(), *between]):
        text, found = between[index] if index in between else block.found(index)
        reader.apply(int(block.numbers[index]), text, found)


def _first_apart(reader: LineReader, block: Block, start: int, stop: int) -> int:
    """The first of some lines of steps that must be read by itself: a dialect's first, or one that goes back."""
    if reader.full:
        return stop
    found = stop
    for name, rows in _by_dialect(block, np.arange(start, stop)):
        known = reader.rows[-1].get(name)
        if known is None:
            found = min(found, int(rows[0]))
            continue
        if known.lacks_first_loss:
            found = min(found, int(rows[0]))
        rows = rows[_own(reader, block, rows)]
        back = np.flatnonzero(np.diff(block.step[rows], prepend=_before(known.last_step)) < 0)
        if len(back):
            found = min(found, int(rows[back[0]]))
    return found


def _before(step: float | None) -> float:
    return -1.0 if step is None else step


def _by_dialect(block: Block, rows: Places) -> list[tuple[str, Places]]:
    if len(block.dialects) < 2:
        return [(block.dialects[0], rows)] if len(rows) else []
    return [(block.dialects[number], rows[block.dialect[rows] == number]) for number in np.unique(block.dialect[rows])]


def _own(reader: LineReader, block: Block, rows: Places) -> Mask:
    """Which lines of steps are not those of other ranks."""
    step_rank = reader.parts[-1].step_rank
    if block.rank is None or step_rank is None:
        return np.ones(len(rows), np.bool_)
    ranks = block.rank[rows]
    return np.asarray(np.isnan(ranks) | (ranks == step_rank))


def _stretch(reader: LineReader, block: Block, rows: Places, timers: Places, between: Between) -> None:
    """Lines that all go into the last part; only which is first and which is last matters."""
    last_at = _saw(reader, block, np.concatenate((block.steps[rows], timers)), between)
    later: Later = []  # facts, by line: the first ones met are kept
    for name, of_dialect in _by_dialect(block, rows):
        part = reader.parts[-1]
        part.dialects[name] = part.dialects.get(name, 0) + len(of_dialect)
        for kind, those in block.by_kind(block.steps[of_dialect]):
            _stated(reader, block, kind, int(block.steps[of_dialect[those[0]]]), later)
        if reader.full:
            reader.leave_out(FULL, len(of_dialect))
            continue
        own = _own(reader, block, of_dialect)
        if not own.all():
            reader.leave_out(OTHER_RANKS, int((~own).sum()))
            _memory_of_others(reader, block, of_dialect[~own])
            of_dialect = of_dialect[own]
        again = np.diff(block.step[of_dialect], prepend=_before(reader.rows[-1][name].last_step)) == 0
        if again.any():
            reader.leave_out(PRINTED_BEFORE, int(again.sum()))
            of_dialect = of_dialect[~again]
        if len(of_dialect):
            _take_rows(reader, block, name, of_dialect, later)
    for kind, those in block.by_kind(timers):
        name = kind.each.dialect.name
        reader.parts[-1].dialects[name] = reader.parts[-1].dialects.get(name, 0) + len(those)
        _stated(reader, block, kind, int(timers[those[0]]), later)
    for index, (text, found) in between.items():
        later.append((index, lambda n=int(block.numbers[index]), t=text, f=found: reader.apply(n, t, f)))  # type: ignore[misc]
    for _, state in sorted(later, key=lambda each: each[0]):
        state()
    if between:
        reader.saw(last_at)
    _take_timers(reader, block, timers)


def _saw(reader: LineReader, block: Block, lines: Places, between: Between) -> float | None:
    """The first and the last time of day of some lines; returns the last."""
    seen = [(index, when) for index, (text, _) in between.items() if (when := time_of(text)) is not None]
    for kind, those in block.by_kind(lines):
        if kind.at is None:
            continue
        indices = np.sort(lines[those])
        ends = indices[[0, -1]]
        at = kind.at.read(block.data, block.starts[ends])
        if np.isnan(at).any():
            ends = indices
            at = kind.at.read(block.data, block.starts[ends])
        seen += [(int(index), float(each)) for index, each in zip(ends, at, strict=True) if each == each]
    if not seen:
        return None
    reader.saw(min(seen)[1])
    reader.saw(max(seen)[1])
    return max(seen)[1]


def _stated(reader: LineReader, block: Block, kind: LineKind, index: int, later: Later) -> None:
    """What a pattern states of every line."""
    for name, value in kind.each.pattern.facts.items():
        if name not in STEP_FIELDS:
            place = Place(reader.file, int(block.numbers[index]))
            later.append((index, lambda n=name, v=value, p=place: reader.fact(n, v, p, kind.each)))  # type: ignore[misc]


def _take_rows(reader: LineReader, block: Block, name: str, of: Places, later: Later) -> None:
    """Lines of steps of one dialect, whose steps do not go back, into its columns."""
    lines = block.steps[of]
    rows = reader.rows_of(name, None)
    before = rows.count
    kept = lines[:-1][rows.first_kept() :: rows.stride]
    kinds = block.by_kind(lines)
    fields = {field for kind, _ in kinds for field in kind.fields}
    columns = {field: block.column(field, kept) for field in STEP_FIELDS if field in fields and field != "at"}
    if any(kind.at is not None for kind, _ in kinds) or "at" in fields:
        columns["at"] = _at_column(block, kept)
    totals = {}
    for field_name in SUMMED:
        if field_name in fields:
            column = block.column(field_name, lines[:-1])
            if not np.isnan(column).all():
                totals[field_name] = float(np.nansum(np.where(column >= 0, column, 0)))
    nans = sum(_nan_losses(block, kind, lines[those[those < len(lines) - 1]]) for kind, those in kinds)
    if nans:
        totals["nan_loss"] = float(nans)
    text, ((match, each),) = block.found(int(lines[-1]))
    last = row_of(values_of(text, match, each.pattern), time_of(text))
    rows.add_block(len(lines) - 1, block.numbers[kept], columns, totals, (last, int(block.numbers[lines[-1]])))
    reader.bound_rows(rows, before)
    _facts_of_steps(reader, block, lines, later)
    _memory(reader, block, lines)


def _at_column(block: Block, lines: Places) -> Column:
    found = np.full(len(lines), np.nan)
    for kind, those in block.by_kind(lines):
        places = block.starts[lines[those]]
        if "at" in kind.fields:
            found[those] = kind.read("at", block.data, places)
        elif kind.at is not None:
            found[those] = kind.at.read(block.data, places)
    return found


def _nan_losses(block: Block, kind: LineKind, lines: Places) -> int:
    """Of lines of one kind, how many have a loss of NaN or infinity; none if it is digits."""
    loss = kind.columns.get("loss")
    if loss is None or loss.numeral is not None:
        return 0
    return int((~np.isfinite(loss.read(block.data, block.starts[lines]))).sum())


def _facts_of_steps(reader: LineReader, block: Block, lines: Places, later: Later) -> None:
    for name in STEP_FACTS:
        having = lines[block.table.layout(name).forms[block.kinds[lines]] > 0]
        if not len(having):
            continue
        values = block.column(name, having)
        firsts = np.zeros(1, np.int64) if (values == values[0]).all() else np.unique(values, return_index=True)[1]
        # Of very many values the first ones are looked at, and the largest.
        for first in np.unique(np.append(np.sort(firsts)[:_MOST_VALUES], firsts[-1:])).tolist():
            index, value = int(having[first]), float(values[first])
            place, each = Place(reader.file, int(block.numbers[index])), block.table.kind(int(block.kinds[index])).each
            later.append((index, lambda n=name, v=value, p=place, e=each: reader.fact(n, v, p, e)))  # type: ignore[misc]


def _memory_of_others(reader: LineReader, block: Block, rows: Places) -> None:
    """Peaks of memory in the lines of ranks whose steps are not taken."""
    assert block.rank is not None
    ranks = block.rank[rows]
    for rank in np.unique(ranks):
        _memory(reader, block, block.steps[rows[ranks == rank]])


def _memory(reader: LineReader, block: Block, lines: Places) -> None:
    """Peaks of memory in lines of steps: only those that rise, or cannot be, are read one by one."""
    if not any(name in kind.columns for kind, _ in block.by_kind(lines) for name in MEMORY_FIELDS):
        return
    columns = [block.column(name, lines) for name in MEMORY_FIELDS]
    # If the first line had no label, lines of several ranks are taken: each rank has a peak of its own.
    risen = np.full(len(lines), block.rank is not None and reader.parts[-1].step_rank is None)
    for column in columns:
        peak = np.maximum.accumulate(np.where(np.isnan(column), -1.0, column))
        risen |= peak > np.append(-1.0, peak[:-1])
        risen |= (column < 0) | (column > MOST_GIB)
    for index in np.flatnonzero(risen).tolist():
        values: dict[str, float | str] = {
            name: float(column[index])
            for name, column in zip(MEMORY_FIELDS, columns, strict=True)
            if not np.isnan(column[index])
        }
        line = int(lines[index])
        reader.memory(values, rank_of(block.text(line)), Place(reader.file, int(block.numbers[line])))


def _take_timers(reader: LineReader, block: Block, timers: Places) -> None:
    """Lines of timers: the first ones of a part all, then some."""
    if not len(timers):
        return
    first = reader.timer_lines.get("", 0)
    nth = first + np.arange(len(timers))
    for place in np.flatnonzero((nth < ALL_TIMERS) | (nth % SOME_TIMERS == 0)).tolist():
        if place or first:
            reader.timer_lines[""] = first + place
        text, ((match, each),) = block.found(int(timers[place]))
        reader.timers(values_of(text, match, each.pattern))
    reader.timer_lines[""] = first + len(timers)
