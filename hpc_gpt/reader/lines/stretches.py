"""Adds stretches of lines of known kinds to a part at once.

The effect of a line on a part depends on the lines before it: it may open another part, belong to another rank, or
repeat a step. Stretches without such a line are taken at once, and the line that ends a stretch is read by itself.
"""

from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from hpc_gpt.reader.lines.fields import MEMORY_FIELDS, STEP_FACTS, STEP_FIELDS
from hpc_gpt.reader.lines.further_figures import belong, further_figures
from hpc_gpt.reader.lines.growing_parts import (
    ALL_TIMERS,
    BARS,
    MOST_GIB,
    OTHER_BARS,
    OTHER_RANKS,
    PRINTED_BEFORE,
    SOME_TIMERS,
    TOO_MANY_PARTS,
)
from hpc_gpt.reader.lines.line_kinds import TIME, LineBlock, LineKind, is_bar, is_more, is_timers
from hpc_gpt.reader.lines.line_reader import LineReader
from hpc_gpt.reader.lines.matches import DialectPattern, RuleMatch, rank_of, row_of, time_of, values_of
from hpc_gpt.reader.lines.part import Place
from hpc_gpt.reader.lines.step_rows import SUMMED
from hpc_gpt.reader.lines.steps import NOT_FINITE, Mask, Places, StepColumn, no_places

_FEW = 16  # up to so many lines are read one by one
_MOST_VALUES = 16  # distinct values of a fact that are used per stretch
# Lines between those of known kinds whose order does not matter: {index: (text, matches)}.
Unordered = dict[int, tuple[str, list[RuleMatch]]]
# (index of a line, call) to make in order of the lines after all lines of a stretch were added.
Deferred = list[tuple[int, Callable[[], None]]]


def is_unordered(rule: DialectPattern) -> bool:
    """Whether the effect of a pattern is independent of earlier lines of steps of the part."""
    return rule.pattern.kind in ("eval", "save") and not rule.pattern.facts


def take_known(reader: LineReader, block: LineBlock, start: int, stop: int, unordered: Unordered) -> None:
    """Takes the lines of known kinds from `start` to before `stop`, and the lines `between` them."""
    if start == stop:
        return None
    row, last_row = np.searchsorted(block.steps, (start, stop)).tolist()
    near, last_near = np.searchsorted(block.others, (start, stop)).tolist()
    if last_row - row + last_near - near <= _FEW:
        lines = np.concatenate((block.steps[row:last_row], block.others[near:last_near]))
        return _one_by_one(reader, block, lines, unordered)
    while row < last_row:
        cut = _first_single(reader, block, row, last_row)
        until = int(block.steps[cut]) if cut < last_row else stop
        next_near = int(np.searchsorted(block.others, until))
        unordered_before = {index: line for index, line in unordered.items() if index < until}
        unordered = {index: line for index, line in unordered.items() if index >= until}
        _stretch(reader, block, np.arange(row, cut), block.others[near:next_near], unordered_before)
        if cut < last_row:
            _one_by_one(reader, block, block.steps[cut : cut + 1], {})
        row, near = cut + 1, next_near
    return _stretch(reader, block, no_places(), block.others[near:last_near], unordered)


def _one_by_one(reader: LineReader, block: LineBlock, lines: Places, unordered: Unordered) -> None:
    for index in sorted([*lines.tolist(), *unordered]):
        text, matches = unordered[index] if index in unordered else block.text_and_matches(index)
        reader.apply(int(block.numbers[index]), text, matches)


def _first_single(reader: LineReader, block: LineBlock, start: int, stop: int) -> int:
    """The first line of steps that must be read by itself: the first line of a dialect, a line whose step goes back, or
    a change between lines with and without a step."""
    if reader.full:
        return stop
    first = stop
    for name, rows in _by_dialect(block, np.arange(start, stop)):
        rows_so_far = reader.rows[-1].get(name)
        if rows_so_far is None:
            first = min(first, int(rows[0]))
            continue
        if (rows_so_far.count == 1 and reader.parts[-1].step_rank) or reader.banner > rows_so_far.open_line:
            first = min(first, int(rows[0]))
        is_of_step_rank = _lines_of_step_rank(reader, block, rows)
        if not is_of_step_rank.all() and rows_so_far.lacks_loss:
            others = rows[~is_of_step_rank]
            losses = np.isfinite(block.column("loss", block.steps[others]))
            if not rows_so_far.has_printed_loss:
                losses[block.not_finite("loss", block.steps[others])] = True
            first = min([first, *others[losses][:1].tolist()])
        rows = rows[is_of_step_rank]
        back = np.diff(block.step[rows], prepend=_before(rows_so_far.last_step)) < 0
        lacks = np.isnan(block.step[rows])
        back |= np.diff(lacks, prepend=rows_so_far.last_step is None)
        if reader.has_ended(name):
            epochs = block.column("epoch", block.steps[rows])
            back |= lacks & (np.diff(epochs, prepend=rows_so_far.open_row.get("epoch", np.nan)) < 0)
        if back.any():
            first = min(first, int(rows[np.argmax(back)]))
    return first


def _before(step: float | None) -> float:
    return -1.0 if step is None else step


def _by_dialect(block: LineBlock, rows: Places) -> list[tuple[str, Places]]:
    if len(block.dialects) < 2:
        return [(block.dialects[0], rows)] if len(rows) else []
    return [(block.dialects[number], rows[block.dialect[rows] == number]) for number in np.unique(block.dialect[rows])]


def _lines_of_step_rank(reader: LineReader, block: LineBlock, rows: Places) -> Mask:
    """Mask of the lines of steps that do not belong to other ranks."""
    step_rank = reader.parts[-1].step_rank
    if block.rank is None or step_rank is None:
        return np.ones(len(rows), np.bool_)
    ranks = block.rank[rows]
    return np.asarray(np.isnan(ranks) | (ranks == step_rank))


def _stretch(reader: LineReader, block: LineBlock, rows: Places, other_lines: Places, unordered: Unordered) -> None:
    """Adds lines that all go into the last part; beyond the first and the last line their order does not matter."""
    timers, bars, more = (block.lines_where(each, other_lines) for each in (is_timers, is_bar, is_more))
    is_next_start = len(bars) > 0 and reader.failed_after_steps()
    # A bar between two equal lines of steps shows that they are of two steps.
    repeats = len(bars) and any(
        name in reader.rows[-1] and _repeated(block, lines, reader.rows[-1][name].open_row)
        for name, lines in _by_dialect(block, rows)
    )
    belongs_elsewhere = len(more) and (reader.full or not belong(block, block.steps[rows], more))
    if is_next_start or repeats or belongs_elsewhere:
        return _one_by_one(reader, block, np.concatenate((block.steps[rows], other_lines)), unordered)
    if len(bars) and not _bars_stand_alone(reader, block, block.steps[rows], bars):
        unordered = unordered | {index: block.text_and_matches(index) for index in bars.tolist()}
        bars = no_places()
    last_at = _note_times(reader, block, np.concatenate((block.steps[rows], timers, bars, more)), unordered)
    deferred: Deferred = []  # facts: the first values are kept, so their order matters
    for name, of_dialect in _by_dialect(block, rows):
        reader.count(name, len(of_dialect))
        _collect_facts(reader, block, block.steps[of_dialect], deferred)
        if reader.full:
            reader.leave_out(TOO_MANY_PARTS, len(of_dialect))
            continue
        is_of_step_rank = _lines_of_step_rank(reader, block, of_dialect)
        if not is_of_step_rank.all():
            reader.leave_out(OTHER_RANKS, int((~is_of_step_rank).sum()))
            _memory_of_others(reader, block, of_dialect[~is_of_step_rank])
            _other_ranks(reader, block, of_dialect[~is_of_step_rank])
            of_dialect = of_dialect[is_of_step_rank]
        before = reader.rows[-1][name]
        again = np.diff(block.step[of_dialect], prepend=_before(before.last_step)) == 0
        if again.any():
            _see_again(reader, block, name, of_dialect, again)
        of_dialect = of_dialect[~again]
        repeated = _repeated(block, of_dialect, before.open_row)
        if again.any() or len(repeated):
            reader.leave_out(PRINTED_BEFORE, int(again.sum()) + len(repeated))
            of_dialect = np.delete(of_dialect, repeated)
        if len(of_dialect):
            _take_rows(reader, block, name, of_dialect, more, deferred)
    for lines in (timers, bars):
        _collect_facts(reader, block, lines, deferred)
        for kind, of_kind in block.by_kind(lines):
            deferred.append((int(lines[of_kind[0]]), partial(reader.count, kind.rule.dialect.name, len(of_kind))))
    if len(bars):
        _take_bars(reader, block, bars, deferred)
    for index, (text, matches) in unordered.items():
        deferred.append((index, partial(reader.apply, int(block.numbers[index]), text, matches)))
    for _, call in sorted(deferred, key=lambda pair: pair[0]):
        call()
    if unordered:
        reader.note_time(last_at)
    return _take_timers(reader, block, timers)


def _note_times(reader: LineReader, block: LineBlock, lines: Places, unordered: Unordered) -> float | None:
    """Notes the first and the last time of day of some lines in the reader; returns the last."""
    seen = [(index, when) for index, (text, _) in unordered.items() if (when := time_of(text)) is not None]
    timed = np.sort(lines[block.table.layout(TIME).forms[block.kinds[lines]] > 0])
    if len(timed):
        ends = timed[[0, -1]]
        at = block.column(TIME, ends)
        if np.isnan(at).any():
            ends, at = timed, block.column(TIME, timed)
        seen += [(int(index), float(second)) for index, second in zip(ends, at, strict=True) if second == second]
    if not seen:
        return None
    reader.note_time(min(seen)[1])
    reader.note_time(max(seen)[1])
    return max(seen)[1]


def _states_facts(kind: LineKind) -> bool:
    return any(name not in STEP_FIELDS for name in kind.rule.pattern.facts)


def _collect_facts(reader: LineReader, block: LineBlock, lines: Places, deferred: Deferred) -> None:
    """Collects the facts that patterns state for every line of their kinds."""
    lines = block.lines_where(_states_facts, lines)
    for kind, rows in block.by_kind(lines):
        index = int(lines[rows[0]])
        for name, value in kind.rule.pattern.facts.items():
            if name not in STEP_FIELDS:
                place = Place(reader.file, int(block.numbers[index]))
                deferred.append((index, partial(reader.fact, name, value, place, kind.rule)))


def _see_again(reader: LineReader, block: LineBlock, name: str, rows: Places, again: Mask) -> None:
    """Tells the reader of lines of a dialect's steps that were printed before, `again` among `rows`, until one shows
    that several ranks have the same label."""
    if block.rank is None:
        return
    taken = np.maximum.accumulate(np.where(again, -1, np.arange(len(rows))))  # the taken line before each
    lengths = (block.stops - block.starts)[block.steps[rows]]
    likely = again & ~np.isnan(block.rank[rows])
    likely &= (taken < 0) | (lengths == lengths[taken]) | (b"\x1b" in block.data)  # a colour is not part of the text
    for row in np.flatnonzero(likely).tolist():
        if reader.parts[-1].tasks:
            return
        above = block.text(int(block.steps[rows[taken[row]]])) if taken[row] >= 0 else reader.taken_lines.get(name)
        reader.note_repeated(block.text(int(block.steps[rows[row]])), above)


def _repeated(block: LineBlock, rows: Places, row: Mapping[str, float]) -> list[int]:
    """The places of lines of steps that repeat the last taken line before them; `row`: the one before the first line.

    Only lines with an epoch and without a step are compared; those with a step are compared by it elsewhere.
    """
    lines = block.steps[rows]
    if not block.has("epoch", lines):
        return []
    loss = block.column("loss", lines)
    likely = np.isnan(block.step[rows]) & _as_before(block.column("epoch", lines), row.get("epoch", np.nan))
    likely &= np.isnan(loss) | _as_before(loss, row.get("loss", np.nan))
    repeated: list[int] = []
    for index in np.flatnonzero(likely).tolist():
        if index and index - 1 not in repeated[-1:]:
            row = _row(block, int(lines[index - 1]))
        figures = _row(block, int(lines[index]))
        if all(row.get(name) == value for name, value in figures.items() if name != "at"):
            repeated.append(index)
    return repeated


def _as_before(column: StepColumn, first: float) -> Mask:
    """Mask of the figures that equal the one before them, also infinite ones."""
    return np.asarray(column == np.concatenate(([first], column[:-1])))


def _row(block: LineBlock, index: int) -> dict[str, float]:
    text, ((match, rule),) = block.text_and_matches(index)
    return row_of(values_of(text, match, rule.pattern), time_of(text))


def _take_rows(
    reader: LineReader, block: LineBlock, name: str, rows_of_dialect: Places, more: Places, deferred: Deferred
) -> None:
    """Adds lines of steps of one dialect to its columns, and `more` figures of them; their steps do not go back."""
    lines = block.steps[rows_of_dialect]
    begun = int(np.searchsorted(more, lines[0]))
    _one_by_one(reader, block, more[:begun], {})  # of the step before
    more = more[begun:]
    rows = reader.rows_of(name, None)
    before = rows.count
    first = rows.first_kept()
    kept_lines = lines[:-1][first :: rows.stride]
    kinds = block.kinds_of(lines)
    fields = {field for kind in kinds for field in kind.fields}
    columns = {field: block.column(field, kept_lines) for field in STEP_FIELDS if field in fields and field != "at"}
    if "at" in fields or block.has(TIME, lines):
        printed = block.table.has("at")[block.kinds[kept_lines]]
        columns["at"] = np.where(printed, block.column("at", kept_lines), block.column(TIME, kept_lines))
    further = further_figures(block, lines, more)
    for field_name, column in further.items():
        kept = column[:-1][first :: rows.stride]
        known = columns.get(field_name)
        columns[field_name] = kept if known is None else np.where(np.isnan(known), kept, known)
    totals = {}
    for field_name in SUMMED:
        if field_name in fields:
            column = block.column(field_name, lines[:-1])
            if not np.isnan(column).all():
                totals[field_name] = float(np.nansum(np.where(column >= 0, column, 0)))
    if any(kind.rule.dialect.last_resort for kind in kinds):
        for kind, of_kind in block.by_kind(lines):
            # Lines of one kind have one shape, so two of them are alike.
            for row in of_kind[:2] if kind.rule.dialect.last_resort else ():
                rows.see_shape(block.text(int(lines[row])))
    bad = np.full(len(lines), np.nan)
    for field_name, value in NOT_FINITE.items():
        bad[block.not_finite(field_name, lines)] = value
    if not np.isnan(bad).all():
        columns["not_finite"] = bad[:-1][first :: rows.stride]
        if losses := int((bad[:-1] == NOT_FINITE["loss"]).sum()):
            totals["nan_loss"] = float(losses)
    reader.taken_lines[name] = block.text(int(lines[-1]))
    last = _row(block, int(lines[-1])), int(block.numbers[lines[-1]])
    last = {**{name: column[-1] for name, column in further.items() if column[-1] == column[-1]}, **last[0]}, last[1]
    rows.add_block(len(lines) - 1, block.numbers[kept_lines], columns, totals, last)
    reader.bound_rows(rows, before)
    for field_name in STEP_FACTS:
        _facts(reader, block, field_name, lines, deferred)
    _memory(reader, block, lines)
    if len(more):
        reader.count(name, len(more))
        _memory(reader, block, more)


def _facts(reader: LineReader, block: LineBlock, name: str, lines: Places, deferred: Deferred) -> None:
    """Adds the values of a field of lines."""
    if not block.has(name, lines):
        return
    having = lines[block.table.has(name)[block.kinds[lines]]]
    values = block.column(name, having)
    firsts = np.zeros(1, np.int64) if (values == values[0]).all() else np.unique(values, return_index=True)[1]
    # If there are very many values, the first ones and the largest are used.
    for first in np.unique(np.append(np.sort(firsts)[:_MOST_VALUES], firsts[-1:])).tolist():
        index, value = int(having[first]), float(values[first])
        place, rule = Place(reader.file, int(block.numbers[index])), block.table.kind(int(block.kinds[index])).rule
        deferred.append((index, partial(reader.fact, name, value, place, rule)))


def _bars_stand_alone(reader: LineReader, block: LineBlock, steps: Places, bars: Places) -> bool:
    """Whether lines of steps between the bars cannot change what the bars count."""
    kinds = block.kinds_of(bars)
    dialects = {kind.rule.dialect.name for kind in kinds}
    stated = any("steps_planned" in kind.rule.pattern.facts for kind in block.kinds_of(steps))
    if stated or len(dialects) > 1:
        return False
    if block.has("steps_planned", steps):
        # Lines of steps that name the one known goal do not change what a bar means.
        goals = set(reader.planned(kinds[0].rule))
        named = block.column("steps_planned", steps)
        if len(goals) != 1 or not (np.isnan(named) | (named == goals.pop())).all():
            return False
    return dialects == {BARS} or not block.has("steps_planned", bars)


def _take_bars(reader: LineReader, block: LineBlock, bars: Places, deferred: Deferred) -> None:
    """Adds bars of one dialect."""
    planned = block.column("steps_planned", bars)
    if goals := reader.planned(block.table.kind(int(block.kinds[bars[0]])).rule):
        other = np.isin(planned, [goal for goal in np.unique(planned).tolist() if goal == goal and goal not in goals])
        if other.any():
            reader.leave_out(OTHER_BARS, int(other.sum()))
            bars = bars[~other]
    _facts(reader, block, "steps_planned", bars, deferred)
    bars = bars[: reader.reserve("bars", len(reader.parts[-1].progress), len(bars))]
    elapsed = [None if seconds != seconds else seconds for seconds in block.column("elapsed_s", bars).tolist()]
    taken = zip(block.column("step", bars).tolist(), elapsed, block.numbers[bars].tolist(), strict=True)
    reader.parts[-1].progress += taken
    reader.bar_totals[-1] += block.column("steps_planned", bars).tolist()


def _other_ranks(reader: LineReader, block: LineBlock, rows: Places) -> None:
    assert block.rank is not None
    noted = reader.parts[-1].other_ranks
    ranks, first = np.unique(block.rank[rows], return_index=True)
    for rank, index in zip(ranks.tolist(), first.tolist(), strict=True):
        if int(rank) not in noted:
            reader.note_rank(int(rank), block.text(int(block.steps[rows[index]])))


def _memory_of_others(reader: LineReader, block: LineBlock, rows: Places) -> None:
    """Adds peaks of memory from the lines of ranks whose steps are not read."""
    assert block.rank is not None
    ranks = block.rank[rows]
    for rank in np.unique(ranks):
        _memory(reader, block, block.steps[rows[ranks == rank]])


def _memory(reader: LineReader, block: LineBlock, lines: Places) -> None:
    """Adds peaks of memory from lines of steps: only rising and impossible figures are read one by one."""
    if not any(block.has(name, lines) for name in MEMORY_FIELDS):
        return
    columns = [block.column(name, lines) for name in MEMORY_FIELDS]
    # If the first line had no label, lines of several ranks are read: each rank has its own peak.
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


def _take_timers(reader: LineReader, block: LineBlock, timers: Places) -> None:
    """Adds lines of timers: all of the first ones of a part, then some."""
    if not len(timers):
        return
    first = reader.timer_lines.get("", 0)
    nth = first + np.arange(len(timers))
    for place in np.flatnonzero((nth < ALL_TIMERS) | (nth % SOME_TIMERS == 0)).tolist():
        if place or first:
            reader.timer_lines[""] = first + place
        text, ((match, rule),) = block.text_and_matches(int(timers[place]))
        reader.timers(values_of(text, match, rule.pattern))
    reader.timer_lines[""] = first + len(timers)
