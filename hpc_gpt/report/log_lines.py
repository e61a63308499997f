"""Lines of a log as they may be shown: those around a place, or the last ones; no control characters, no secrets."""

from __future__ import annotations

from collections import deque
from pathlib import Path

from hpc_gpt.readers.logs.source import Source
from hpc_gpt.secrets import hide_secrets

BEFORE, AFTER = 8, 4  # lines shown around a cause
_LONGEST_LINE = 200


def lines_around(path: Path, line: int, before: int = BEFORE, after: int = AFTER) -> list[tuple[int, str]]:
    """(number, text) of the lines around a line of a log; none if the log cannot be read again."""
    found: list[tuple[int, str]] = []
    with Source(path) as source:
        if source.refused is not None or source.is_stdin:
            return found
        number, rest = 1, b""
        for chunk in source.chunks():
            count = chunk.count(b"\n")
            if number + count >= line - before:
                *whole, rest = (rest + chunk).split(b"\n")
                for offset, text in enumerate(whole):
                    if line - before <= number + offset <= line + after:
                        found.append((number + offset, _shown(text)))
            number += count
            if number > line + after:
                return found
    if rest and line - before <= number <= line + after:
        found.append((number, _shown(rest)))
    return found


def last_lines(path: Path, count: int = BEFORE) -> list[tuple[int, str]]:
    """(number, text) of a log's last lines that are not empty."""
    kept: deque[tuple[int, bytes]] = deque(maxlen=count)
    with Source(path) as source:
        if source.refused is not None or source.is_stdin:
            return []
        number, rest = 1, b""
        for chunk in source.chunks():
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop()
            for offset in range(max(0, len(lines) - 4 * count), len(lines)):
                if lines[offset].strip():
                    kept.append((number + offset, lines[offset]))
            number += len(lines)
        if rest.strip():
            kept.append((number, rest))
    return [(line, _shown(text)) for line, text in kept]


def _shown(text: bytes) -> str:
    # Of a progress bar the last state.
    line = text.rstrip(b"\r").rsplit(b"\r", 1)[-1][:4000].decode("utf-8", "replace").expandtabs(4)
    printable = "".join(letter if letter.isprintable() else " " for letter in line).rstrip()
    return hide_secrets(printable)[:_LONGEST_LINE]
