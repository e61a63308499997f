"""The names and figures of a line, in any order, and what a program's names mean.

`loss: 4.66`, `| lm loss: 4.6E+00 |`, `time 561.94ms`, `"lr": 1e-4` and `actor/lr:np.float64(0.1)` are a name and a
figure; `| 70.68 ms |` is a figure without a name, which its unit shows.
"""

import re
from bisect import bisect_left
from functools import lru_cache

from hpc_gpt.reader.lines.fields import MARKS
from hpc_gpt.reader.lines.pattern import INT, NUMBER, FigureNames, NamedFigure, plain_name

_IN_BRACKETS = r"\([^\s:=|,;'\"{}()\[\]]{1,40}\)"
_LETTERS = rf"(?:[^\s:=|,;'\"{{}}()\[\]]|{_IN_BRACKETS}){{0,80}}+"
# The words of a name are one blank apart. A word that begins with a digit or a sign is a figure, or belongs to one, and
# so does `nan`, but in `number of nan iterations`. It starts with a character class, because re searches for that fast.
_FIRST = rf"[A-Za-z_](?<![\w./].){_LETTERS}"
_WORD = rf"(?![nNiI](?i:an|nf)(?:m?s|[KMGBT])?\b(?! iterations))[A-Za-z_]{_LETTERS}|{_IN_BRACKETS}"
_IS = r"(?:['\"]? ?[:=] {0,20}(?:['\"]|np\.\w{1,12}\()?| {1,20})"
_FIGURE = rf"({NUMBER}(?:(?<=[nN])\.0|[KMGBT](?![A-Za-z]))?)"
_UNIT = r"(?: (?:[KMGT]i?B|ms|s)\b)?"  # no word of the next name
_NAMED = re.compile(rf"({_FIRST}(?: (?:{_WORD})){{0,8}}+){_IS}{_FIGURE}{_UNIT}")
_UNNAMED = re.compile(rf"(?<=[ (|])(){_FIGURE}")
_ENDS = frozenset(";|)]}%'\"")
_LONGEST = 20_000  # characters after a match in which its figures are looked for
_COUNTS = {"step", "epoch_steps", *MARKS}  # a rounded one, as in 1.02K, is not one
_WHOLE = re.compile(rf"{INT}|[-+]?(?i:nan|inf(?:inity)?)")


def _fits(figure: NamedFigure, line: str, start: int, end: int) -> bool:
    """Whether a figure of a line, from `start` to `end`, is one of this kind, and was not cut."""
    text = line[start:end]
    if figure.is_positive and text[0] == "-":
        return False
    if figure.field in _COUNTS and not _WHOLE.fullmatch(text):
        return False
    if figure.unit:
        return line.startswith((figure.unit, f" {figure.unit}"), end)
    if end == len(line):
        return figure.ends_line and _is_whole(text, figure.decimals)
    if line[end] == ",":  # not within 2,513,278
        return not line[end + 1 : end + 2].isdigit() and not (end + 1 == len(line) and "," in text)
    return line[end] in _ENDS or line[end].isspace()


def _is_whole(text: str, decimals: int | None) -> bool:
    return decimals in (None, len(text.partition(".")[2])) or not text[-1].isdigit()


@lru_cache(maxsize=4)  # a line may have very many matches
def _figures_in(line: str, tokens: re.Pattern[str]) -> tuple[list[int], list[tuple[str, int, int]]]:
    """(the places of the figures of a line, and for each its name, start and end)"""
    figures = [(plain_name(match[1]), *match.span(2)) for match in tokens.finditer(line)]
    return [start for _, start, _ in figures], figures


def figure_spans(line: str, place: int, end: int, names: FigureNames) -> dict[str, tuple[int, int]]:
    """Returns (start, end) of the first figure of each field between two places of a line."""
    spans: dict[str, tuple[int, int]] = {}
    for tokens in (_NAMED, _UNNAMED) if "" in names else (_NAMED,):
        starts, figures = _figures_in(line, tokens)
        for name, start, stop in figures[bisect_left(starts, place) : bisect_left(starts, min(end, place + _LONGEST))]:
            for figure in names.get(name, ()):
                if _fits(figure, line, start, stop):
                    spans.setdefault(figure.field, (start, stop))
                    break
    return spans
