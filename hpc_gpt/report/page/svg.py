"""Drawings as inline SVG: the one place where text becomes markup outside the template."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpc_gpt.report.page.curves import Points, unbroken
from hpc_gpt.report.page.safe_text import safe


@dataclass(frozen=True)
class Svg:
    """Markup that was made here; the template puts it in as it stands."""

    markup: str

    def __html__(self) -> str:
        return self.markup


def escaped(value: Any) -> str:
    """Text as it may stand in an element or a quoted attribute."""
    return html.escape(safe(value), quote=True)


def element(name: str, content: str = "", **attributes: Any) -> str:
    """One element; `content` is markup, attributes are escaped and of our own making: paths are not to be cut.

    `class_` is class, `text_anchor` text-anchor.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(_plain(value)))}"' for key, value in attributes.items()
    )
    return f"<{name}{words}>{content}</{name}>" if content else f"<{name}{words}/>"


def drawing(content: str, width: float, height: float, title: str, words: str, anchor: str) -> Svg:
    """An image with a name and a description that screen readers tell. `anchor` is unique in the page."""
    named = element("title", escaped(title), id=f"{anchor}-t")
    # What the words say may be long; a screen reader can stop it, a cut cannot be undone.
    named += f'<desc id="{anchor}-d">{html.escape(safe(words, 2000))}</desc>'
    return Svg(
        element(
            "svg",
            named + content,
            viewBox=f"0 0 {_plain(width)} {_plain(height)}",
            role="img",
            aria_labelledby=f"{anchor}-t",
            aria_describedby=f"{anchor}-d",
        )
    )


def ornament(content: str, width: float, height: float, class_: str) -> Svg:
    """A drawing that repeats what text beside it says; a screen reader passes over it."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {_plain(width)} {_plain(height)}"}
    return Svg(element("svg", content, class_=class_, aria_hidden="true", focusable="false", **size))


def line_path(x: Points, y: Points) -> str:
    """The `d` of a path through the points, broken where y is NaN; a lone point is a dot of the line's width."""
    parts = []
    points = np.round(np.stack((x, y), 1), 1)
    for piece in unbroken(y):
        words = [f"{a:g} {b:g}" for a, b in points[piece].tolist()]
        parts.append("M" + "L".join(words) + ("h0" if len(words) == 1 else ""))
    return "".join(parts)


def _plain(value: Any) -> Any:
    return f"{value:.1f}".rstrip("0").rstrip(".") if isinstance(value, float) else value
