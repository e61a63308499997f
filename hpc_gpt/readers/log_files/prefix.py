"""What launchers and loggers put before a program's own words: colours, ranks, times of day."""

from __future__ import annotations

import re
from datetime import UTC, datetime

ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b\r\n]{0,256}(?:\x07|\x1b\\)")
# srun --label, torchrun's and deepspeed's tags, Megatron's "[Rank 51]", nanotron's axes; the number is the rank, of
# the node alone for `[default7]:`.
_RANK = re.compile(
    r"^\s*(?:(\d{1,7}): |\[default(\d{1,4})\]:|\[?[Rr]ank ?[:=]?(\d{1,7})\]?[: ]"
    r"|(?:\S{1,64}: )?\[rank(\d{1,7})\][: ])"
)
_AT = re.compile(
    r"(?P<year>\d{4})[-/](?P<month>\d\d)[-/](?P<day>\d\d)[ T](?P<clock>\d\d:\d\d:\d\d)(?:[.,](?P<part>\d{1,9}))?"
    r"|(?P<us_month>\d\d)/(?P<us_day>\d\d)/(?P<us_year>\d{4}) (?P<us_clock>\d\d:\d\d:\d\d)"
)


def without_colours(text: str) -> str:
    """The text without ANSI escape sequences."""
    return ANSI.sub("", text) if "\x1b" in text else text


def rank_of(line: str) -> int | None:
    """The rank that a line is labelled with, None without a label.

    >>> rank_of("[default7]: iteration"), rank_of("12: loss"), rank_of("[rank0]:[titan] x"), rank_of("loss 3")
    (7, 12, 0, None)
    """
    span = rank_span(line)
    return int(line[slice(*span)]) if span else None


def rank_span(line: str) -> tuple[int, int] | None:
    """Where the rank that a line is labelled with stands."""
    found = _RANK.match(line)
    return next((found.span(index) for index in range(1, 5) if found[index] is not None), None) if found else None


def time_of(line: str) -> float | None:
    """Epoch seconds of the first time of day in a line, taken as UTC; None without one, or one that no clock shows.

    >>> time_of("[2021-05-25 22:29:50,309] [INFO]")
    1621981790.309
    """
    found = _AT.search(line)
    if found is None:
        return None
    us = "" if found["year"] else "us_"
    date = [int(found[f"{us}{name}"]) for name in ("year", "month", "day")]
    clock = [int(each) for each in found[f"{us}clock"].split(":")]
    try:
        moment = datetime(date[0], date[1], date[2], clock[0], clock[1], clock[2], tzinfo=UTC)
    except ValueError:
        return None
    part = found["part"]
    return moment.timestamp() + (float(f"0.{part}") if part else 0.0)


def time_spans(line: str) -> dict[str, tuple[int, int]] | None:
    """Where the numbers of the first time of day stand: year, month, day, hour, minute, second, and part if any."""
    found = _AT.search(line)
    if found is None:
        return None
    us = "" if found["year"] else "us_"
    spans = {name: found.span(f"{us}{name}") for name in ("year", "month", "day")}
    clock = found.start(f"{us}clock")
    spans |= {
        name: (clock + 3 * place, clock + 3 * place + 2) for place, name in enumerate(("hour", "minute", "second"))
    }
    return spans | {"part": found.span("part")} if found["part"] else spans
