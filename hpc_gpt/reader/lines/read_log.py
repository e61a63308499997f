"""Reads a log from a path, in blocks of bytes: similar lines of a block are taken together.

`BlockReader` finds the same as `LineReader`, many lines at once. It is here for its speed alone: a scanner of 25 lines
that gives each line to `LineReader` (`read_log_plainly` in tests/reader/reading.py) reads the same at a tenth of the
speed or less, in 15 to 98 times the CPU time for logs of four programs.
"""

import collections
import contextlib
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core import output
from hpc_gpt.core.errors import fault_words
from hpc_gpt.reader.lines import trainer_state
from hpc_gpt.reader.lines.growing_parts import LONGEST_LINE
from hpc_gpt.reader.lines.line_kinds import NOTHING, UNKNOWN, LineBlock, kinds_for_a_log, zeroed
from hpc_gpt.reader.lines.line_reader import LineReader
from hpc_gpt.reader.lines.matches import ANSI, RuleMatch, find, literal_scan, time_of, without_colours
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.source import Source
from hpc_gpt.reader.lines.stretches import Unordered, is_unordered, take_known
from hpc_gpt.reader.lines.tracebacks import LAST_FRAME

READER_FAILED = "its reader failed"  # the begin of the reason if a fault of a reader leaves a file out
_STRETCH = 1 << 16  # bytes
_HEAD = 1 << 16  # bytes
_DOCUMENT_HEAD = 1 << 12  # bytes
_BEGIN = 60  # characters before a line's time: labels and the name of a logger
# As `date` and nvidia-smi print it: `Tue Mar  5 10:03:33 CET 2024`.
_OF_DATE = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d) (?:[A-Z]{3,5} )?(\d{4})\b"
)
_LONGEST_START = 86_400.0  # seconds to the first known line: an earlier time is of something else, such as a build
_MOST_LINES = 1 << 17  # lines taken at once: each takes much more memory than its bytes if it is empty


@dataclass(frozen=True)
class LogRead:
    """The parts of a log. `lines`: the number of its lines.

    `left_out`: reason -> how often something of the file was skipped; each part has its own `left_out`.
    `refused`: why the file is not a log; then there are no parts.
    """

    parts: list[Part] = field(default_factory=list)
    lines: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    refused: str | None = None


def read_log(path: Path, name: str | None = None) -> LogRead:
    """Reads the log at a path, `-` for standard input. `name`: how its places name the file, else by the path.

    Never raises, whatever is in the file or happens to it: if a reader fails, the file is refused."""
    output.working_on = str(path)
    try:
        return _read_log(path, name)
    except Exception as fault:
        return LogRead(refused=f"{READER_FAILED}: {fault_words(fault)}")


def _read_log(path: Path, name: str | None) -> LogRead:
    with Source(path, name) as source:
        if source.refused is not None:
            return LogRead(refused=source.refused)
        if trainer_state.is_trainer_state(source.head[:_DOCUMENT_HEAD].decode("utf-8", "replace")):
            text = source.document()
            return LogRead([trainer_state.part_of(source.file, text)], len(text.splitlines()), source.left_out)
        reader, head = BlockReader(LineReader(source.file)), b""
        for chunk in source.chunks():
            head = head or chunk
            reader.take(chunk)
        parts = reader.finish()
        parts[0].first_at = first_clock(head, parts[0].first_at)
        return LogRead(parts, reader.lines, source.left_out)


@dataclass(frozen=True)
class _SingleLine:
    """A line that is read by itself. `index`: its place in the block; `matches`: None before the search."""

    index: int
    text: str
    matches: list[RuleMatch] | None


class BlockReader:
    """Takes the bytes of one log in order, in blocks that end after a line or a piece of a line."""

    def __init__(self, reader: LineReader) -> None:
        self.reader = reader
        self.newlines = 0  # number of newlines so far
        self.begun = False  # a line without a newline follows the last one
        self._kinds = kinds_for_a_log()

    @property
    def lines(self) -> int:
        """The number of lines so far, including a last one without a newline."""
        return self.newlines + self.begun

    def finish(self) -> list[Part]:
        """The parts. The reader cannot be used again."""
        return self.reader.finish(self.lines)

    def take(self, data: bytes) -> None:
        """Takes one block."""
        if not data:
            return None
        letters = np.frombuffer(data, np.uint8)
        newlines = letters == 10
        bars = b"\r" in data
        stops = np.flatnonzero(newlines | (letters == 13) if bars else newlines)
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
        block = LineBlock(data, starts, np.append(stops, len(data)), numbers)
        unknown = self._kinds_of(block, letters, bars)
        return self._take(block, unknown)

    def _kinds_of(self, block: LineBlock, letters: NDArray[np.uint8], bars: bool) -> dict[int, bytes]:
        """Looks up the kind of each line; returns {index: text with digits replaced with 0} of the unknown lines."""
        look_up = self._kinds.table.__getitem__
        unknown: dict[int, bytes] = {}
        kinds: list[NDArray[np.int64]] = []
        start = first = 0
        while start < len(letters) or not kinds:
            # A stretch that fits the processor's cache, up to the end of a line.
            end = block.data.rfind(b"\n", start, start + _STRETCH) + 1
            end = end if end and start + _STRETCH < len(letters) else len(letters)
            zeros = zeroed(letters[start:end])
            lines = (zeros.replace(b"\r", b"\n") if bars else zeros).split(b"\n")
            if end < len(letters):
                lines.pop()
            kinds.append(np.fromiter(map(look_up, lines), np.int64, len(lines)))
            for index in np.flatnonzero(kinds[-1] == UNKNOWN).tolist():
                unknown[first + index] = lines[index]
            start, first = end, first + len(lines)
        block.kinds = np.concatenate(kinds)
        return unknown

    def _take(self, block: LineBlock, unknown: dict[int, bytes]) -> None:
        single_lines = self._learn(block, unknown) if unknown else []
        block.sort_lines(self._kinds)
        start = 0
        unordered: Unordered = {}
        waiting = collections.deque(single_lines)
        while waiting or self.reader.tracebacks.count:
            in_traceback = self.reader.tracebacks.count
            if in_traceback and self.reader.tracebacks.skips_indented:
                begin = start
                while start < len(block.kinds) and block.kinds[start] == NOTHING and block.is_indented(start):
                    start += 1
                for index in range(max(begin, start - LAST_FRAME), start):
                    self.reader.tracebacks.take(0, block.text(index), False)
            if in_traceback and start < len(block.kinds) and not (waiting and waiting[0].index == start):
                line = _known_line(block, start)
            elif waiting:
                line = waiting.popleft()
            else:
                break
            text, matches = (line.text, line.matches) if line.matches is not None else self.reader.look(line.text)
            if matches and not in_traceback and all(is_unordered(rule) for _, rule in matches):
                unordered[line.index] = text, matches
                continue
            take_known(self.reader, block, start, line.index, unordered)
            self.reader.apply(int(block.numbers[line.index]), text, matches)
            start, unordered = line.index + 1, {}
        take_known(self.reader, block, start, len(block.kinds), unordered)

    def _learn(self, block: LineBlock, zeros_of: dict[int, bytes]) -> list[_SingleLine]:
        """Sets the kinds of unknown lines in the block; returns the lines to read one by one."""
        single_lines: list[_SingleLine] = []
        unknown, texts = np.array(list(zeros_of)), list(zeros_of.values())
        distinct = list(dict.fromkeys(texts))
        plain = [ANSI.sub(b"", zeros) if b"\x1b" in zeros else zeros for zeros in distinct]
        candidates = {distinct[place]: rules for place, rules in literal_scan().candidates(plain).items()}
        long = np.flatnonzero(block.stops[unknown] - block.starts[unknown] > LONGEST_LINE).tolist()
        wanted = sorted({*(place for place, zeros in enumerate(texts) if zeros in candidates), *long})
        nothing = np.ones(len(unknown), np.bool_)
        nothing[wanted] = False
        block.kinds[unknown[nothing]] = NOTHING
        self._kinds.remember_nothing(texts[place] for place in np.flatnonzero(nothing).tolist())
        often = self._kinds.note_met(collections.Counter(texts[place] for place in wanted))
        for place in wanted:
            index, zeros = int(unknown[place]), texts[place]
            tried = candidates.get(zeros, [])
            number = self._kinds.table[zeros]  # an earlier line of this block may have added it
            if number == UNKNOWN:
                line = block.line(index)
                if len(line) > LONGEST_LINE:
                    single_lines.append(_SingleLine(index, block.text(index), None))
                    continue
                if zeros in often:
                    number, text, matches = self._kinds.learn(zeros, line, tried)
                else:
                    text = block.text(index)
                    matches = find(text, tried)
                    number = UNKNOWN if matches else NOTHING
                if number == UNKNOWN:
                    single_lines.append(_SingleLine(index, text, matches))
            block.kinds[index] = number
        return single_lines


def _known_line(block: LineBlock, index: int) -> _SingleLine:
    if block.kinds[index] == NOTHING:
        return _SingleLine(index, block.text(index), [])
    return _SingleLine(index, *block.text_and_matches(index))


def first_clock(data: bytes, known: float | None) -> float | None:
    """Epoch seconds of the first line in the head of a log that begins with a time of day. `known`: those of the first
    line that a reader knows, which are returned if there is no such line, or if its time is of something else."""
    for line in re.split(r"[\r\n]", without_colours(data[:_HEAD].decode("utf-8", "replace"))):
        at = time_of(line[:_BEGIN])
        if at is None and (date := _OF_DATE.search(line[: 2 * _BEGIN])):
            with contextlib.suppress(ValueError):
                at = datetime.strptime(" ".join(date.groups()), "%b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp()
        if at is not None:
            return at if known is None or 0 < known - at < _LONGEST_START else known
    return known
