"""Lines of steps and of timers of a block whose kinds are known, many at once, into the part that they are of.

What a line does to a part depends on the lines before it: it may open another part, or be one of another rank or one
printed before. So stretches in which nothing of that order happens are taken at once, and the line that breaks one is
read for itself.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.fields import STEP_FACTS, STEP_FIELDS
from hpc_gpt.readers.log_files.armed import Armed, Found
from hpc_gpt.readers.log_files.block import Block
from hpc_gpt.readers.log_files.digit_columns import Places
from hpc_gpt.readers.log_files.line_kinds import MEMORY_FIELDS, LineKind
from hpc_gpt.readers.log_files.lines import (
    ALL_TIMERS,
    FULL,
    OTHER_RANKS,
    PRINTED_BEFORE,
    SOME_TIMERS,
    LineReader,
)
from hpc_gpt.readers.log_files.match_values import row_of, values_of
from hpc_gpt.readers.log_files.prefix import rank_of, time_of
from hpc_gpt.readers.log_files.sound import MOST_GIB
from hpc_gpt.readers.log_files.step_rows import SUMMED
from hpc_gpt.readers.part import Column

_FEW = 3  # lines that are sooner read one by one
_MOST_VALUES = 16  # distinct values of a fact that are looked at in a stretch


# Lines that stand between those of known kinds and ask for nothing of their order, by index: text, what is in it.
Between = dict[int, tuple[str, list[Found]]]


def is_between(each: Armed) -> bool:
    """Whether what a pattern says of a line is the same whichever lines of steps of its part come before."""
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
    """The first of some lines of steps that must be read for itself: a dialect's first, or one that goes back."""
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


def _own(reader: LineReader, block: Block, rows: Places) -> NDArray[np.bool_]:
    """Which lines of steps are not those of other ranks."""
    step_rank = reader.parts[-1].step_rank
    if block.rank is None or step_rank is None:
        return np.ones(len(rows), np.bool_)
    ranks = block.rank[rows]
    own: NDArray[np.bool_] = np.isnan(ranks) | (ranks == step_rank)
    return own


def _stretch(reader: LineReader, block: Block, rows: Places, timers: Places, between: Between) -> None:
    """Lines that all go into the part that is, in no order that matters but for first and last ones."""
    last_at = _saw(reader, block, np.concatenate((block.steps[rows], timers)), between)
    later: list[tuple[int, Callable[[], None]]] = []  # facts, by line: the first ones met are kept
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


def _stated(
    reader: LineReader, block: Block, kind: LineKind, index: int, later: list[tuple[int, Callable[[], None]]]
) -> None:
    """What a pattern states of every line."""
    for name, value in kind.each.pattern.facts.items():
        if name not in STEP_FIELDS:
            place = block.place(reader, index)
            later.append((index, lambda n=name, v=value, p=place: reader.fact(n, v, p, kind.each)))  # type: ignore[misc]


def _take_rows(
    reader: LineReader, block: Block, name: str, of: Places, later: list[tuple[int, Callable[[], None]]]
) -> None:
    """Lines of steps of one dialect, none of them before the last one, into its columns."""
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
    """Of lines of one kind, how many have a loss of NaN; where it is digits, none has."""
    loss = kind.columns.get("loss")
    if loss is None or loss.numeral is not None:
        return 0
    return int((~np.isfinite(loss.read(block.data, block.starts[lines]))).sum())


def _facts_of_steps(
    reader: LineReader, block: Block, lines: Places, later: list[tuple[int, Callable[[], None]]]
) -> None:
    for name in STEP_FACTS:
        having = lines[block.table.layout(name).forms[block.kinds[lines]] > 0]
        if not len(having):
            continue
        values = block.column(name, having)
        firsts = np.zeros(1, np.int64) if (values == values[0]).all() else np.unique(values, return_index=True)[1]
        # Of very many values the first ones are looked at, and the largest.
        for first in np.unique(np.append(np.sort(firsts)[:_MOST_VALUES], firsts[-1:])).tolist():
            index, value = int(having[first]), float(values[first])
            place, each = block.place(reader, index), block.table.kind(int(block.kinds[index])).each
            later.append((index, lambda n=name, v=value, p=place, e=each: reader.fact(n, v, p, e)))  # type: ignore[misc]


def _memory_of_others(reader: LineReader, block: Block, rows: Places) -> None:
    """Peaks of memory that the lines of ranks tell whose steps are not taken."""
    assert block.rank is not None
    ranks = block.rank[rows]
    for rank in np.unique(ranks):
        _memory(reader, block, block.steps[rows[ranks == rank]])


def _memory(reader: LineReader, block: Block, lines: Places) -> None:
    """Peaks of memory that lines of steps tell: only those that rise, or cannot be, are read for themselves."""
    if not any(name in kind.columns for kind, _ in block.by_kind(lines) for name in MEMORY_FIELDS):
        return
    columns = [block.column(name, lines) for name in MEMORY_FIELDS]
    # Lines of several ranks, where the first of them bore no label, each have a peak of their own.
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
        reader.memory(values, rank_of(block.text(line)), block.place(reader, line))


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
