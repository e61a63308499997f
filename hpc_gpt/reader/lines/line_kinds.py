"""Kinds of lines: lines that differ in digits only are read like the first of them, many at once.

A program prints its lines from a few formats. With every digit replaced with 0, lines of one format and width are the
same bytes, and their figures are at the same places: one look-up in a table gives the kind of a line. A line that a
pattern matches, or would match with other digits, for certain digits only is read by itself. Colours are part of a
kind: they are removed from its first line only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.reader.lines.columns import LARGE, DigitColumn, TimeColumn
from hpc_gpt.reader.lines.fields import MEMORY_FIELDS, STEP_FACTS, STEP_FIELDS, TEXT_FIELDS, unit
from hpc_gpt.reader.lines.matches import (
    ANSI,
    DialectPattern,
    RuleMatch,
    field_spans,
    find,
    rank_span,
    time_spans,
    without_colours,
)
from hpc_gpt.reader.lines.steps import Mask, Places, StepColumn, no_places

UNKNOWN, NOTHING = 0, 1  # a line that must be searched; a line without a match
_FIRST = 2  # the number of the first kind in LineKinds.kinds
_MOST_KINDS = 20_000
_OFTEN = 3  # lines of a format that are read one by one before their kind is made
_LONGEST = 4_000  # bytes of a line in the table
_OF_MANY = ("step", "progress", "timers", "more")  # kinds of patterns whose lines are read many at once
# Fields of "more" lines that only the first such line of a step gives, and that no other count includes.
_OF_MORE = {*STEP_FIELDS, *MEMORY_FIELDS} - {"step", "skipped", "nan", "expert_load", "at"}
RANK, TIME = "rank", "time of day"  # columns beside the fields of a pattern


def zeroed(letters: NDArray[np.uint8]) -> bytes:
    """The bytes with every digit replaced with 0."""
    digits = ((letters - 48) < 10).view(np.uint8)
    digits *= 15
    np.invert(digits, digits)
    return np.bitwise_and(letters, digits, digits).tobytes()


@dataclass(frozen=True)
class LineKind:
    """Lines of steps, bars or timers of one format and width: the pattern that matches them, and their `columns`.

    `stated`: the fields that the pattern states for every such line.
    """

    rule: DialectPattern
    width: int
    columns: dict[str, DigitColumn | TimeColumn]
    stated: dict[str, float]

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of STEP_FIELDS that lines of this kind have."""
        return tuple(name for name in STEP_FIELDS if name in self.columns or name in self.stated)


@dataclass(frozen=True)
class FieldLayout:
    """Where a field is in the lines of each kind. `starts` has its first byte and `forms` the number of its form, both
    by the number of the kind; form 0 is a kind without the field. `texts` gives the number of each form.

    Kinds in which the field has the same form are read together, wherever it begins.
    """

    starts: Places
    forms: Places
    texts: dict[DigitColumn | TimeColumn | float, int]

    def with_kinds(self, name: str, kinds: list[LineKind]) -> FieldLayout:
        """The layout with more kinds appended."""
        texts, starts, forms = dict(self.texts), [], []
        for kind in kinds:
            column = kind.columns.get(name)
            text = kind.stated.get(name, np.nan) if column is None else replace(column, start=0)
            starts.append(0 if column is None else column.start)
            forms.append(texts.setdefault(text, len(texts)))
        return FieldLayout(
            np.concatenate((self.starts, np.array(starts, np.int64))),
            np.concatenate((self.forms, np.array(forms, np.int64))),
            texts,
        )

    def read(self, form: int, data: bytes, places: Places) -> StepColumn:
        """Reads the field, which begins at these places, in lines of one form."""
        text = next(islice(self.texts, form, None))
        return np.full(len(places), text) if isinstance(text, float) else text.read(data, places)

    @property
    def not_finite(self) -> Mask:
        """Mask of the forms whose texts may be a NaN or an infinity."""
        return np.array([isinstance(text, DigitColumn) and not text.finite for text in self.texts])


class _Table(dict[bytes, int]):
    def __missing__(self, key: bytes) -> int:
        return UNKNOWN


class LineKinds:
    """The kinds of lines met so far, by the text of a line with every digit replaced with 0."""

    def __init__(self) -> None:
        self.table = _Table({b"": NOTHING})
        self.kinds: list[LineKind] = []
        self._timers: dict[object, int] = {}
        self._met: dict[int, int] = {}  # hash of a line without a kind -> how often it was met
        self._masks: dict[Callable[[LineKind], object], Mask] = {}
        self._layouts: dict[str, FieldLayout] = {}

    def layout(self, name: str) -> FieldLayout:
        """The layout of a field, up to date with all kinds."""
        nowhere = np.zeros(_FIRST, np.int64)
        layout = self._layouts.get(name) or FieldLayout(nowhere, nowhere, {np.nan: 0})
        new = self.kinds[len(layout.forms) - _FIRST :]
        if new or name not in self._layouts:
            layout = self._layouts[name] = layout.with_kinds(name, new)
        return layout

    def has(self, name: str) -> Mask:
        """Mask by number of the kind: its lines have the field."""
        return self.layout(name).forms > 0

    def kind(self, number: int) -> LineKind:
        """The kind with a number of the table."""
        return self.kinds[number - _FIRST]

    def mask(self, predicate: Callable[[LineKind], object]) -> Mask:
        """Mask by number of the kind: the predicate is true for it."""
        mask = self._masks.get(predicate, np.zeros(_FIRST, np.bool_))
        if len(mask) < _FIRST + len(self.kinds):
            new = [bool(predicate(kind)) for kind in self.kinds[len(mask) - _FIRST :]]
            mask = self._masks[predicate] = np.concatenate((mask, np.array(new, np.bool_)))
        return mask

    def learn(self, zeros: bytes, line: bytes, tried: list[DialectPattern]) -> tuple[int, str, list[RuleMatch]]:
        """Adds a line that is not in the table; returns (its number, the line as text, its matches).

        `zeros`: the line with every digit replaced with 0. `tried`: the patterns whose literal is in it.
        """
        text = without_colours(line.decode("utf-8", "replace"))
        matches = find(text, tried)
        asks = any(rule.asks_digits(text) for rule in tried)
        if not matches:
            return (NOTHING if asks else self._remember(zeros, NOTHING)), text, matches
        kind = matches[0][1].pattern.kind
        is_readable = len(matches) == 1 and kind in _OF_MANY and not asks and self._has_room(zeros)
        if is_readable and (made := _kind(line, text, *matches[0])) is not None:
            return self._remember(zeros, self._number(made)), text, matches
        return UNKNOWN, text, matches

    def note_met(self, lines: Mapping[bytes, int]) -> set[bytes]:
        """Counts `lines` (text with every digit replaced with 0 -> how often); returns those that should get a kind.

        Making a kind takes as long as reading a few lines one by one, and it pays only for frequent lines: Python
        prints figures of many digits in many widths.
        """
        if len(self._met) + len(lines) > _MOST_KINDS:
            self._met.clear()
        often = set()
        for zeros, count in lines.items():
            if self._has_room(zeros):
                form = hash(zeros)
                self._met[form] = met = self._met.get(form, 0) + count
                if met >= _OFTEN:
                    often.add(zeros)
        return often

    def remember_nothing(self, lines: Iterable[bytes]) -> None:
        """Adds lines without a match, every digit replaced with 0, as long as the table has room."""
        for zeros in islice(lines, max(0, _MOST_KINDS // 2 - len(self.table))):
            if len(zeros) <= _LONGEST:
                self.table[zeros] = NOTHING

    def _has_room(self, zeros: bytes) -> bool:
        return len(self.table) < _MOST_KINDS and len(zeros) <= _LONGEST

    def _remember(self, zeros: bytes, number: int) -> int:
        if self._has_room(zeros):
            self.table[zeros] = number
        return number

    def _number(self, made: LineKind) -> int:
        if is_timers(made):  # lines of timers differ in their names only: one number for all
            key = (made.rule.number, made.columns.get(TIME))
            if key in self._timers:
                return self._timers[key]
            self._timers[key] = _FIRST + len(self.kinds)
        self.kinds.append(made)
        return _FIRST + len(self.kinds) - 1


def _has(*names: str) -> Callable[[LineKind], bool]:
    """Returns a test whether lines of a kind match a pattern of one of these kinds."""
    return lambda kind: kind.rule.pattern.kind in names


is_step, is_timers, is_bar, is_more = _has("step"), _has("timers"), _has("progress"), _has("more")
_is_other = _has("timers", "progress", "more")


def _kind(line: bytes, text: str, match: re.Match[str], rule: DialectPattern) -> LineKind | None:
    """The kind of a line with one match; None if lines of its format must be read one by one."""
    # Digits of other scripts were not replaced with 0.
    if not text.isascii() and any(one.isdecimal() and one > "9" for one in text):
        return None
    places = _places(line, text)
    if places is None:
        return None

    def span(start: int, end: int) -> tuple[int, int]:
        """The (start, end) in the bytes of the line for a (start, end) in its text."""
        return places[start], places[end - 1] + len(text[end - 1].encode()) if end > start else places[start]

    columns: dict[str, DigitColumn | TimeColumn] = {}
    stated: dict[str, float] = {}
    if rule.pattern.kind == "timers":
        if "key" in match.groupdict():
            return None
    else:
        spans = field_spans(text, match, rule.pattern)
        stated = {name: float(value) for name, value in rule.pattern.facts.items() if name in STEP_FIELDS}
        for name, (start, end) in spans.items():
            field = unit(name)[0]
            if field == RANK or ANSI.search(line, *span(start, end)):
                return None
            if field in TEXT_FIELDS or field not in (*STEP_FIELDS, *STEP_FACTS, *MEMORY_FIELDS):
                continue
            column = DigitColumn.of(name, line, *span(start, end))
            first = column.read(line, np.zeros(1, np.int64))[0]
            if np.isnan(first) and "nan" not in text[start:end].lower():
                if LARGE.search(text, start, end):
                    return None  # too large for a float, but another line of the format may fit
                continue
            if field not in STEP_FIELDS and not np.isfinite(first):
                return None
            columns[field] = column
        if not _is_readable(rule, spans, columns):
            return None
    if label := rank_span(text):
        if not text[: label[1]].isascii() or ANSI.search(line, *span(*label)):
            return None
        columns[RANK] = DigitColumn.of(RANK, line, *span(*label))
    if moment := time_spans(text):
        begin, stop = min(first for first, _ in moment.values()), max(last for _, last in moment.values())
        if ANSI.search(line, *span(begin, stop)):
            return None
        inside = tuple((name, (first - begin, last - begin)) for name, (first, last) in moment.items())
        columns[TIME] = TimeColumn(places[begin], inside)
    return LineKind(rule, len(line), columns, stated)


def _is_readable(rule: DialectPattern, spans: Iterable[str], columns: dict[str, DigitColumn | TimeColumn]) -> bool:
    """Whether lines with these columns can be read many at once: a step is a whole number, and a bar has a step."""
    step, kind = columns.get("step"), rule.pattern.kind
    if rule.pattern.own and kind in ("progress", "more"):
        return False
    if (kind == "progress" and step is None) or (kind == "more" and not columns.keys() <= _OF_MORE):
        return False
    if step is None:
        return "step" not in spans
    assert isinstance(step, DigitColumn)
    return (
        step.numeral is not None and not step.numeral[0] and step.numeral[2:] == (0, "", (), 1.0) and step.factor == 1
    )


def _places(line: bytes, text: str) -> Sequence[int] | None:
    """The place in the bytes of each character of a line's text, which has no colours; None if they do not fit."""
    if len(line) == len(text) and text.isascii():
        return range(len(line) + 1)
    places, at = [], 0
    colours = {match.start(): match.end() for match in ANSI.finditer(line)}
    for letter in (*text, ""):
        while at in colours:
            at = colours[at]
        places.append(at)
        at += len(letter.encode())
    return places if at == len(line) else None


_shared = LineKinds()


def kinds_for_a_log() -> LineKinds:
    """The kinds met so far, also in other logs; an empty table if there are too many."""
    global _shared
    if len(_shared.table) >= _MOST_KINDS // 2:
        _shared = LineKinds()
    return _shared


@dataclass
class LineBlock:
    """A block of lines of a log. `starts`, `stops`: the place of each line in `data`. `numbers`: its number in the log.

    `kinds`: the number of each line's kind. `steps`: the indexes of the lines of steps; `others`: of timers and bars.
    """

    data: bytes
    starts: Places
    stops: Places
    numbers: Places
    kinds: Places = field(default_factory=no_places)
    steps: Places = field(default_factory=no_places)
    others: Places = field(default_factory=no_places)
    step: StepColumn = field(default_factory=lambda: np.zeros(0))  # step of each line of steps, NaN without one
    rank: StepColumn | None = None  # rank label of each, NaN without one; None if no line has one
    dialect: Places = field(default_factory=no_places)  # index of the dialect of each in `dialects`
    dialects: list[str] = field(default_factory=list)
    table: LineKinds = field(default_factory=LineKinds)

    def line(self, index: int) -> bytes:
        """The bytes of a line."""
        return self.data[self.starts[index] : self.stops[index]]

    def text(self, index: int) -> str:
        """A line as text, without colours."""
        return without_colours(self.line(index).decode("utf-8", "replace"))

    def is_indented(self, index: int) -> bool:
        """Whether a line begins with a blank."""
        first = self.data[self.starts[index] : self.starts[index] + 1]
        return first in (b" ", b"\t") or (first == b"\x1b" and self.text(index)[:1] in (" ", "\t"))

    def text_and_matches(self, index: int) -> tuple[str, list[RuleMatch]]:
        """A line of a known kind as text, and its matches."""
        text, rule = self.text(index), self.table.kind(int(self.kinds[index])).rule
        match = rule.regex.search(text)
        assert match
        return text, [(match, rule)]

    def sort_lines(self, table: LineKinds) -> None:
        """Fills `steps`, `others`, and the step, dialect and rank of each line of steps, by the kinds of the lines."""
        self.table = table
        self.steps = self.lines_where(is_step)
        self.others = self.lines_where(_is_other)
        self.step = self.column("step", self.steps)
        self.rank = self.column(RANK, self.steps) if self.has(RANK, self.steps) else None
        self.dialects = list(dict.fromkeys(kind.rule.dialect.name for kind in self.kinds_of(self.steps)))
        self.dialect = np.zeros(len(self.steps), np.int64)
        if len(self.dialects) > 1:
            for kind, rows in self.by_kind(self.steps):
                self.dialect[rows] = self.dialects.index(kind.rule.dialect.name)

    def lines_where(self, predicate: Callable[[LineKind], object], lines: Places | None = None) -> Places:
        """The lines, among all or `lines`, for whose kind the predicate is true."""
        kinds = self.kinds if lines is None else self.kinds[lines]
        places = np.flatnonzero(self.table.mask(predicate)[kinds])
        return places if lines is None else lines[places]

    def kinds_of(self, lines: Places) -> list[LineKind]:
        """The distinct kinds of the lines."""
        return [self.table.kind(number) for number in np.flatnonzero(np.bincount(self.kinds[lines])).tolist()]

    def by_kind(self, lines: Places) -> list[tuple[LineKind, Places]]:
        """Returns (kind, the places in `lines` of its lines) for each kind of the lines."""
        if not len(lines):
            return []
        kinds = self.kinds[lines].astype(np.int16)  # numpy sorts this type without comparisons
        if (kinds == kinds[0]).all():
            return [(self.table.kind(int(kinds[0])), np.arange(len(lines)))]
        order = np.argsort(kinds, kind="stable")
        rows = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        return [(self.table.kind(int(kinds[of_kind[0]])), of_kind) for of_kind in rows]

    def not_finite(self, name: str, lines: Places) -> Places:
        """The places in `lines` of those whose field is a NaN or an infinity."""
        layout = self.table.layout(name)
        rows = np.flatnonzero(layout.not_finite[layout.forms[self.kinds[lines]]])
        return rows[~np.isfinite(self.column(name, lines[rows]))]

    def has(self, name: str, lines: Places) -> bool:
        """Whether any of the lines has a field."""
        return bool(self.table.has(name)[self.kinds[lines]].any())

    def column(self, name: str, lines: Places) -> StepColumn:
        """A field of the lines, NaN for a line that lacks it."""
        if not len(lines):
            return np.zeros(0)
        layout, kinds = self.table.layout(name), self.kinds[lines]
        forms = layout.forms[kinds]
        if (forms == forms[0]).all():
            return layout.read(int(forms[0]), self.data, self.starts[lines] + layout.starts[kinds])
        figures = np.full(len(lines), np.nan)
        for form in np.flatnonzero(np.bincount(forms)).tolist():
            rows = np.flatnonzero(forms == form)
            figures[rows] = layout.read(form, self.data, self.starts[lines[rows]] + layout.starts[kinds[rows]])
        return figures
