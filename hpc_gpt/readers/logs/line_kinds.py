"""The kinds of lines: lines that differ in digits only are read like the first of them, many at once.

A program prints its lines from a few formats. With every digit made a 0, lines of one format and width are the same
bytes, and their figures are at the same places: one look-up in a table gives the kind of a line. This is true if no
pattern asks for a certain digit. Lines that such a pattern may match are searched by it; they are of the kind if it
finds in each line what it found in the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.logs.matches import DialectPattern, Found, field_spans, find, rank_span, time_spans
from hpc_gpt.readers.pattern import MEMORY_FIELDS, SIZES, STEP_FACTS, STEP_FIELDS, TEXT_FIELDS, figure, unit
from hpc_gpt.readers.steps import Mask, Places, StepColumn, no_places

# Powers of ten up to 1e22 are exact floats: one division or product by them is rounded once, like the conversion of the
# text.
_POWERS = 10.0 ** np.arange(23)
_MOST_DIGITS = 15
_NUMERAL = re.compile(r"([-+]?)(\d[\d,]*)(?:\.(\d*))?(?:[eE]([-+]?)(\d{1,3}))?([KkMGBT]?)%?")


def _cells(data: bytes, places: Places, width: int) -> NDArray[np.uint8]:
    """The bytes from each place on, shape (places, width)."""
    windows = np.ndarray((max(0, len(data) - width + 1),), f"V{width}", data, strides=(1,))
    return windows[places].view(np.uint8).reshape(len(places), width)


def _whole(found: NDArray[np.uint8], columns: tuple[int, ...]) -> StepColumn:
    """The number that the digits in these columns form, exact below 2^53."""
    if not columns:
        return np.zeros(len(found))
    first, last = columns[0], columns[-1] + 1
    weights = np.zeros(last - first)
    weights[np.array(columns) - first] = _POWERS[len(columns) - 1 :: -1] if len(columns) > 1 else 1.0
    return np.asarray(found[:, first:last].astype(np.float64) @ weights - 48.0 * weights.sum())


@dataclass(frozen=True)
class DigitColumn:
    """A field of lines that differ in digits only: where it is in a line, and how its text becomes a figure.

    `numeral`: (sign, columns of the digits, how many of them are fraction, sign of the exponent, its columns, size);
    None if each text is read by itself.
    """

    field: str
    start: int
    width: int
    factor: float
    numeral: tuple[str, tuple[int, ...], int, str, tuple[int, ...], float] | None

    @staticmethod
    def of(name: str, line: bytes, start: int, end: int) -> DigitColumn:
        """The column of a group or a key, from one line."""
        text = line[start:end].decode()
        stripped = text.strip()
        start += len(text) - len(text.lstrip())
        field, factor = unit(name)
        column = DigitColumn(field, start, len(stripped.encode()), factor, _numeral(stripped))
        plain = DigitColumn(field, start, len(stripped.encode()), factor, None)
        here = np.zeros(1, np.int64)
        same = np.array_equal(column.read(line, here), plain.read(line, here), equal_nan=True)
        return column if same else plain

    def read(self, data: bytes, lines: Places) -> StepColumn:
        """The field of the lines that begin at these places; NaN if the text is no figure."""
        places = lines + self.start
        if self.numeral is None:
            texts = (data[place : place + self.width].decode("utf-8", "replace") for place in places.tolist())
            figures = np.array([np.nan if (found := figure(text)) is None else found for text in texts], np.float64)
        else:
            figures = self._figures(data, places)
        if self.factor < 0:
            with np.errstate(divide="ignore"):
                return np.where(figures == 0, np.nan, 1 / figures)
        return figures * self.factor

    def _figures(self, data: bytes, places: Places) -> StepColumn:
        assert self.numeral
        sign, digits, fraction, turned, exponent, size = self.numeral
        found = _cells(data, places, self.width)
        figures = _whole(found, digits)
        if exponent:
            power = _whole(found, exponent) * (-1.0 if turned == "-" else 1.0) - fraction
            up, down = np.clip(power, 0, 22).astype(np.int64), np.clip(-power, 0, 22).astype(np.int64)
            # One of the two is 1.
            figures = figures * _POWERS[up] / _POWERS[down]
            for index in np.flatnonzero(np.abs(power) > 22).tolist():
                place = int(places[index])
                value = figure(data[place : place + self.width].decode())
                figures[index] = np.nan if value is None else abs(value) / size
        elif fraction:
            figures = figures / _POWERS[fraction]
        figures = figures * size
        return -figures if sign == "-" else figures


def _numeral(text: str) -> tuple[str, tuple[int, ...], int, str, tuple[int, ...], float] | None:
    found = _NUMERAL.fullmatch(text) if text.isascii() else None
    if found is None:
        return None
    digits = tuple(
        place
        for group in (2, 3)
        for place in range(*found.span(group))
        if found[group] is not None and text[place] != ","
    )
    fraction = len(found[3] or "")
    if len(digits) > _MOST_DIGITS or fraction > 22:
        return None
    exponent = tuple(range(*found.span(5))) if found[5] else ()
    return found[1], digits, fraction, found[4] or "", exponent, SIZES[found[6]]


@dataclass(frozen=True)
class TimeColumn:
    """The time of day in lines that differ in digits only: the places of its numbers in a line."""

    spans: dict[str, tuple[int, int]]

    def read(self, data: bytes, lines: Places) -> StepColumn:
        """Epoch seconds, the time of day taken as UTC; NaN if it is no valid time."""
        start = min(span[0] for span in self.spans.values())
        end = max(span[1] for span in self.spans.values())
        found = _cells(data, lines + start, end - start)
        number = {
            name: _whole(found, tuple(range(span[0] - start, span[1] - start))).astype(np.int64)
            for name, span in self.spans.items()
        }
        year, month, day = (number[name] for name in ("year", "month", "day"))
        hour, minute, second = (number[name] for name in ("hour", "minute", "second"))
        fine = (year > 0) & (month > 0) & (month < 13) & (day > 0) & (hour < 24) & (minute < 60) & (second < 60)
        months = (year - 1970) * 12 + np.where(fine, month, 1) - 1
        first = months.astype("M8[M]").astype("M8[D]")
        next_first = (months + 1).astype("M8[M]").astype("M8[D]")
        fine &= day <= (next_first - first).astype(np.int64)
        seconds = (first.astype(np.int64) + day - 1) * 86400 + hour * 3600 + minute * 60 + second
        at = seconds.astype(np.float64)
        if "part" in number:
            at = at + number["part"] / _POWERS[self.spans["part"][1] - self.spans["part"][0]]
        return np.where(fine, at, np.nan)


UNKNOWN, NOTHING = 0, 1  # a line to look at; a line without any match
_FIRST = 2  # of the kinds below
_MOST_KINDS = 20_000
_LONGEST = 4_000  # bytes of a line that is remembered
_LARGE = re.compile(r"[eE][-+]?\d{3}")
# Parts of a pattern that have digits and ask for none: repetitions, whole ranges.
_NO_DIGIT = re.compile(r"\{\d+(?:,\d*)?\}|0-9|\(\?P<\w+>|\(\?P=\w+\)|\\x1b")


def zeroed(found: NDArray[np.uint8]) -> bytes:
    """The bytes with every digit made a 0."""
    digits = ((found - 48) < 10).view(np.uint8)
    digits *= 15
    np.invert(digits, digits)
    return np.bitwise_and(found, digits, digits).tobytes()


@dataclass(frozen=True)
class Guard:
    """A pattern that asks for certain digits, and where its groups were in the first line of a kind."""

    each: DialectPattern
    spans: tuple[object, ...]


def _spans(each: DialectPattern, text: str) -> tuple[object, ...]:
    if each.pattern.literal not in text:
        return ()
    return tuple(match.regs for match in each.regex.finditer(text))


@dataclass(frozen=True)
class LineKind:
    """Lines of steps (`columns` of fields) or of timers (none) of one format and width.

    `stated`: the fields that the pattern states of every such line.
    """

    each: DialectPattern
    steps: bool
    width: int
    columns: dict[str, DigitColumn]
    rank: DigitColumn | None
    at: TimeColumn | None
    stated: dict[str, float]
    guards: tuple[Guard, ...] = ()

    def holds(self, text: str) -> bool:
        """Whether the patterns that ask for certain digits find in a line what they found in the first one."""
        return all(_spans(guard.each, text) == guard.spans for guard in self.guards)

    def read(self, name: str, data: bytes, lines: Places) -> StepColumn:
        """A field of the lines that begin at these places."""
        if name in self.columns:
            return self.columns[name].read(data, lines)
        return np.full(len(lines), self.stated.get(name, np.nan))

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
    texts: dict[DigitColumn | float, int]

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
        return text.read(data, places) if isinstance(text, DigitColumn) else np.full(len(places), text)


class _Table(dict[bytes, int]):
    def __missing__(self, key: bytes) -> int:
        return UNKNOWN


class LineKinds:
    """The kinds of lines met so far, by the text of a line with every digit made a 0."""

    def __init__(self) -> None:
        self.table = _Table({b"": NOTHING})
        self.kinds: list[LineKind] = []
        self.guarded: list[int] = []  # the numbers of those that have guards
        self._timers: dict[object, int] = {}
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

    def kind(self, number: int) -> LineKind:
        """The kind of a number in the table."""
        return self.kinds[number - _FIRST]

    def sorts(self) -> tuple[Mask, Mask]:
        """By number of the kind whether its lines are of steps, and whether they are of timers."""
        steps = np.array([False] * _FIRST + [kind.steps for kind in self.kinds], np.bool_)
        timers = ~steps
        timers[:_FIRST] = False
        return steps, timers

    def learn(self, zeros: bytes, line: bytes, tried: list[DialectPattern]) -> tuple[int, str, list[Found]]:
        """(number, the line as text, what is found in it if the number is UNKNOWN) of a line not in the table.

        `zeros`: the line with every digit made a 0. `tried`: the patterns whose literal is in it.
        """
        text = line.decode("utf-8", "replace")
        found = find(text, tried)
        seeing = [each for each in tried if not _digit_blind(each.pattern.literal + each.pattern.regex)]
        if not found:
            return (NOTHING if seeing else self._remember(zeros, NOTHING)), text, found
        kind = found[0][1].pattern.kind
        if len(found) == 1 and kind in ("step", "timers") and self._has_room(zeros):
            made = _step_kind(line, text, *found[0]) if kind == "step" else _timers_kind(line, text, *found[0])
            if made is not None and (made.steps or not seeing):
                made = replace(made, guards=tuple(Guard(each, _spans(each, text)) for each in seeing))
                return self._remember(zeros, self._number(made)), text, found
        return UNKNOWN, text, found

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
        if not made.steps:  # lines of timers differ in their names alone: one number for all
            key = (made.each.number, repr(made.at))
            if key in self._timers:
                return self._timers[key]
            self._timers[key] = _FIRST + len(self.kinds)
        self.kinds.append(made)
        number = _FIRST + len(self.kinds) - 1
        if made.guards:
            self.guarded.append(number)
        return number


@cache
def _digit_blind(regex: str) -> bool:
    """Whether a pattern matches a line whatever its digits are."""
    return re.search(r"\d", _NO_DIGIT.sub("", regex)) is None


def _plain_digits(line: bytes, text: str) -> bool:
    """Whether all digits of a line are ASCII: digits of other scripts were not made 0."""
    return text.isascii() or (text.encode() == line and not any(each.isdecimal() and each > "9" for each in text))


def _step_kind(line: bytes, text: str, match: re.Match[str], each: DialectPattern) -> LineKind | None:
    if not _plain_digits(line, text):
        return None
    spans = field_spans(text, match, each.pattern)
    if "step" not in spans:
        return None
    stated = {name: float(value) for name, value in each.pattern.facts.items() if name in STEP_FIELDS}
    columns: dict[str, DigitColumn] = {}
    for name, (start, end) in spans.items():
        field = unit(name)[0]
        if field == "rank":
            return None
        if field in TEXT_FIELDS or field not in (*STEP_FIELDS, *STEP_FACTS, *MEMORY_FIELDS):
            continue
        before = len(text[:start].encode())
        column = DigitColumn.of(name, line, before, before + len(text[start:end].encode()))
        first = column.read(line, np.zeros(1, np.int64))[0]
        if np.isnan(first) and "nan" not in text[start:end].lower():
            if _LARGE.search(text, start, end):
                return None  # too large for a float; other digits may fit
            continue
        if field not in STEP_FIELDS and not np.isfinite(first):
            return None
        columns[field] = column
    step = columns.get("step")
    if (
        step is None
        or step.numeral is None
        or step.numeral[0]
        or step.numeral[2:] != (0, "", (), 1.0)
        or step.factor != 1
    ):
        return None  # steps that are no whole numbers are read line by line
    return LineKind(each, True, len(line), columns, _rank(line, text), _at(text), stated)


def _timers_kind(line: bytes, text: str, match: re.Match[str], each: DialectPattern) -> LineKind | None:
    if "key" in match.groupdict() or not _plain_digits(line, text):
        return None
    return LineKind(each, False, len(line), {}, _rank(line, text), _at(text), {})


def _rank(line: bytes, text: str) -> DigitColumn | None:
    span = rank_span(text)
    return DigitColumn.of("rank", line, *span) if span and text[: span[1]].isascii() else None


def _at(text: str) -> TimeColumn | None:
    spans = time_spans(text)
    if not spans:
        return None
    return TimeColumn({name: (len(text[:a].encode()), len(text[:b].encode())) for name, (a, b) in spans.items()})


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

    `kinds`: its number in the table of kinds. `steps`, `timers`: the indexes of the lines of steps and of timers.
    """

    data: bytes
    starts: Places
    stops: Places
    numbers: Places
    kinds: Places = field(default_factory=no_places)
    steps: Places = field(default_factory=no_places)
    timers: Places = field(default_factory=no_places)
    step: StepColumn = field(default_factory=lambda: np.zeros(0))  # by line of steps: its step
    rank: StepColumn | None = None  # its rank label, NaN without one; None if no line has one
    dialect: Places = field(default_factory=no_places)  # and the number of its dialect
    dialects: list[str] = field(default_factory=list)
    table: LineKinds = field(default_factory=LineKinds)

    def line(self, index: int) -> bytes:
        """The bytes of a line."""
        return self.data[self.starts[index] : self.stops[index]]

    def text(self, index: int) -> str:
        """A line as text."""
        return self.line(index).decode("utf-8", "replace")

    def is_indented(self, index: int) -> bool:
        """Whether a line begins with a blank."""
        return self.data[self.starts[index] : self.starts[index] + 1] in (b" ", b"\t")

    def found(self, index: int) -> tuple[str, list[Found]]:
        """A line of a known kind as text, and what is found in it."""
        text, each = self.text(index), self.table.kind(int(self.kinds[index])).each
        match = each.regex.search(text)
        assert match
        return text, [(match, each)]

    def sort_lines(self, table: LineKinds) -> None:
        """Finds the lines of steps and of timers by their kinds, and step, dialect and rank of each line of steps."""
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
        """(kind, which of the lines are of it) for each kind of some lines."""
        if not len(lines):
            return []
        kinds = self.kinds[lines].astype(np.int16)  # a type that is sorted without comparing
        if (kinds == kinds[0]).all():
            return [(self.table.kind(int(kinds[0])), np.arange(len(lines)))]
        order = np.argsort(kinds, kind="stable")
        rows = np.split(order, np.flatnonzero(np.diff(kinds[order])) + 1)
        return [(self.table.kind(int(kinds[of_kind[0]])), of_kind) for of_kind in rows]

    def column(self, name: str, lines: Places) -> StepColumn:
        """A field of some lines of steps, NaN for a line that lacks it."""
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
