"""The longest text that stands in every line a pattern matches, as far as the pattern's own form tells."""

from __future__ import annotations

import re
from typing import Any

_OPEN = ("SUBPATTERN", "ATOMIC_GROUP", "MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT")


def required_text(regex: str) -> str:
    """The longest run of characters that each match holds, "" where none is found.

    >>> required_text(r"\\biteration +(?P<step>\\d+)/ *(?P<steps_planned>\\d+) *\\|"), required_text("(?i)loss|step")
    ('iteration ', '')
    """
    try:
        from re import _parser  # type: ignore[attr-defined]

        parsed = _parser.parse(regex)
    except (ImportError, AttributeError, re.error):
        return ""
    if parsed.state.flags & re.IGNORECASE:
        return ""
    runs = [""]
    _walk(parsed, runs)
    return max(runs, key=len)


def _walk(parsed: Any, runs: list[str]) -> None:
    """Append to `runs`, the last of which goes on."""
    for operator, argument in parsed:
        name = str(operator)
        if name == "LITERAL":
            runs[-1] += chr(argument)
        elif name == "AT" or name in ("ASSERT", "ASSERT_NOT"):
            continue  # of no width
        elif name == "SUBPATTERN":
            _, added, removed, inner = argument
            if added or removed:
                runs.append("")
            else:
                _walk(inner, runs)
        elif name == "ATOMIC_GROUP":
            _walk(argument, runs)
        elif name in _OPEN and argument[0] >= 1:
            # At least once: the first one goes on from what is before; what follows begins anew.
            _walk(argument[2], runs)
            runs.append("")
        else:
            runs.append("")
