"""What a line is about, known from one that differs from it in digits alone.

A program prints its lines from a few formats. With every digit made a 0, lines of one format and width are the same
bytes, and what was found in one of them stands at the same places in all: one look into a table tells what a line is.
This holds as long as no pattern asks for a certain digit. The lines of those that do are searched by those patterns,
and are of the kind if they find in each what they found in the first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.fields import STEP_FACTS, STEP_FIELDS, TEXT_FIELDS, unit
from hpc_gpt.readers.log_files.armed import Armed, Found, find
from hpc_gpt.readers.log_files.digit_columns import DigitColumn, Places, TimeColumn
from hpc_gpt.readers.log_files.prefix import rank_span, time_spans
from hpc_gpt.readers.log_files.spans import field_spans
from hpc_gpt.readers.part import Column

UNKNOWN, NOTHING = 0, 1  # to be looked at; nothing in it
_FIRST = 2  # of the kinds below
_MOST_KINDS = 20_000
_LONGEST = 4_000  # bytes of a line that is remembered
MEMORY_FIELDS = ("memory_allocated_gib", "memory_reserved_gib")
_LARGE = re.compile(r"[eE][-+]?\d{3}")
# What of a pattern holds digits and asks for none: repetitions, whole ranges.
_NO_DIGIT = re.compile(r"\{\d+(?:,\d*)?\}|0-9|\(\?P<\w+>|\(\?P=\w+\)|\\x1b")


def zeroed(found: NDArray[np.uint8]) -> bytes:
    """The bytes with every digit made a 0."""
    digits = ((found - 48) < 10).view(np.uint8)
    digits *= 15
    np.invert(digits, digits)
    return np.bitwise_and(found, digits, digits).tobytes()


@dataclass(frozen=True)
class Guard:
    """A pattern that asks for certain digits, and where its groups stood in the first line of a kind."""

    each: Armed
    spans: tuple[object, ...]

    def found(self, text: str) -> tuple[object, ...]:
        """Where its groups stand in a line."""
        return _spans(self.each, text)


def _spans(each: Armed, text: str) -> tuple[object, ...]:
    if each.pattern.literal not in text:
        return ()
    return tuple(match.regs for match in each.regex.finditer(text))


@dataclass(frozen=True)
class LineKind:
    """Lines of steps (`columns` of fields) or of timers (none) of one format and width.

    `stated`: what the pattern states of every such line. `text`: fields whose text is no digits, alike in every line.
    """

    each: Armed
    steps: bool
    width: int
    columns: dict[str, DigitColumn]
    rank: DigitColumn | None
    at: TimeColumn | None
    stated: dict[str, float]
    guards: tuple[Guard, ...] = ()

    def holds(self, text: str) -> bool:
        """Whether the patterns that ask for certain digits find in a line what they found in the first of its kind."""
        return all(guard.found(text) == guard.spans for guard in self.guards)

    def read(self, name: str, data: bytes, lines: Places) -> Column:
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
    """Where a field stands in lines of each kind: `starts`, and in which of the `texts`, `forms`, by a kind's number.

    Kinds that differ in where a field stands, not in its digits, are read together. Form 0 is a line without the field.
    """

    starts: Places
    forms: Places
    texts: dict[DigitColumn | float, int]

    def with_kinds(self, name: str, kinds: list[LineKind]) -> FieldLayout:
        """With more kinds behind those that there are."""
        texts, starts, forms = dict(self.texts), [], []
        for kind in kinds:
            column = kind.columns.get(name)
            text = kind.stated.get(name, np.nan) if column is None else replace(column, start=0)
            starts.append(0 if column is None else column.start)
            forms.append(texts.setdefault(text, len(texts)))
        return FieldLayout(_joined(self.starts, starts), _joined(self.forms, forms), texts)

    def read(self, form: int, data: bytes, places: Places) -> Column:
        """The field where it begins at these places, in lines of one form."""
        text = next(islice(self.texts, form, None))
        return text.read(data, places) if isinstance(text, DigitColumn) else np.full(len(places), text)


def _joined(old: Places, new: list[int]) -> Places:
    return np.concatenate((old, np.array(new, np.int64)))


class _Table(dict[bytes, int]):
    def __missing__(self, key: bytes) -> int:
        return UNKNOWN


class LineKinds:
    """The formats of a log, as they are met."""

    def __init__(self) -> None:
        self.table = _Table({b"": NOTHING})
        self.kinds: list[LineKind] = []
        self.guarded: list[int] = []  # the numbers of those that have guards
        self._timers: dict[object, int] = {}
        self._layouts: dict[str, FieldLayout] = {}

    def layout(self, name: str) -> FieldLayout:
        """Where a field stands, by a number of the table."""
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

    def sorts(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """By a number of the table, whether it is of lines of steps, and whether of lines of timers."""
        steps = np.array([False] * _FIRST + [kind.steps for kind in self.kinds], np.bool_)
        timers = ~steps
        timers[:_FIRST] = False
        return steps, timers

    def learn(self, zeros: bytes, line: bytes, tried: list[Armed]) -> tuple[int, str, list[Found]]:
        """The number of a line that is not in the table, the line as text, and what is found in it if it is UNKNOWN.

        `zeros`: the line, every digit made a 0. `tried`: the patterns whose literal stands in it.
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
        """Lines in which nothing is, every digit made a 0, as many as there is room for."""
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
        if not made.steps:  # lines of timers are alike but for their names: one number for all
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
    """Whether the digits of a line are those that were made 0: other scripts have digits of their own."""
    return text.isascii() or (text.encode() == line and not any(each.isdecimal() and each > "9" for each in text))


def _step_kind(line: bytes, text: str, match: re.Match[str], each: Armed) -> LineKind | None:
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
                return None  # too large for a float, which other digits may not be
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
        return None  # a step that is no whole number, or goes by no number, is looked at line by line
    return LineKind(each, True, len(line), columns, _rank(line, text), _at(text), stated)


def _timers_kind(line: bytes, text: str, match: re.Match[str], each: Armed) -> LineKind | None:
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
    """The formats met so far, in other logs too; new ones where there are many."""
    global _shared
    if len(_shared.table) >= _MOST_KINDS // 2:
        _shared = LineKinds()
    return _shared
