"""Fields of lines that differ in digits only: their place in a line, and their bytes as numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.reader.lines.fields import SIZES, figure, unit
from hpc_gpt.reader.lines.steps import Places, StepColumn

LARGE = re.compile(r"[eE][-+]?\d{3}")
# Powers of ten up to 1e22 are exact floats: one division or product by them is rounded once, like the conversion of the
# text.
_POWERS = 10.0 ** np.arange(23)
_MOST_DIGITS = 15
_CLOCK = re.compile(r"(?:\d{1,6}:)?\d{1,4}:\d\d", re.ASCII)
_NUMERAL = re.compile(r"([-+]?)(\d[\d,]*)(?:\.(\d*))?(?:[eE]([-+]?)(\d{1,3}))?([KkMGBT]?)%?")


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


def _clock_weights(text: str) -> tuple[int, ...]:
    """The seconds that each digit of a clock such as 1:02:03 counts, 0 for a colon; empty for any other text.

    >>> _clock_weights("1:02:03"), _clock_weights("12:5")
    ((3600, 0, 600, 60, 0, 10, 1), ())
    """
    if not _CLOCK.fullmatch(text):
        return ()
    parts = text.split(":")
    units = (3600, 60, 1)[-len(parts) :]
    weights = [
        [unit_s * 10**power for power in reversed(range(len(part)))] for part, unit_s in zip(parts, units, strict=True)
    ]
    return tuple(weight for part in weights for weight in (*part, 0))[:-1]


@dataclass(frozen=True)
class DigitColumn:
    """A field of lines that differ in digits only: its place in a line, and how its text becomes a figure.

    `numeral`: (sign, columns of the digits, number of fraction digits, sign of the exponent, columns of the exponent,
    size); None if each text is converted by itself. `plain`: a decimal number with too many digits for `numeral`, as
    Python prints floats. `finite`: no line of the kind has a NaN or an infinity in this field. `clock`: the seconds
    that each character of a clock counts.
    """

    field: str
    start: int
    width: int
    factor: float
    numeral: tuple[str, tuple[int, ...], int, str, tuple[int, ...], float] | None
    plain: bool = False
    finite: bool = False
    clock: tuple[int, ...] = ()

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
        column = replace(slow, numeral=_numeral(stripped), plain=is_plain, clock=_clock_weights(stripped))
        first_line = np.zeros(1, np.int64)
        is_equal = np.array_equal(column.read(line, first_line), slow.read(line, first_line), equal_nan=True)
        return column if is_equal else slow

    def read(self, data: bytes, lines: Places) -> StepColumn:
        """The field in the lines that begin at these places; NaN if the text is not a figure."""
        places = lines + self.start
        if self.clock:
            cells = _cells(data, places, self.width).astype(np.float64)
            figures = (cells - 48.0) @ np.array(self.clock, np.float64)
        elif self.numeral is None and self.plain:
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
