"""Which patterns many lines could match, by the literal text that each pattern wants: all lines and patterns at once.

Four bytes at a time are looked up in a table of those that the literals hold. A literal of seven bytes or more holds
four that begin at a multiple of four wherever it stands, so that only every fourth place is looked at; for the few
short ones every place is.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.armed import Armed, armed
from hpc_gpt.readers.required import required_text

ZEROS = bytes(0x30 if 0x30 <= byte <= 0x39 else byte for byte in range(256))
_BITS = 18
_FACTOR = np.uint32(2654435761)
_SHIFT = np.uint32(32 - _BITS)
# (bytes of the window looked for, places within a group of four at which one of its grams must begin)
_WINDOWS = ((7, (0,)), (5, (0, 2)), (4, (0, 1, 2, 3)))


class LiteralScan:
    """The literals of some patterns; digits in lines and literals count as 0."""

    def __init__(self, patterns: Sequence[Armed]) -> None:
        self._groups: dict[bytes, list[Armed]] = {}
        for each in patterns:
            text = max(each.pattern.literal, required_text(each.pattern.regex), key=len)
            self._groups.setdefault(text.encode().translate(ZEROS), []).append(each)
        self._short = tuple(literal for literal in self._groups if len(literal) < 4)
        found: dict[bytes, set[bytes]] = {}
        self._places = {0}
        for literal in self._groups:
            if len(literal) < 4:
                continue
            size, places = next(window for window in _WINDOWS if len(literal) >= window[0])
            self._places |= set(places)
            window = min((literal[at : at + size] for at in range(len(literal) - size + 1)), key=_commonness)
            for at in range(size - 3):
                found.setdefault(window[at : at + 4], set()).add(literal)
        self._grams = np.frombuffer(b"\0\0\0\0" + b"".join(found), np.uint32)
        self._literals = (frozenset[bytes](), *(frozenset(each) for each in found.values()))
        self._buckets = self._table()

    def candidates(self, lines: Sequence[bytes]) -> list[list[Armed]]:
        """Of each line, its digits made 0, the patterns whose literal stands in it, in their own order."""
        found: list[set[bytes]] = [set() for _ in lines]
        text = b"\n".join(lines) + b"\n\n\n\n"
        starts = np.cumsum(np.fromiter(map(len, lines), np.int64, len(lines)) + 1) - 1
        for line, gram in self._hits(text, starts):
            found[line] |= {literal for literal in self._literals[gram] if literal in lines[line]}
        for literal in self._short:
            if literal in text:
                for index, line_text in enumerate(lines):
                    if literal in line_text:
                        found[index].add(literal)
        return [
            sorted((each for literal in literals for each in self._groups[literal]), key=lambda each: each.number)
            if literals
            else []
            for literals in found
        ]

    def _table(self) -> list[NDArray[np.int16]]:
        """By bucket, the number of the gram in it; where grams share a bucket, each further one is in a table more."""
        tables = [np.zeros(1 << _BITS, np.int16)]
        for number, gram in enumerate(self._grams[1:].tolist(), 1):
            place = (gram * int(_FACTOR) & 0xFFFFFFFF) >> int(_SHIFT)
            free = next((table for table in tables if not table[place]), None)
            if free is None:
                free = np.zeros(1 << _BITS, np.int16)
                tables.append(free)
            free[place] = number
        return tables

    def _hits(self, text: bytes, starts: NDArray[np.int64]) -> list[tuple[int, int]]:
        """(line, number of a gram in it), each once."""
        pairs = []
        for place in sorted(self._places):
            values = np.frombuffer(text, np.uint32, (len(text) - place) // 4, place)
            with np.errstate(over="ignore"):
                buckets = (values * _FACTOR) >> _SHIFT
            for row in self._buckets:
                numbers = row[buckets]
                hit = np.flatnonzero(numbers)
                hit = hit[self._grams[numbers[hit]] == values[hit]]
                if len(hit):
                    lines = np.searchsorted(starts, hit * 4 + place, side="left")
                    pairs.append(np.unique(lines * len(self._grams) + numbers[hit]))
        if not pairs:
            return []
        whole = np.unique(np.concatenate(pairs))
        lines, numbers = np.divmod(whole, len(self._grams))
        return list(zip(lines.tolist(), numbers.tolist(), strict=True))


def _commonness(window: bytes) -> int:
    """How common the bytes are in logs: small letters, spaces and digits most."""
    return sum(3 if byte in b" 0etaonrisl" else 2 if chr(byte).islower() else 1 for byte in window)


@cache
def literal_scan() -> LiteralScan:
    """That of all patterns of all dialects."""
    return LiteralScan(armed())
