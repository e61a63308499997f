"""Fields of lines that differ in digits only: their place in a line, their bytes as numbers, and required digits.

Some patterns require certain digits. Each atom of a regex that does is replaced with a group that matches any digit. A
match without such a group holds for all digits; a match with such groups holds for each line that has the required
digits at their places. This is true because allowing more digits can only add matches. It fails in a negative
assertion and in an atomic group: a pattern with such an atom there may or may not match a line of the kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.reader.logs.matches import DialectPattern
from hpc_gpt.reader.pattern import SIZES, figure, unit
from hpc_gpt.reader.steps import Places, StepColumn

LARGE = re.compile(r"[eE][-+]?\d{3}")
# Powers of ten up to 1e22 are exact floats: one division or product by them is rounded once, like the conversion of the
# text.
_POWERS = 10.0 ** np.arange(23)
_MOST_DIGITS = 15
_NUMERAL = re.compile(r"([-+]?)(\d[\d,]*)(?:\.(\d*))?(?:[eE]([-+]?)(\d{1,3}))?([KkMGBT]?)%?")
# (place in a line, the allowed digits), for each digit that a pattern requires.
AskedDigits = tuple[tuple[int, str], ...]
_TOKEN = re.compile(
    r"\\x[0-9a-f]{2}|\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{\d+(?:,\d*)?\}[?+]?"
    r"|\(\?(?:P<\w+>|P=\w+\)|\(\w+\)|<[=!]|[:=!>]|[a-z]+[:)])|[*+?]\+|.",
    re.DOTALL,
)
_ANY_DIGIT = "0123456789"
_OPAQUE = ("(?!", "(?<!", "(?>")


def _cells(data: bytes, places: Places, width: int) -> NDArray[np.uint8]:
    """`width` bytes from each place on, shape (places, width)."""
    windows = np.ndarray((max(0, len(data) - width + 1),), f"V{width}", data, strides=(1,))
    return windows[places].view(np.uint8).reshape(len(places), width)


def _whole(cells: NDArray[np.uint8], columns: tuple[int, ...]) -> StepColumn:
    """The numbers that the digits in these columns form, exact below 2^53."""
    first, last = columns[0], columns[-1] + 1
    weights = np.zeros(last - first)
    weights[np.array(columns) - first] = _POWERS[len(columns) - 1 :: -1] if len(columns) > 1 else 1.0
    return np.asarray(cells[:, first:last].astype(np.float64) @ weights - 48.0 * weights.sum())


@dataclass(frozen=True)
class DigitColumn:
    """A field of lines that differ in digits only: its place in a line, and how its text becomes a figure.

    `numeral`: (sign, columns of the digits, number of fraction digits, sign of the exponent, columns of the exponent,
    size); None if each text is converted by itself. `plain`: a decimal number with too many digits for `numeral`, as
    Python prints floats. `finite`: no line of the kind has a NaN or an infinity in this field.
    """

    field: str
    start: int
    width: int
    factor: float
    numeral: tuple[str, tuple[int, ...], int, str, tuple[int, ...], float] | None
    plain: bool = False
    finite: bool = False

    @staticmethod
    def of(name: str, line: bytes, start: int, end: int) -> DigitColumn:
        """Makes the column of a group or a key from one line."""
        text = line[start:end].decode()
        stripped = text.strip()
        start += len(text) - len(text.lstrip())
        field, factor = unit(name)
        match = _NUMERAL.fullmatch(stripped) if stripped.isascii() and not LARGE.search(stripped) else None
        slow = DigitColumn(field, start, len(stripped.encode()), factor, None, finite=match is not None)
        is_plain = match is not None and not match[6] and stripped[-1] != "%" and "," not in stripped
        column = replace(slow, numeral=_numeral(stripped), plain=is_plain)
        first_line = np.zeros(1, np.int64)
        is_equal = np.array_equal(column.read(line, first_line), slow.read(line, first_line), equal_nan=True)
        return column if is_equal else slow

    def read(self, data: bytes, lines: Places) -> StepColumn:
        """The field in the lines that begin at these places; NaN if the text is not a figure."""
        places = lines + self.start
        if self.numeral is None and self.plain:
            figures = _cells(data, places, self.width).view(f"S{self.width}").reshape(-1).astype(np.float64)
        elif self.numeral is None:
            texts = (data[place : place + self.width].decode("utf-8", "replace") for place in places.tolist())
            figures = np.array([np.nan if (value := figure(text)) is None else value for text in texts], np.float64)
        else:
            figures = self._figures(data, places)
        if self.factor < 0:
            with np.errstate(divide="ignore"):
                return np.where(figures == 0, np.nan, 1 / figures)
        return figures * self.factor

    def _figures(self, data: bytes, places: Places) -> StepColumn:
        assert self.numeral
        sign, digits, fraction, turned, exponent, size = self.numeral
        cells = _cells(data, places, self.width)
        figures = _whole(cells, digits)
        if exponent:
            power = _whole(cells, exponent) * (-1.0 if turned == "-" else 1.0) - fraction
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
    match = _NUMERAL.fullmatch(text) if text.isascii() else None
    if match is None:
        return None
    digits = tuple(
        place
        for group in (2, 3)
        for place in range(*match.span(group))
        if match[group] is not None and text[place] != ","
    )
    fraction = len(match[3] or "")
    if len(digits) > _MOST_DIGITS or fraction > 22:
        return None
    exponent = tuple(range(*match.span(5))) if match[5] else ()
    return match[1], digits, fraction, match[4] or "", exponent, SIZES[match[6]]


@dataclass(frozen=True)
class TimeColumn:
    """The time of day in lines that differ in digits only: its place in a line, and the places of its numbers in it."""

    start: int
    spans: tuple[tuple[str, tuple[int, int]], ...]

    def read(self, data: bytes, lines: Places) -> StepColumn:
        """Epoch seconds, the time of day taken as UTC; NaN if it is not a valid time."""
        cells = _cells(data, lines + self.start, max(span[1] for _, span in self.spans))
        number = {name: _whole(cells, tuple(range(*span))).astype(np.int64) for name, span in self.spans}
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
            first_digit, end = dict(self.spans)["part"]
            at = at + number["part"] / _POWERS[end - first_digit]
        return np.where(fine, at, np.nan)


@cache
def _loosened(regex: str) -> tuple[re.Pattern[str], dict[int, str]]:
    """(the pattern with any digit where it requires certain ones, {group: the required digits}). The digits are "" if
    they cannot be determined."""
    tokens = _TOKEN.findall(regex)
    pieces: list[str] = []
    digits_of_group: dict[int, str] = {}
    groups = 0
    opened: list[tuple[bool, int]] = []  # per open group: whether it is opaque, and the number of groups before it
    for token, following in zip(tokens, [*tokens[1:], ""], strict=True):
        repeated = following[:1] in ("{", "*", "+") or following == "?+"
        digits = ""
        if token[0] == "(" and (token[-1] != ")" or token.startswith("(?(")):
            opened.append((token in _OPAQUE or any(opaque for opaque, _ in opened), groups))
            groups += token == "(" or token.startswith("(?P<")
        elif token == ")":
            _, before = opened.pop()
            if repeated:  # a match keeps only the last repetition
                digits_of_group |= {group: "" for group in digits_of_group if group > before}
        elif token in _ANY_DIGIT:
            digits = token
        elif token[0] == "[":
            other_letters = re.sub(r"\\.|0-9", "", token)
            if any(digit in other_letters for digit in _ANY_DIGIT):
                digits = "".join(re.findall(token, _ANY_DIGIT)) if re.fullmatch(r"\[[\d-]+\]", token) else "?"
        elif token.startswith("(?P=") or re.fullmatch(r"\\[1-9]", token):
            digits = "?"
        if digits == "?" or (digits and opened and opened[-1][0]):
            return re.compile(""), {0: ""}
        if digits:
            groups += 1
            digits_of_group[groups] = "" if repeated else digits
            token = r"(\d)"
        pieces.append(token)
    return re.compile("".join(pieces)), digits_of_group


def asked_digits(tried: Sequence[DialectPattern], text: str) -> AskedDigits | None:
    """The digits that patterns require in a line, which has them; None if it lacks one, or if they are unknown.

    `tried`: the patterns whose literal is in the line, digits aside.
    """
    digits_at: dict[int, str] = {}
    for rule in tried:
        literal = rule.pattern.literal
        regex, digits_of_group = _loosened(rule.pattern.regex)
        in_literal = [place for place, letter in enumerate(literal) if letter in _ANY_DIGIT]
        for match in regex.finditer(text) if digits_of_group or in_literal else ():
            at = text.find(literal) if in_literal else 0
            pairs = [(at + place, literal[place]) for place in in_literal]
            pairs += [
                (match.start(group), digits) for group, digits in digits_of_group.items() if match.start(group) >= 0
            ]
            for place, digits in pairs:
                digits_at[place] = "".join(digit for digit in digits_at.get(place, _ANY_DIGIT) if digit in digits)
            if at < 0 or not all(text[place : place + 1] in tuple(digits_at[place]) for place, _ in pairs):
                return None
    return tuple(digits_at.items())
