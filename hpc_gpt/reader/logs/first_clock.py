"""The first time of day in a log: lines before those that a reader knows say when the run began."""

import contextlib
import re
from datetime import UTC, datetime

from hpc_gpt.reader.logs.matches import time_of, without_colours

_HEAD = 1 << 16  # bytes
_BEGIN = 60  # characters before a line's time: labels and the name of a logger
# As `date` and nvidia-smi print it: `Tue Mar  5 10:03:33 CET 2024`.
_OF_DATE = re.compile(
    r"\b(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) ([A-Z][a-z]{2}) {1,2}(\d{1,2}) (\d\d:\d\d:\d\d) (?:[A-Z]{3,5} )?(\d{4})\b"
)
_LONGEST_START = 86_400.0  # seconds to the first known line: an earlier time is of something else, such as a build


def first_clock(data: bytes, known: float | None) -> float | None:
    """Epoch seconds of the first line in the head of a log that begins with a time of day. `known`: those of the first
    line that a reader knows, which are returned if there is no such line, or if its time is of something else."""
    for line in re.split(r"[\r\n]", without_colours(data[:_HEAD].decode("utf-8", "replace"))):
        at = time_of(line[:_BEGIN])
        if at is None and (date := _OF_DATE.search(line[: 2 * _BEGIN])):
            with contextlib.suppress(ValueError):
                at = datetime.strptime(" ".join(date.groups()), "%b %d %H:%M:%S %Y").replace(tzinfo=UTC).timestamp()
        if at is not None:
            return at if known is None or 0 < known - at < _LONGEST_START else known
    return known
