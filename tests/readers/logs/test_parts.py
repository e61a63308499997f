"""Which part of a log its lines go into, and what a part says of them: parts.txt, in the form of printed/*.txt."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from hpc_gpt.reader.readers.logs import Part
from tests.readers.logs.test_blocks import assert_same
from tests.readers.reading import read_lines
from tests.readers.test_printed import logs_of, read_anew, said_part

FILE = Path(__file__).with_name("parts.txt")


def parts(given: list[str]) -> list[str]:
    """Of each part its lines, its first time of day, its starts and the other ranks, then all that it says."""
    (lines,) = logs_of(given).values()
    for size in (1, 1_000_000):
        assert_same("\n".join(lines) + "\n", size)
    return [line for part in read_lines("a.out", lines) for line in (said_head(part), *said_part(part))]


def said_head(part: Part) -> str:
    def head() -> Iterator[str]:
        yield f"lines {part.first_line}..{part.last_line}"
        if part.first_at is not None:
            yield f"from {datetime.fromtimestamp(part.first_at, UTC):%H:%M:%S}"
        yield from (f"{count} starts of {name}" for name, count in part.starts.items())
        if part.tasks:
            yield "labels of tasks"
        yield from (f"rank {rank}, of the {'job' if job else 'node'}" for rank, job in part.other_ranks.items())

    return ", ".join(head())


def test_what_goes_into_which_part() -> None:
    """Changed by hand; the reader of blocks says the same."""
    assert read_anew(FILE, parts).split("\n\n") == FILE.read_text(encoding="utf-8").split("\n\n")
