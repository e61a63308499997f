"""Where in a line the texts of a pattern's fields stand."""

from __future__ import annotations

import re

from hpc_gpt.readers.pattern import Pattern


def field_spans(line: str, match: re.Match[str], pattern: Pattern) -> dict[str, tuple[int, int]]:
    """(start, end) of each group that matched and of each key's value behind the match, by name."""
    spans = {name: match.span(name) for name, text in match.groupdict().items() if text is not None}
    if not pattern.keys:
        return spans
    pieces = line[match.end() :].split(pattern.separator)
    place = match.end()
    for index, piece in enumerate(pieces):
        key, colon, _ = piece.partition(":")
        end = place + len(piece)
        closed = index < len(pieces) - 1 or not pattern.closed
        if closed and colon and (name := pattern.keys.get(key.strip())):
            spans.setdefault(name, (place + len(key) + 1, end))
        place = end + len(pattern.separator)
    return spans
