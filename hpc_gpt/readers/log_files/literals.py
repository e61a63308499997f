"""Which patterns many lines could match, by the literal text that each pattern wants: all lines and patterns at once.

Four bytes at a time are looked up in a table of those that the literals hold. A literal of seven bytes or more holds
four that begin at a multiple of four wherever it stands, so that only every fourth place is looked at; for the few
short ones every place is.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.log_files.armed import Armed, armed
from hpc_gpt.readers.log_files.required import required_text

ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_BITS = 18
_FACTOR = np.uint32(2654435761)
_SHIFT = np.uint32(32 - _BITS)
# (bytes of the window looked for, places within a group of four at which one of its grams must begin)
_WINDOWS = ((7, (0,)), (5, (0, 2)), (4, (0, 1, 2, 3)))


class LiteralScan:
    """The literals of some patterns; digits in lines and literals count as 0."""

    def __init__(self, patterns: Sequence[Armed]) -> None:
        common = _Commonness()
        self.groups: dict[bytes, list[Armed]] = {}
        for each in patterns:
            text = each.pattern.literal
            if len(text) < _WINDOWS[0][0]:
                text = max(text, required_text(each.pattern.regex), key=len)
            self.groups.setdefault(text.encode().translate(ZEROS), []).append(each)
        self._short = tuple(literal for literal in self.groups if len(literal) < 4)
        self._literals = [b"", *(literal for literal in self.groups if len(literal) >= 4)]
        entries: dict[bytes, list[_Entry]] = {}
        places = {0}
        for number, literal in enumerate(self._literals):
            if number == 0:
                continue
            size, begins = next(window for window in _WINDOWS if len(literal) >= window[0])
            places |= set(begins)
            windows = [literal[at : at + size] for at in range(len(literal) - size + 1)]
            first = min(range(len(windows)), key=[common.of(window) for window in windows].__getitem__)
            for at in range(first, first + size - 3):
                entries.setdefault(literal[at : at + 4], []).append(_Entry(number, literal, at))
        self._places = sorted(places)
        self._grams = np.frombuffer(b"\0\0\0\0" + b"".join(entries), np.uint32)
        self._tables = _tables(self._grams)
        # Entry 0 is none: its masks let pass what no value equals.
        every = [each for of_gram in entries.values() for each in of_gram]
        self._literal_of = np.array([0, *(each.number for each in every)])
        self._before = np.array([(0, 1), *(each.around(-4) for each in every)], np.uint32)
        self._behind = np.array([(0, 1), *(each.around(4) for each in every)], np.uint32)
        self._entries = np.zeros((len(self._grams), max(map(len, entries.values()), default=1)), np.int64)
        self._shared = np.array([0, *map(len, entries.values())])  # by gram, how many literals hold it
        count = 1
        for gram, of_gram in enumerate(entries.values(), 1):
            self._entries[gram, : len(of_gram)] = np.arange(count, count + len(of_gram))
            count += len(of_gram)

    def candidates(self, lines: Sequence[bytes]) -> dict[int, list[Armed]]:
        """By line, its digits made 0, the patterns whose literal stands in it, in their own order, if there are any."""
        found: dict[int, list[Armed]] = {}
        text = b"\n\n\n\n" + b"\n".join(lines) + b"\n\n\n\n\n\n\n\n"
        starts = 3 + np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)) + 1)
        for line, number in self._hits(text, starts):
            if self._literals[number] in lines[line]:
                found.setdefault(line, []).extend(self.groups[self._literals[number]])
        for literal in self._short:
            if literal in text:
                for line, line_text in enumerate(lines):
                    if literal in line_text:
                        found.setdefault(line, []).extend(self.groups[literal])
        for patterns in found.values():
            if len(patterns) > 1:
                patterns.sort(key=lambda each: each.number)
        return found

    def _hits(self, text: bytes, starts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(line, number of a literal that is likely in it), each once."""
        pairs = []
        for place in self._places:
            values = np.frombuffer(text, np.uint32, (len(text) - place) // 4, place)
            with np.errstate(over="ignore"):
                buckets = (values[1:-1] * _FACTOR) >> _SHIFT
            for table in self._tables:
                grams = table[buckets]
                hit = np.flatnonzero(grams) + 1
                hit = hit[self._grams[grams[hit - 1]] == values[hit]]
                if not len(hit):
                    continue
                of_hit = grams[hit - 1]
                for nth in range(int(self._shared[of_hit].max())):
                    more = self._shared[of_hit] > nth
                    hit, of_hit = hit[more], of_hit[more]
                    entries = self._entries[of_hit, nth]
                    before, behind = self._before[entries], self._behind[entries]
                    right = (values[hit - 1] & before[:, 0]) == before[:, 1]
                    right &= (values[hit + 1] & behind[:, 0]) == behind[:, 1]
                    lines = np.searchsorted(starts, hit[right] * 4 + place, side="left")
                    pairs.append(lines * len(self._literals) + self._literal_of[entries[right]])
        if not pairs:
            return []
        lines, numbers = np.divmod(np.unique(np.concatenate(pairs)), len(self._literals))
        return list(zip(lines.tolist(), numbers.tolist(), strict=True))


def _tables(grams: NDArray[np.uint32]) -> list[NDArray[np.int16]]:
    """By bucket, the number of the gram in it; where grams share a bucket, each further one is in a table more."""
    tables = [np.zeros(1 << _BITS, np.int16)]
    for number, gram in enumerate(grams[1:].tolist(), 1):
        place = (gram * int(_FACTOR) & 0xFFFFFFFF) >> int(_SHIFT)
        free = next((table for table in tables if not table[place]), None)
        if free is None:
            free = np.zeros(1 << _BITS, np.int16)
            tables.append(free)
        free[place] = number
    return tables


@dataclass(frozen=True)
class _Entry:
    """Four bytes of a literal, from `at` on, and the number of the literal."""

    number: int
    literal: bytes
    at: int

    def around(self, offset: int) -> tuple[int, int]:
        """(mask, value) of the four bytes so far from these, as much of them as is the literal's."""
        mask, value = bytearray(4), bytearray(4)
        for index in range(4):
            place = self.at + offset + index
            if 0 <= place < len(self.literal):
                mask[index], value[index] = 0xFF, self.literal[place]
        return int.from_bytes(mask, sys.byteorder), int.from_bytes(value, sys.byteorder)


class _Commonness:
    """How often four bytes stand in logs, as the specimens of the dialects tell."""

    def __init__(self) -> None:
        text = "\n".join(dialect.specimen for dialect in dialects()).encode().translate(ZEROS)
        self._counts = Counter(text[at : at + 4] for at in range(0, len(text), 2))

    def of(self, window: bytes) -> int:
        """The sum over the window's grams; lower-case letters and blanks count too, for what no specimen holds."""
        seen = sum(self._counts[window[at : at + 4]] for at in range(len(window) - 3))
        return 8 * seen + sum(byte in b" 0etaonrisl" for byte in window)


@cache
def literal_scan() -> LiteralScan:
    """That of all patterns of all dialects."""
    return LiteralScan(armed())
