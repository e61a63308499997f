"""Text of a log as a page may show it: no control characters, no secrets, no endless lines.

Markup is no matter here: what goes into the page is escaped where it goes in.
"""

from __future__ import annotations

import math
import re
from typing import Any

from hpc_gpt.secrets import hide_secrets

LONGEST = 600
# Control characters, lone surrogates, and the characters that turn the direction of the text around them.
_UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def safe(value: Any, longest: int = LONGEST) -> str:
    """The text of a value: unfit characters as U+FFFD, what looks like a secret hidden, the rest after `longest` cut.

    >>> safe("a\\x1b[31mb"), safe("https://me:pass@host/")
    ('a\ufffd[31mb', 'https://[removed]@host/')
    """
    text = value if isinstance(value, str) else _text(value)
    if len(text) > 8 * longest:
        text = text[: 8 * longest]
    if not text.isascii() or not text.isprintable():
        text = _UNFIT.sub("\ufffd", text)
    if len(text) >= 8:
        text = hide_secrets(text)
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _text(value: Any) -> str:
    if value is None:
        return ""
    try:
        return str(value)
    except ValueError:  # an int of more digits than Python turns into text
        return "a number of too many digits"


def number(value: Any) -> float | None:
    """A finite figure that can be shown and drawn; None for any other value.

    >>> number(3), number(float("nan")), number("3"), number(10**400)
    (3.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        figure = float(value)
    except OverflowError:
        return None
    return figure if math.isfinite(figure) else None
