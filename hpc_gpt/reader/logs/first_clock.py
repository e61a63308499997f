"""The first time of day in a log: lines before those that a reader knows say when the run began."""

import contextlib
import re
from datetime import UTC, datetime

from hpc_gpt.reader.logs import Part
from hpc_gpt.reader.logs.matches import time_of, without_colours

_HEAD = 1 << 16  # bytes
_BEGIN = 60  # characters before a line's time: labels and the name of a logger
# As `date` and nvidia-smi print it: `Tue Mar  5 10:03:33 CET 2024`.
_OF_DATE = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d) (?:[A-Z]{3,5} )?(\d{4})\b"
)
_LONGEST_START = 86_400.0  # seconds to the first known line: an earlier time is of something else, such as a build


def first_clock(data: bytes) -> float | None:
    """Epoch seconds of the first line in the head of a log that begins with a time of day; None without one."""
    for line in re.split(r"[\r\n]", without_colours(data[:_HEAD].decode("utf-8", "replace"))):
        if (at := time_of(line[:_BEGIN])) is not None:
            return at
        if date := _OF_DATE.search(line[: 2 * _BEGIN]):
            with contextlib.suppress(ValueError):
                return datetime.strptime(" ".join(date.groups()), "%b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp()
    return None


def set_first(part: Part, clock: float | None) -> None:
    """Sets the first time of the first part of a log to the log's first time, unless that is of something else."""
    if clock is not None and (part.first_at is None or 0 < part.first_at - clock < _LONGEST_START):
        part.first_at = clock
