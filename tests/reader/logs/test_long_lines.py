"""A log of any form takes at most a second of CPU a megabyte, also where each line is drawn out to 16 kB.

Each line of these logs has a form of its own and begins another run, as its step does not rise: 0.3 ms more.
"""

import random
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.reader.dialects import dialects
from hpc_gpt.reader.logs.matches import all_patterns
from hpc_gpt.reader.records.discovery import DiscoveredFiles
from hpc_gpt.reader.records.foreign_run import read_foreign_runs
from tests.reader.reading import specimen_of

MOST_S_A_MB, MOST_S_A_LINE = 1.0, 0.0003
MOST_S_A_RUN = 0.0015  # a step that goes back begins a run, with a record of its own; beside the first
REFERENCE_S = 0.072  # CPU seconds of what `slowness` does, there
LENGTHS = (1_000, 4_000, 16_000)
SMALL, LARGE = 40_000, 300_000  # bytes of a log that is tried, and of one that took too long
FILLS = (
    *(" ", "a", "1", ".", " 1", "a ", "1,", "\t", "/", ":", "_", "- ", "=", "# ", "é"),
    *("[", "(", "{", '"', "'", "[]", "{}", "()", "'a': 1, ", '"a": 1, ', "a=1 ", "=1 ", "| a: 1 ", "a: 1 - ", "\r"),
)
PIECE = re.compile(r"\s*(?:\w+|[^\w\s]+)")


def specimens() -> Iterator[tuple[str, list[str]]]:
    """(dialect, its lines): those that its program prints, and the text that each of its patterns needs."""
    for dialect in dialects():
        literals = {each.pattern.literal for each in all_patterns() if each.dialect is dialect} - {"\t"}
        yield dialect.name, [*filter(None, specimen_of(dialect.name).splitlines()), *sorted(literals)]


def drawn_out(line: str, lines: list[str], length: int, dice: random.Random) -> str:
    """The line drawn out to a length, in one of the ways that a program or a chance may: repeated whole, by its opening
    words, by a piece of it or by a fill at any place, and by words of its dialect's lines in any order."""
    pieces = PIECE.findall(line)
    cut = len("".join(pieces[: dice.randrange(len(pieces) + 1)]))
    match dice.randrange(6):
        case 0:
            # Shorter pieces between carriage returns are short lines.
            made = (line + dice.choice(("", " ", "\r" if len(line) >= 60 else " ", ", "))) * (length // len(line) + 1)
        case 1:
            opening = line[: cut or None]
            made = opening * max(1, (length - len(line)) // len(opening)) + line
        case 2:
            piece = "".join(pieces[(at := dice.randrange(len(pieces))) : at + dice.randint(1, 4)])
            made = line[:cut] + piece * max(1, (length - len(line)) // len(piece)) + line[cut:]
        case 3:
            words = [word for other in [line, *dice.sample(lines, min(4, len(lines)))] for word in PIECE.findall(other)]
            made = line[:cut] + "".join(dice.choices(words, k=length // 3))[: max(0, length - len(line))] + line[cut:]
        case 4:
            other = dice.choice(lines)
            made = (line + " " + other + " ") * (length // (len(line) + len(other) + 2) + 1)
        case _:
            fill = dice.choice(FILLS)
            made = line[:cut] + fill * (max(0, length - len(line)) // len(fill)) + line[cut:]
    return made[:length]


def log_of(form: str, size: int) -> bytes:
    """A log with lines of one form, of so many bytes."""
    dice = random.Random(form)
    # A first word that differs, as a line that is printed again is not read again.
    lines = (f"{''.join(dice.choices('bcdf', k=8))} " if number else "" for number in range(size // len(form) + 1))
    return "\n".join(begin + form for begin in lines).encode("utf-8", "replace")


def seconds_a_mb(log: Path, data: bytes) -> float:
    """The CPU seconds that a report takes for a megabyte of such a log, without those of further runs in it."""
    log.write_bytes(data)
    began = time.process_time()
    runs = read_foreign_runs(DiscoveredFiles(logs=[log]))
    took = time.process_time() - began
    return (took - MOST_S_A_RUN * max(0, len(runs) - 1)) * 1e6 / len(data)


def slowness() -> float:
    """How many times longer regexes take here and now than on the idle machine of the bound; at least 1."""
    began = time.process_time()
    for number in range(20):
        re.findall(r"(?<!\S)\w{1,12}(?=: \d{1,12}\b)|\d+\.\d*", f"step {number} loss: 12 time: 3.25 s " * 2_000)
    return max(1.0, (time.process_time() - began) / REFERENCE_S)


def slow_forms(log: Path, forms: Iterator[tuple[str, str]]) -> Iterator[tuple[float, str, str]]:
    """(seconds a megabyte, dialect, form) of the forms that take too long in a small log, and always in a large one:
    beside other work CPU seconds, too, are some tenths more now and then."""
    for dialect, form in forms:
        data, most = log_of(form, SMALL), MOST_S_A_MB + MOST_S_A_LINE * 1e6 / len(form)
        # A second time because regexes are compiled at the first.
        if seconds_a_mb(log, data) > most and seconds_a_mb(log, data) > most:
            took = min(seconds_a_mb(log, log_of(form, LARGE)) / slowness() for _ in range(9))
            if took > most:
                yield took, dialect, form


def forms(draws: int, seed: int, of_each: int = 1_000) -> Iterator[tuple[str, str]]:
    """(dialect, form): so many draws of each line of each dialect, or of some of its lines."""
    dice = random.Random(seed)
    for dialect, lines in specimens():
        for line in dice.sample(lines, min(of_each, len(lines))):
            for _ in range(draws):
                yield dialect, drawn_out(line, lines, dice.choice(LENGTHS), dice)


@pytest.mark.parametrize(
    ("count", "of_each"),
    [(12, 1), pytest.param(100_000, 1_000, marks=pytest.mark.long, id="every line of every dialect")],
)
def test_a_log_of_any_form_takes_a_second_a_megabyte_at_most(count: int, of_each: int, tmp_path: Path) -> None:
    chosen = list(forms(1, 92, of_each))
    random.Random(92).shuffle(chosen)
    slow = sorted(slow_forms(tmp_path / "run.out", iter(chosen[:count])), reverse=True)
    assert not [f"{took:.2f} s a MB: {dialect}: {form[:100]} … {form[-40:]}" for took, dialect, form in slow]
