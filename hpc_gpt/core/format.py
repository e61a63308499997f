"""Figures and lines as text: how numbers are formatted and lines are wrapped.

A figure that was not measured is printed as `-`.
"""

import json
import math
import re
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

NOTHING = "-"
# How a terminal shows a text: the name of a colour, or a colour per character; and the function that applies it.
Style = str | Mapping[str, str]
Paint = Callable[[str, Style], str]
# More notes than FEW_ALIKE that differ only in their figures are joined, with the text ALIKE.
ALIKE, FEW_ALIKE = "the others are alike, with other figures", 3
_FIGURES = re.compile(r"\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
_ONE_THING = re.compile(r"\b1 (step|rank|run|row|attempt)\b")
_FIRST_PLURAL = re.compile(r"(?<=[a-zE])s(?= |$)")


class Line(NamedTuple):
    """A line for the user: its subject, and the text about it.

    >>> str(Line("data", "8,192 tokens")), Line("data", "x").under("data"), Line("note", "x").under("data")
    ('data: 8,192 tokens', ('data', 'x'), ('data', 'note: x'))
    """

    label: str
    text: str

    def __str__(self) -> str:
        return f"{self.label}: {self.text}"

    def under(self, label: str) -> tuple[str, str]:
        """This line as a row (label, text) of a table; if its label is another, the text begins with that."""
        return label, self.text if label == self.label else str(self)


def show_digits(figure: float | None, digits: int = 3) -> str:
    """A figure with at least `digits` significant digits, all digits of a large number, and never an exponent.

    >>> show_digits(146.2), show_digits(2.744), show_digits(0.04131), show_digits(None)
    ('146', '2.74', '0.0413', '-')
    """
    if figure is None:
        return NOTHING
    if figure == 0 or not math.isfinite(figure):
        return f"{abs(figure):.0f}" if figure == 0 else str(figure)
    before = len(str(int(abs(figure)))) if abs(figure) >= 1 else 0
    if before:
        return f"{figure:.{max(0, digits - before)}f}"
    after, small = digits, abs(figure)
    while small < 0.1 and after < 12:
        small *= 10
        after += 1
    return f"{figure:.{after}f}"


def show_params(params: float | None) -> str:
    """A number of parameters as published tables print it: 52.0B, 124M, 845K."""
    if params is None:
        return NOTHING
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if params >= size:
            figure = params / size
            return f"{figure:.1f}{letter}" if figure < 100 else f"{figure:.0f}{letter}"
    return f"{params:.0f}"


def show_short(figure: float) -> str:
    """Three digits without trailing zeros, or all digits of a larger number, with commas between thousands.

    >>> show_short(1234.5), show_short(12.0), show_short(0.012345)
    ('1,234', '12', '0.0123')
    """
    return f"{figure:,.0f}" if figure >= 100 else f"{figure:.3g}"


def show_rate(figure: float) -> str:
    """At least three digits, with commas between thousands.

    >>> show_rate(0.12345), show_rate(88.0), show_rate(1512.3)
    ('0.123', '88.0', '1,512')
    """
    return f"{figure:,.0f}" if abs(figure) >= 1000 else show_digits(figure)


def show_whole(figure: float | None) -> str:
    """A whole number with a comma between thousands."""
    return NOTHING if figure is None else f"{figure:,.0f}"


def show_count(count: float) -> str:
    """A count in full, also if it is stored as a float."""
    return f"{count:.0f}" if isinstance(count, float) and count.is_integer() else show_value(count)


def show_bytes(size_bytes: float) -> str:
    """A size in the largest unit that gives at least 0.1.

    >>> show_bytes(3 * 2**30), show_bytes(2**20), show_bytes(300), show_bytes(0)
    ('3.00 GiB', '1.00 MiB', '0.29 KiB', '0 bytes')
    """
    if size_bytes == 0:
        return "0 bytes"
    power, unit = next(((n, u) for n, u in ((30, "GiB"), (20, "MiB")) if size_bytes >= 2**n / 10), (10, "KiB"))
    return f"{size_bytes / 2**power:,.2f} {unit}"


def show_duration(seconds: float) -> str:
    """Seconds as text.

    >>> show_duration(0.9123), show_duration(95), show_duration(12_000), show_duration(968_400)
    ('0.912 s', '95 s', '3 h 20 min', '11 d 5 h')
    """
    if seconds < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 180:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 72:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def show_share(share: float | None, sign: str = "") -> str:
    """A share in percent; `sign` "+" prints a plus sign, too."""
    return NOTHING if share is None else f"{share:{sign}.1%}"


def show_value(value: Any) -> str:
    """Any value of a record: a figure with at least three digits, a list with commas, `-` for None."""
    if value is None or value == [] or value == {}:
        return NOTHING
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return show_digits(value)
    if isinstance(value, list) and all(isinstance(item, int | float | str) for item in value):
        return ", ".join(show_value(item) for item in value)
    if isinstance(value, dict | list):
        return json.dumps(value, sort_keys=True)
    return str(value)


def counted(number: int, noun: str) -> str:
    """A number of things.

    >>> counted(1, "table"), counted(1200, "step")
    ('1 table', '1,200 steps')
    """
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def counted_words(number: int, phrase: str) -> str:
    """A number before a noun phrase in the plural; a phrase with "the" names one thing and gets no number.

    >>> counted_words(1, "lines of a step"), counted_words(1200, "impossible figures of loss")
    ('1 line of a step', '1,200 impossible figures of loss')
    >>> counted_words(1, "the rest of the file"), counted_words(3, "the rest of the file")
    ('the rest of the file', 'the rest of the file, 3 times')
    """
    if phrase.startswith("the "):
        return phrase if number == 1 else f"{phrase}, {number:,} times"
    return f"{number:,} {_FIRST_PLURAL.sub('', phrase, count=1) if number == 1 else phrase}"


def some(texts: Sequence[str], most: int, between: str = ", ") -> str:
    """The first of the texts, with an ellipsis if there are more.

    >>> some(["a", "b", "c"], 2), some(["a"], 2)
    ('a, b, …', 'a')
    """
    return between.join([*texts[:most], *(["…"] if len(texts) > most else [])])


def and_more(number: int, shown: int, before: str = " and ", what: str = "") -> str:
    """The number of things beyond the first `shown`, as text; empty if there are none.

    >>> and_more(1200, 3), and_more(3, 3), and_more(4, 3, ", and ", "other key"), and_more(5, 3, ", and ", "other")
    (' and 1,197 more', '', ', and 1 other key', ', and 2 others')
    """
    if number <= shown:
        return ""
    return before + (counted(number - shown, what) if what else f"{number - shown:,} more")


def some_names(names: Sequence[str]) -> str:
    """A list of names: all of up to four, else the first three and the number of others.

    >>> some_names("abcd"), some_names("abcde")
    ('a, b, c, d', 'a, b, c and 2 more')
    """
    others = and_more(len(names), 3) if len(names) > 4 else ""
    return f"{', '.join(names[:3] if others else names)}{others}"


def class_and_cause(ended: str, cause: str | None) -> str:
    """A class or state of a run with its cause, if that says more than its name.

    >>> class_and_cause("nan", "the loss is NaN"), class_and_cause("done", "done"), class_and_cause("error", None)
    ('nan: the loss is NaN', 'done', 'error')
    """
    return ended if cause in (None, "", ended) else f"{ended}: {cause}"


def without_figures(text: str) -> str:
    """The text with `#` for each figure, and its nouns in the plural, so that texts alike become equal.

    >>> without_figures("10th percentile 0.0301 s, 90th 12 s, 1,024 of 3e-05")
    '#th percentile # s, #th # s, # of #'
    >>> without_figures("1 step skipped"), without_figures("10 steps skipped")
    ('# steps skipped', '# steps skipped')
    """
    return _FIGURES.sub("#", _ONE_THING.sub(r"1 \1s", text))


def plain(text: str, instead: str = "?") -> str:
    """The text on one line, with `instead` for each control character.

    >>> plain("\\x1b[2Jloss\\n3"), plain("two\\nlines", " ")
    ('?[2Jloss?3', 'two lines')
    """
    return text if text.isprintable() else "".join(letter if letter.isprintable() else instead for letter in text)


def cut(text: str, most: int) -> str:
    """The text, or its first characters and an ellipsis if it has more than `most`."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def wrapped(text: str, width: int | None, hang: int | None = None) -> list[str]:
    """The text in lines of `width` columns, broken between words; on one line if `width` is None. The lines after the
    first begin with `hang` blanks, two more than the first unless given. A longer word stays whole.

    >>> wrapped("data  two words", 10, 6), wrapped("data  two words", None), wrapped(" a tall oak", 8)
    (['data  two', '     words'], ['data  two words'], [' a tall', '   oak'])
    """
    if width is None or len(text) <= width:
        return [text]
    indent = len(text) - len(text.lstrip()) + 2 if hang is None else hang
    rules = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False)
    rules.subsequent_indent = " " * min(indent, width // 2)
    return rules.wrap(text) or [text]


def clock(moment: float, now: float) -> str:
    """A local time: `12:03`, with the date if that is not today."""
    then, today = time.localtime(moment), time.localtime(now)
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)
