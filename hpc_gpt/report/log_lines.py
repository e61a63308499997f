"""Lines of a log to show with a cause, without control characters and secrets."""

import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from hpc_gpt.core.format import plain
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.lines.source import Source

BEFORE, AFTER = 8, 4  # lines shown around a cause
_LONGEST_LINE = 200


def lines_around(path: Path, line: int) -> list[tuple[int, str]]:
    """Returns (number, text) of the lines around a line of a log; none if the log cannot be read again."""
    shown = range(line - BEFORE, line + AFTER + 1)
    lines_shown: list[tuple[int, str]] = []
    for first, lines in _blocks(path, shown.start):
        if first >= shown.stop:
            break
        lines_shown += [(number, _as_shown(text)) for number, text in enumerate(lines, first) if number in shown]
    return lines_shown


def last_lines(path: Path, end: int = sys.maxsize) -> list[tuple[int, str]]:
    """Returns (number, text) of the last lines of a log, up to line `end`, that are not empty."""
    last: deque[tuple[int, bytes]] = deque(maxlen=BEFORE)
    for first, lines in _blocks(path, 1):
        lines = lines[: max(0, end - first + 1)]
        skipped = max(0, len(lines) - 4 * BEFORE)
        last.extend(numbered for numbered in enumerate(lines[skipped:], first + skipped) if numbered[1].strip())
    return [(number, _as_shown(text)) for number, text in last]


def _blocks(path: Path, first: int) -> Iterator[tuple[int, list[bytes]]]:
    """Yields (number of the first line, lines) of every block of a log that ends at line `first` or later."""
    with Source(path) as source:
        if source.is_stdin:
            return
        number, unfinished = 1, b""
        for chunk in source.chunks():
            end = number + chunk.count(b"\n")
            if end >= first:
                *whole, unfinished = (unfinished + chunk).split(b"\n")
                yield number, whole
            number = end
        if unfinished:
            yield number, [unfinished]


def _as_shown(text: bytes) -> str:
    # A progress bar is drawn many times on one line: its last state counts.
    line = text.rstrip(b"\r").rsplit(b"\r", 1)[-1][:4000].decode("utf-8", "replace").expandtabs(4)
    return hide_secrets(plain(line, " ").rstrip())[:_LONGEST_LINE]
