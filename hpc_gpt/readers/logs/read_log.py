"""A log read, from a path: a block of bytes at a time, by the lines that are alike.

`BlockReader` finds what `LineReader` finds, many lines at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.logs.blocks import Between, Block, is_between, take_known
from hpc_gpt.readers.logs.kept import KeptState
from hpc_gpt.readers.logs.line_kinds import NOTHING, UNKNOWN, kinds_for_a_log, zeroed
from hpc_gpt.readers.logs.lines import LONGEST_LINE, LineReader
from hpc_gpt.readers.logs.matches import Found, find, literal_scan, without_colours
from hpc_gpt.readers.logs.part import Part
from hpc_gpt.readers.logs.source import Source

_STRETCH = 1 << 16  # bytes
_MOST_LINES = 1 << 17  # taken at once: each takes more room than the byte of an empty line


@dataclass(frozen=True)
class LogRead:
    """A log's parts. `lines`: how many it holds; `bytes`: how many bytes of the file were read this time.

    `left_out`: what was skipped of the file, in words -> how often; what was skipped within a part is in the part.
    `refused`: why the file is no log, in words; then there are no parts.
    """

    parts: list[Part] = field(default_factory=list)
    lines: int = 0
    bytes: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    refused: str | None = None


def read_log(path: Path) -> LogRead:
    """The log at a path, `-` for standard input. Nothing that a file holds, or that happens to it, raises."""
    with Source(path) as source:
        if source.refused is not None:
            return LogRead(refused=source.refused, bytes=source.bytes_read)
        kept = KeptState(source, path)
        reader = BlockReader(kept.reader, kept.lines, kept.begun)
        held = b""
        if not (kept.offset and source.compressed):
            for chunk in source.chunks(kept.offset):
                reader.take(held)
                held = chunk
        # A line that is still being written is read now, and again when it is whole.
        if source.torn and not source.compressed:
            kept.keep(kept.reader, source.offset, reader.newlines, reader.begun)
            reader.take(held)
        else:
            reader.take(held)
            offset = source.size if source.compressed else source.offset
            kept.keep(kept.reader, offset, reader.newlines, reader.begun)
        return LogRead(reader.finish(), reader.lines, source.bytes_read, source.left_out)


@dataclass(frozen=True)
class _Apart:
    """A line that is read by itself. `index`: its place in the block; `found`: None if it has not been searched yet."""

    index: int
    text: str
    found: list[Found] | None


class BlockReader:
    """Takes the bytes of one log in order, in blocks that end where a line, or a piece of one, ends."""

    def __init__(self, reader: LineReader, newlines: int = 0, begun: bool = False) -> None:
        self.reader = reader
        self.newlines = newlines  # so far
        self.begun = begun  # there is something after the last of them
        self._kinds = kinds_for_a_log()

    @property
    def lines(self) -> int:
        """How many lines there were, with one that no newline ends."""
        return self.newlines + self.begun

    def finish(self) -> list[Part]:
        """The parts. The reader is used up."""
        return self.reader.finish(self.lines)

    def take(self, data: bytes) -> None:
        """One block."""
        if b"\x1b" in data:
            data = without_colours(data.decode("utf-8", "replace")).encode()
        if not data:
            return None
        found = np.frombuffer(data, np.uint8)
        newlines = found == 10
        bars = b"\r" in data
        stops = np.flatnonzero(newlines | (found == 13) if bars else newlines)
        if len(stops) > _MOST_LINES:
            half = int(stops[len(stops) // 2]) + 1
            self.take(data[:half])
            return self.take(data[half:])
        starts = np.concatenate((np.zeros(1, np.int64), stops + 1))
        if bars:
            passed = np.concatenate((np.zeros(1, np.int64), np.cumsum(newlines[stops])))
        else:
            passed = np.arange(len(starts), dtype=np.int64)
        numbers = self.newlines + 1 + passed
        self.newlines = int(numbers[-1]) - 1
        self.begun = data[-1] != 10
        block = Block(data, starts, np.append(stops, len(data)), numbers)
        unknown = self._kinds_of(block, found, bars)
        return self._take(block, unknown)

    def _kinds_of(self, block: Block, found: NDArray[np.uint8], bars: bool) -> dict[int, bytes]:
        """Look up the kind of each line. Returns the lines that are not known, their digits made 0, by index."""
        look_up = self._kinds.table.__getitem__
        unknown: dict[int, bytes] = {}
        kinds: list[NDArray[np.int64]] = []
        start = first = 0
        while start < len(found) or not kinds:
            # A stretch that fits a processor's cache, up to the end of a line.
            end = block.data.rfind(b"\n", start, start + _STRETCH) + 1
            end = end if end and start + _STRETCH < len(found) else len(found)
            zeros = zeroed(found[start:end])
            lines = (zeros.replace(b"\r", b"\n") if bars else zeros).split(b"\n")
            if end < len(found):
                lines.pop()
            kinds.append(np.fromiter(map(look_up, lines), np.int64, len(lines)))
            for index in np.flatnonzero(kinds[-1] == UNKNOWN).tolist():
                unknown[first + index] = lines[index]
            start, first = end, first + len(lines)
        block.kinds = np.concatenate(kinds)
        return unknown

    def _take(self, block: Block, unknown: dict[int, bytes]) -> None:
        apart = self._learn(block, unknown) if unknown else []
        if self._kinds.guarded:
            apart = sorted(apart + self._doubtful(block), key=lambda line: line.index)
        block.sort_lines(self._kinds)
        start = 0
        between: Between = {}
        for line in apart:
            text, found = (line.text, line.found) if line.found is not None else self.reader.look(line.text)
            if found and all(is_between(each) for _, each in found):
                between[line.index] = text, found
                continue
            take_known(self.reader, block, start, line.index, between)
            self.reader.apply(int(block.numbers[line.index]), text, found)
            start, between = line.index + 1, {}
        take_known(self.reader, block, start, len(block.kinds), between)

    def _doubtful(self, block: Block) -> list[_Apart]:
        """The lines that differ from others in a digit that a pattern asks for."""
        apart: list[_Apart] = []
        for index in np.flatnonzero(np.isin(block.kinds, self._kinds.guarded)).tolist():
            text = block.text(index)
            if not self._kinds.kind(int(block.kinds[index])).holds(text):
                block.kinds[index] = UNKNOWN
                apart.append(_Apart(index, text, find(text)))
        return apart

    def _learn(self, block: Block, zeros_of: dict[int, bytes]) -> list[_Apart]:
        """The lines to read one by one; the kinds of the others go into the block."""
        apart: list[_Apart] = []
        unknown, texts = np.array(list(zeros_of)), list(zeros_of.values())
        distinct = list(dict.fromkeys(texts))
        candidates = {distinct[place]: each for place, each in literal_scan().candidates(distinct).items()}
        long = np.flatnonzero(block.stops[unknown] - block.starts[unknown] > LONGEST_LINE).tolist()
        wanted = sorted({*(place for place, zeros in enumerate(texts) if zeros in candidates), *long})
        nothing = np.ones(len(unknown), np.bool_)
        nothing[wanted] = False
        block.kinds[unknown[nothing]] = NOTHING
        self._kinds.remember_nothing(texts[place] for place in np.flatnonzero(nothing).tolist())
        for place in wanted:
            index, zeros = int(unknown[place]), texts[place]
            tried = candidates.get(zeros, [])
            number = self._kinds.table[zeros]  # an earlier line of this block may have taught it
            if number == UNKNOWN:
                line = block.line(index)
                if len(line) > LONGEST_LINE:
                    apart.append(_Apart(index, line.decode("utf-8", "replace"), None))
                    continue
                number, text, found = self._kinds.learn(zeros, line, tried)
                if number == UNKNOWN:
                    apart.append(_Apart(index, text, found))
            block.kinds[index] = number
        return apart
