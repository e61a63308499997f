"""Logs read line by line: slow, and what tests hold the package's reader to."""

from collections.abc import Iterable
from pathlib import Path

from hpc_gpt.reader.lines.line_reader import LineReader
from hpc_gpt.reader.lines.matches import without_colours
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.read_log import LogRead, first_clock
from hpc_gpt.reader.lines.source import Source

SPECIMENS = Path(__file__).with_name("specimens")


def specimen_of(dialect: str) -> str:
    """Whole lines in the form of a dialect's program, with values of our own."""
    return (SPECIMENS / f"{dialect}.txt").read_text(encoding="utf-8").split("\n", 1)[1]


def take(reader: LineReader, number: int, line: str) -> None:
    """One line, without its end. A carriage return in it separates two states of a progress bar."""
    for piece in without_colours(line).split("\r"):
        reader.apply(number, *reader.look(piece))


def read_lines(file: str, lines: Iterable[str]) -> list[Part]:
    """The parts of a log, given its lines without their ends."""
    reader = LineReader(file)
    number = 0
    for number, line in enumerate(lines, 1):
        take(reader, number, line)
    return reader.finish(number)


def read_log_plainly(path: Path) -> LogRead:
    """What `read_log` gives, every line looked at by itself."""
    with Source(path) as source:
        if source.refused is not None:
            return LogRead(refused=source.refused)
        reader = LineReader(source.file)
        number, begun, head = 1, False, b""
        for chunk in source.chunks():
            head = head or chunk
            for index, line in enumerate(chunk.split(b"\n")):
                number += 1 if index else 0
                if line:
                    take(reader, number, line.decode("utf-8", "replace"))
            begun = not chunk.endswith(b"\n")
        number -= 0 if begun else 1
        parts = reader.finish(number)
        parts[0].first_at = first_clock(head, parts[0].first_at)
        return LogRead(parts, number, source.left_out)
