"""The kinds of lines: lines that differ in digits only are read like the first of them, many at once.

A program prints its lines from a few formats. With every digit made a 0, lines of one format and width are the same
bytes, and their figures are at the same places: one look-up in a table gives the kind of a line. If a pattern asks for
certain digits (`columns.AskedDigits`), these are compared in each line of the kind. Colours are part of a kind: they
are removed from its first line only.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.reader.logs.columns import LARGE, AskedDigits, DigitColumn, TimeColumn, asked_digits
from hpc_gpt.reader.logs.matches import (
    ANSI,
    DialectPattern,
    Found,
    field_spans,
    find,
    rank_span,
    time_spans,
    without_colours,
)
from hpc_gpt.reader.pattern import MEMORY_FIELDS, STEP_FACTS, STEP_FIELDS, TEXT_FIELDS, unit
from hpc_gpt.reader.steps import Mask, Places, StepColumn, no_places

UNKNOWN, NOTHING = 0, 1  # a line to look at; a line without any match
_FIRST = 2  # of the kinds below
_MOST_KINDS = 20_000
_OFTEN = 3  # so many lines are read one by one before their kind is made
_LONGEST = 4_000  # bytes of a line that is remembered
RANK, TIME = "rank", "time of day"  # columns beside the fields of a pattern


def zeroed(found: NDArray[np.uint8]) -> bytes:
    """The bytes with every digit made a 0."""
    digits = ((found - 48) < 10).view(np.uint8)
    digits *= 15
    np.invert(digits, digits)
    return np.bitwise_and(found, digits, digits).tobytes()


@dataclass(frozen=True)
class LineKind:
    """Lines of steps, bars or timers of one format and width: the pattern that matches them, and their `columns`.

    `stated`: the fields that the pattern states of every such line. `digits`: those that its patterns ask for.
    """

    rule: DialectPattern
    width: int
    columns: dict[str, DigitColumn | TimeColumn]
    stated: dict[str, float]
    digits: AskedDigits = ()

    @property
    def fields(self) -> tuple[str, ...]:
        """The fields of STEP_FIELDS that such lines have."""
        return tuple(name for name in STEP_FIELDS if name in self.columns or name in self.stated)


@dataclass(frozen=True)
class FieldLayout:
    """Where a field is in lines of each kind, by number of the kind: its `starts`, and the `forms` of its `texts`.

    Kinds in which a field has the same digits at different places are read together. Form 0: no such field.
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
        """The field that begins at these places, in lines of one form."""
        text = next(islice(self.texts, form, None))
        return np.full(len(places), text) if isinstance(text, float) else text.read(data, places)

    @property
    def not_finite(self) -> Mask:
        """By form whether its texts may be a NaN or an infinity."""
        return np.array([isinstance(text, DigitColumn) and not text.finite for text in self.texts])


class _Table(dict[bytes, int]):
    def __missing__(self, key: bytes) -> int:
        return UNKNOWN


class LineKinds:
    """The kinds of lines met so far, by the text of a line with every digit made a 0."""

    def __init__(self) -> None:
        self.table = _Table({b"": NOTHING})
        self.kinds: list[LineKind] = []
        self._timers: dict[object, int] = {}
        self._met: dict[int, int] = {}  # by the hash of a line without a kind, how often it was met
        self._masks: dict[Callable[[LineKind], object], Mask] = {}
        self._layouts: dict[str, FieldLayout] = {}

    def layout(self, name: str) -> FieldLayout:
        """Where a field is, by number of the kind."""
        known = self._layouts.get(name)
        if known is None:
            known = FieldLayout(np.zeros(_FIRST, np.int64), np.zeros(_FIRST, np.int64), {np.nan: 0})
        new = self.kinds[len(known.forms) - _FIRST :]
        if new or name not in self._layouts:
            known = self._layouts[name] = known.with_kinds(name, new)
        return known

    def has(self, name: str) -> Mask:
        """By number of the kind whether its lines have a field."""
        return self.layout(name).forms > 0

    def kind(self, number: int) -> LineKind:
        """The kind of a number in the table."""
        return self.kinds[number - _FIRST]

    def mask(self, predicate: Callable[[LineKind], object]) -> Mask:
        """By number of the kind whether something is true of it."""
        known = self._masks.get(predicate, np.zeros(_FIRST, np.bool_))
        if len(known) < _FIRST + len(self.kinds):
            new = [bool(predicate(kind)) for kind in self.kinds[len(known) - _FIRST :]]
            known = self._masks[predicate] = np.concatenate((known, np.array(new, np.bool_)))
        return known

    def learn(self, zeros: bytes, line: bytes, tried: list[DialectPattern]) -> tuple[int, str, list[Found]]:
        """(number, the line as text, what is found in it if the number is UNKNOWN) of a line not in the table.

        `zeros`: the line with every digit made a 0. `tried`: the patterns whose literal is in it.
        """
        text = without_colours(line.decode("utf-8", "replace"))
        found = find(text, tried)
        if not found:
            return (NOTHING if asked_digits(tried, text) != () else self._remember(zeros, NOTHING)), text, found
        kind = found[0][1].pattern.kind
        if len(found) == 1 and kind in ("step", "progress", "timers") and self._has_room(zeros):
            digits = asked_digits(tried, text)
            made = None if digits is None else _kind(line, text, *found[0], digits)
            if made is not None:
                return self._remember(zeros, self._number(made)), text, found
        return UNKNOWN, text, found

    def are_worth_a_kind(self, lines: Mapping[bytes, int]) -> set[bytes]:
        """The lines, every digit made a 0, that can have a kind and were met often enough; `lines`: how often now.

        A kind takes as long to make as some lines to read one by one, and the figures of many digits that Python prints
        differ in their widths.
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
        """Remembers lines without a match, every digit made a 0, as many as there is room for."""
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
        if is_timers(made):  # lines of timers differ in their names alone: one number for all
            key = (made.rule.number, made.columns.get(TIME))
            if key in self._timers:
                return self._timers[key]
            self._timers[key] = _FIRST + len(self.kinds)
        self.kinds.append(made)
        return _FIRST + len(self.kinds) - 1


def is_step(kind: LineKind) -> bool:
    """Whether its lines are of steps."""
    return kind.rule.pattern.kind == "step"


def is_timers(kind: LineKind) -> bool:
    """Whether its lines are of timers."""
    return kind.rule.pattern.kind == "timers"


def is_bar(kind: LineKind) -> bool:
    """Whether its lines are of bars or counters."""
    return kind.rule.pattern.kind == "progress"


def _is_beside(kind: LineKind) -> bool:
    return not is_step(kind)


def asks_digits(kind: LineKind) -> bool:
    """Whether lines of its format are of it by their digits only."""
    return bool(kind.digits)


def _kind(line: bytes, text: str, match: re.Match[str], rule: DialectPattern, digits: AskedDigits) -> LineKind | None:
    """The kind of a line in which one match is found, None if lines of its format are read one by one."""
    # Digits of other scripts were not made 0.
    if not text.isascii() and any(one.isdecimal() and one > "9" for one in text):
        return None
    places = _places(line, text)
    if places is None:
        return None

    def span(start: int, end: int) -> tuple[int, int]:
        """Where characters of the text are in the line, up to the end of the last of them."""
        return places[start], places[end - 1] + len(text[end - 1].encode()) if end > start else places[start]

    columns: dict[str, DigitColumn | TimeColumn] = {}
    stated: dict[str, float] = {}
    if rule.pattern.kind == "timers":
        if digits or "key" in match.groupdict():
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
                    return None  # too large for a float; other digits may fit
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
    asked = tuple((places[at], allowed) for at, allowed in digits)
    return LineKind(rule, len(line), columns, stated, asked)


def _is_readable(rule: DialectPattern, spans: Iterable[str], columns: dict[str, DigitColumn | TimeColumn]) -> bool:
    """Whether lines with these columns can be read many at once: a step is a whole number, and a bar has one."""
    step = columns.get("step")
    if rule.pattern.kind == "progress" and (step is None or rule.pattern.own):
        return False
    if step is None:
        return "step" not in spans
    assert isinstance(step, DigitColumn)
    return (
        step.numeral is not None and not step.numeral[0] and step.numeral[2:] == (0, "", (), 1.0) and step.factor == 1
    )


def _places(line: bytes, text: str) -> Sequence[int] | None:
    """By character of a line's text, which has no colours, its place in the bytes; None if it has none."""
    if len(line) == len(text) and text.isascii():
        return range(len(line) + 1)
    found, at = [], 0
    colours = {match.start(): match.end() for match in ANSI.finditer(line)}
    for each in (*text, ""):
        while at in colours:
            at = colours[at]
        found.append(at)
        at += len(each.encode())
    return found if at == len(line) else None


_shared = LineKinds()


def kinds_for_a_log() -> LineKinds:
    """The kinds met so far, of other logs too; new ones if there are too many."""
    global _shared
    if len(_shared.table) >= _MOST_KINDS // 2:
        _shared = LineKinds()
    return _shared


@dataclass
class LineBlock:
    """Lines of a log. `starts`, `stops`: where each is in `data`. `numbers`: its line number in the log.

    `kinds`: its number in the table of kinds. `steps`: the indexes of the lines of steps; `beside`: of timers and bars.
    """

    data: bytes
    starts: Places
    stops: Places
    numbers: Places
    kinds: Places = field(default_factory=no_places)
    steps: Places = field(default_factory=no_places)
    beside: Places = field(default_factory=no_places)
    step: StepColumn = field(default_factory=lambda: np.zeros(0))  # by line of steps: its step, NaN without one
    rank: StepColumn | None = None  # its rank label, NaN without one; None if no line has one
    dialect: Places = field(default_factory=no_places)  # and the number of its dialect
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

    def found(self, index: int) -> tuple[str, list[Found]]:
        """A line of a known kind as text, and what is found in it."""
        text, rule = self.text(index), self.table.kind(int(self.kinds[index])).rule
        match = rule.regex.search(text)
        assert match
        return text, [(match, rule)]

    def sort_lines(self, table: LineKinds) -> None:
        """Finds lines of steps, timers and bars by their kinds, and step, dialect and rank of each line of steps."""
        self.table = table
        self.steps = self.lines_where(is_step)
        self.beside = self.lines_where(_is_beside)
        self.step = self.column("step", self.steps)
        self.rank = self.column(RANK, self.steps) if self.has(RANK, self.steps) else None
        self.dialects = list(dict.fromkeys(kind.rule.dialect.name for kind in self.kinds_of(self.steps)))
        self.dialect = np.zeros(len(self.steps), np.int64)
        if len(self.dialects) > 1:
            for kind, rows in self.by_kind(self.steps):
                self.dialect[rows] = self.dialects.index(kind.rule.dialect.name)

    def lines_where(self, predicate: Callable[[LineKind], object], lines: Places | None = None) -> Places:
        """The lines, of all or of some, of whose kind something is true."""
        kinds = self.kinds if lines is None else self.kinds[lines]
        found = np.flatnonzero(self.table.mask(predicate)[kinds])
        return found if lines is None else lines[found]

    def kinds_of(self, lines: Places) -> list[LineKind]:
        """The kinds of some lines, each once."""
        return [self.table.kind(number) for number in np.flatnonzero(np.bincount(self.kinds[lines])).tolist()]

    def by_kind(self, lines: Places) -> list[tuple[LineKind, Places]]:
        """(kind, which of the lines are of it) for each kind of some lines."""
        if not len(lines):
            return []
        kinds = self.kinds[lines].astype(np.int16)  # a type that is sorted without comparing
        if (kinds == kinds[0]).all():
            return [(self.table.kind(int(kinds[0])), np.arange(len(lines)))]
        order = np.argsort(kinds, kind="stable")
        rows = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        return [(self.table.kind(int(kinds[of_kind[0]])), of_kind) for of_kind in rows]

    def not_finite(self, name: str, lines: Places) -> Places:
        """Which of some lines have a NaN or an infinity for a field."""
        layout = self.table.layout(name)
        rows = np.flatnonzero(layout.not_finite[layout.forms[self.kinds[lines]]])
        return rows[~np.isfinite(self.column(name, lines[rows]))]

    def has(self, name: str, lines: Places) -> bool:
        """Whether a line of some has a field."""
        return bool(self.table.has(name)[self.kinds[lines]].any())

    def column(self, name: str, lines: Places) -> StepColumn:
        """A field of some lines, NaN for a line that lacks it."""
        if not len(lines):
            return np.zeros(0)
        layout, kinds = self.table.layout(name), self.kinds[lines]
        forms = layout.forms[kinds]
        if (forms == forms[0]).all():
            return layout.read(int(forms[0]), self.data, self.starts[lines] + layout.starts[kinds])
        found = np.full(len(lines), np.nan)
        for form in np.flatnonzero(np.bincount(forms)).tolist():
            rows = np.flatnonzero(forms == form)
            found[rows] = layout.read(form, self.data, self.starts[lines[rows]] + layout.starts[kinds[rows]])
        return found
