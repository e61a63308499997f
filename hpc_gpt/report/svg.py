"""Text from logs made safe for a page, and drawings as inline SVG.

Text becomes markup only here and in the template. `safe` does not escape: the template does.
"""

import html
import math
import re
from dataclasses import dataclass
from typing import Any

from hpc_gpt.core.format import cut
from hpc_gpt.core.secrets import hide_secrets

LONGEST = 600
# Control characters, lone surrogates, and characters that change the direction of text.
_UNFIT = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def safe(value: Any, longest: int = LONGEST) -> str:
    """A value as text for a page: control characters as U+FFFD, secrets hidden, cut to `longest`.

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
    return cut(text, longest)


def _text(value: Any) -> str:
    if value is None:
        return ""
    try:
        return str(value)
    except ValueError:  # Python refuses to convert an int of very many digits
        return "a number with too many digits"


def number(value: Any) -> float | None:
    """The value as a finite float; None if it is not one.

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


@dataclass(frozen=True)
class Svg:
    """Markup made here, which the template inserts unchanged."""

    markup: str

    def __html__(self) -> str:
        return self.markup


def escaped(value: Any) -> str:
    """Text escaped for an element or a quoted attribute."""
    return html.escape(safe(value), quote=True)


def element(name: str, content: str = "", **attributes: Any) -> str:
    """One element. `content` is markup; attributes are escaped but not cut, as they may be long paths.

    `class_` is class, `text_anchor` text-anchor.
    """
    markup = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(_plain(value)))}"' for key, value in attributes.items()
    )
    return f"<{name}{markup}>{content}</{name}>" if content else f"<{name}{markup}/>"


def drawing(content: str, width: float, height: float, title: str, description: str, anchor: str) -> Svg:
    """A drawing that is scaled to its place, with a name and a description for screen readers.

    `anchor` is unique in the page.
    """
    named = element("title", escaped(title), id=f"{anchor}-t")
    # The description may be long, as a screen reader can stop reading it.
    named += f'<desc id="{anchor}-d">{html.escape(safe(description, 2000))}</desc>'
    box = f"0 0 {_plain(width)} {_plain(height)}"
    labels = {"aria_labelledby": f"{anchor}-t", "aria_describedby": f"{anchor}-d"}
    return Svg(element("svg", named + content, viewBox=box, role="img", **labels))


def _plain(value: Any) -> Any:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
