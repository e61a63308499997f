"""The terminal. This is the only module that uses rich, and it loads rich only to draw."""

from __future__ import annotations

import contextlib
import math
import os
import select
import shutil
import sys
import termios
import tty
from collections.abc import Callable, Iterator


def width(stderr: bool = False) -> int | None:
    """Columns of the terminal at stdout (or stderr); None if it is a pipe or a file."""
    stream = sys.stderr if stderr else sys.stdout
    if not stream.isatty():
        return None
    return shutil.get_terminal_size().columns


def can_ask() -> bool:
    """Whether the user can see and answer a question: stdin and stderr are terminals."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def colour_wanted() -> bool:
    """False under NO_COLOR or a dumb terminal, as https://no-color.org asks."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def write_heading(line: str) -> None:
    """Prints a heading: bold on a terminal, plain elsewhere. Bold is never the only sign."""
    if width() is not None and colour_wanted():
        from rich.console import Console
        from rich.text import Text

        Console(highlight=False, soft_wrap=True).print(Text(line, style="bold"))
    else:
        sys.stdout.write(line + "\n")


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """Within the block, what waits at most so many seconds for a key, and returns it; empty if none was pressed."""
    listened = [sys.stdin.fileno()] if sys.stdin.isatty() else []
    before = termios.tcgetattr(listened[0]) if listened else None

    def pressed(seconds: float) -> str:
        ready = select.select(listened, [], [], seconds)[0]
        return (os.read(ready[0], 1).decode("ascii", "replace") or "q") if ready else ""  # at the end of input, too

    try:
        if before is not None:
            tty.setcbreak(listened[0])
        yield pressed
    finally:
        if before is not None:
            termios.tcsetattr(listened[0], termios.TCSADRAIN, before)


class ProgressLine:
    """A progress line on stderr: rewritten in place on a terminal, one line after another in a file."""

    def __init__(self) -> None:
        self._columns = width(stderr=True)

    def show(self, text: str) -> None:
        if self._columns is None:
            sys.stderr.write(text + "\n")
        else:
            sys.stderr.write("\r\x1b[K" + text[: self._columns - 1])
        sys.stderr.flush()

    def end(self) -> None:
        """Ends the line; the last text stays on the screen."""
        if self._columns is not None:
            sys.stderr.write("\n")
            sys.stderr.flush()


class Screen:
    """A text that is shown repeatedly: in place on a terminal, as far as it has rows, one after another in a file."""

    def __init__(self) -> None:
        self._shown = ""

    def show(self, text: str) -> None:
        columns = width()
        if columns is not None:
            text = _fitted(text, columns, shutil.get_terminal_size().lines - 1)
            if self._shown:
                sys.stdout.write(f"\x1b[{_rows(self._shown, columns)}F\x1b[J")
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        self._shown = text


def _fitted(text: str, columns: int, most: int) -> str:
    """The first lines of a text that `most` rows can hold, and how many are left out: what has scrolled off the top
    cannot be rewritten."""
    lines = text.split("\n")
    kept = len(lines)
    while kept > 1 and _rows("\n".join(lines[:kept]), columns) + (kept < len(lines)) > most:
        kept -= 1
    return "\n".join([*lines[:kept], *([f"… {len(lines) - kept} more lines"] if kept < len(lines) else [])])


def _rows(text: str, columns: int) -> int:
    """Rows of the terminal that a text takes, with long lines wrapped."""
    from rich.cells import cell_len

    return sum(max(1, math.ceil(cell_len(line) / columns)) for line in text.split("\n"))
