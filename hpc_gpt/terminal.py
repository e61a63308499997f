"""The terminal: the one module that knows rich, loaded only where something is drawn."""

from __future__ import annotations

import math
import os
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def width(stderr: bool = False) -> int | None:
    """Columns of the terminal behind stdout (or stderr); None where it is a pipe or a file, which has no width."""
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def can_ask() -> bool:
    """Whether a question would be seen and could be answered: stdin and stderr are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def colour_wanted() -> bool:
    """False under NO_COLOR or a dumb terminal, as https://no-color.org asks."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def console(stderr: bool = False) -> Console:
    """rich's console for stdout or stderr. It draws nothing special into a pipe, and no colour under NO_COLOR."""
    from rich.console import Console

    return Console(stderr=stderr, no_color=not colour_wanted(), highlight=False, soft_wrap=True)


def write_heading(line: str) -> None:
    """One line of stdout in bold on a terminal, plain elsewhere: the weight is never the only sign."""
    if width() is not None and colour_wanted():
        from rich.text import Text

        console().print(Text(line, style="bold"))
    else:
        sys.stdout.write(line + "\n")


class ProgressLine:
    """A line of progress on stderr: rewritten in place on a terminal, a line each into a file."""

    def __init__(self) -> None:
        self._columns = width(stderr=True)

    def show(self, text: str) -> None:
        if self._columns is None:
            sys.stderr.write(text + "\n")
        else:
            sys.stderr.write("\r\x1b[K" + text[: self._columns - 1])
        sys.stderr.flush()

    def end(self) -> None:
        """Leaves the last text standing."""
        if self._columns is not None:
            sys.stderr.write("\n")
            sys.stderr.flush()


class Screen:
    """A text that is shown again and again: in place on a terminal, one after another into a file."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        columns = width()
        if columns is not None and self._shown:
            sys.stdout.write(f"\x1b[{_rows(self._shown, columns)}F\x1b[J")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        self._shown = text


def _rows(text: str, columns: int) -> int:
    """Rows of the terminal that a text takes: a line longer than a row goes on in the next."""
    from rich.cells import cell_len

    return sum(max(1, math.ceil(cell_len(line) / columns)) for line in text.split("\n"))
