"""The terminal: width, colours, progress, and questions."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import re
import select
import shutil
import sys
import termios
import threading
import time
import tty
import unicodedata
from collections.abc import Callable, Iterator

from hpc_gpt.core import output
from hpc_gpt.core.format import Style, plain, show_duration, wrapped

# A colour is never the only sign: the text has the same meaning.
_CODES = {"bold": 1, "red": 31, "green": 32, "yellow": 33, "blue": 34, "magenta": 35, "cyan": 36,
          "light red": 91, "light yellow": 93, "light blue": 94, "light magenta": 95}  # fmt: skip
_CODE = re.compile(r"\x1b\[\d*m")
# Seconds of work before the first sign of life, and between two of them.
_LIFE_AFTER_S, _LIFE_EVERY_S = 1.0, 0.25


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
    """Whether colours may be used: not with NO_COLOR (https://no-color.org) or a dumb terminal."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def painted(text: str, style: Style, stderr: bool = False) -> str:
    """The text in a style on a terminal that wants colour, else plain. A mapping has a style for each character."""
    if not style or not text.strip() or width(stderr) is None or not colour_wanted():
        return text
    if isinstance(style, str):
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m"
    alike = itertools.groupby(text, lambda letter: style.get(letter, ""))
    return "".join(painted("".join(letters), colour, stderr) for colour, letters in alike)


def say(text: str, err: bool = False, label: str = "", style: str = "", hang: int | None = None) -> None:
    """Prints lines: unbroken into a pipe; on a terminal wrapped between words, with later rows indented by `hang`
    columns, by default two more than the first. `label` precedes the first line, in a style."""
    out, columns = (sys.stderr if err else sys.stdout), width(err)
    for place, line in enumerate((label + text).split("\n")):
        first, *further = wrapped(line, columns, hang)
        if not place:
            first = painted(label, style, err) + first.removeprefix(label)
        out.write("\n".join([first, *further]) + "\n")
    out.flush()


def write_heading(line: str) -> None:
    """Prints a heading: bold on a terminal, plain elsewhere. Bold is never the only sign."""
    sys.stdout.write("".join(painted(row, "bold") + "\n" for row in wrapped(line, width())))


def confirm(question: str) -> bool:
    """Asks at the terminal and returns whether the answer is yes; the end of input means no. Ctrl-C raises
    KeyboardInterrupt.

    input() forgets a Ctrl-C that comes while it flushes the prompt, as one typed at once at a busy machine does.
    """
    while True:
        sys.stderr.write(f"{question} [y/N]: ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if answer.strip().lower() in ("y", "yes", "n", "no", ""):
            sys.stderr.write("" if answer else "\n")
            return answer.strip().lower() in ("y", "yes")
        sys.stderr.write("Error: invalid input\n")


@contextlib.contextmanager
def shows_life(what: str, work: Callable[[], str] = lambda: output.working_on) -> Iterator[None]:
    """In a block that prints nothing, shows a line on stderr with the work, its duration and its current item, if
    stderr is a terminal and the block lasts longer than a second. The line is rewritten in place and removed at the
    end."""
    over, began, columns = threading.Event(), time.monotonic(), width(stderr=True)

    def draw() -> None:
        pause, drawn = _LIFE_AFTER_S, False
        while not over.wait(pause):
            text = f"{what}, {show_duration(round(time.monotonic() - began))}: {work()}".removesuffix(": ")
            # os.write, not sys.stderr: a child that is forked during the write would inherit its held lock.
            os.write(2, f"\r\x1b[K{plain(text)[: (columns or 80) - 1]}".encode(errors="replace"))
            pause, drawn = _LIFE_EVERY_S, True
        if drawn:
            os.write(2, b"\r\x1b[K")

    thread = threading.Thread(target=draw, name="life", daemon=True)
    if columns is not None and os.environ.get("TERM") != "dumb":
        thread.start()
    try:
        yield
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()


@contextlib.contextmanager
def keys() -> Iterator[Callable[[float], str]]:
    """In the block, gives a function that waits at most so many seconds for a key and returns it, or an empty text."""
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
    """A text that is shown repeatedly: in place on a terminal, cut to its rows; one after another in a file."""

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
    """The first lines of a text that fit into `most` rows, and the number of lines left out: lines that have scrolled
    off the top cannot be rewritten."""
    lines = text.split("\n")
    count = len(lines)
    while count > 1 and _rows("\n".join(lines[:count]), columns) + (count < len(lines)) > most:
        count -= 1
    return "\n".join([*lines[:count], *([f"… {len(lines) - count} more lines"] if count < len(lines) else [])])


def _rows(text: str, columns: int) -> int:
    """Rows of the terminal that a text takes, with long lines wrapped."""
    return sum(max(1, math.ceil(_cells(line) / columns)) for line in _CODE.sub("", text).split("\n"))


def _cells(line: str) -> int:
    r"""Columns of the terminal that a line takes: two per wide character, none for one that joins the character before.

    >>> _cells("loss"), _cells("\u640d\u5931"), _cells("e\u0301")
    (4, 4, 1)
    """
    joining = ("Mn", "Me", "Cf")
    shown = (char for char in line if unicodedata.category(char) not in joining)
    return sum(2 if unicodedata.east_asian_width(char) in "WF" else 1 for char in shown)
