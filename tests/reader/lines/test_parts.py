"""Which part of a log its lines go into, and what a part says of them: parts.txt, in the form of printed/*.txt."""

from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from hpc_gpt.reader.lines.part import Part
from tests.reader.lines.test_blocks import EVAL, MEGATRON, TIMERS, assert_same, small_bounds  # noqa: F401
from tests.reader.reading import read_lines
from tests.reader.test_printed import logs_of, read_anew, said_part

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


MANY = [
    *(MEGATRON.format(step=step, ms=2000.5, loss="1.0E-01", skipped=step % 3 == 0, batch=4) for step in range(1, 41)),
    *(MEGATRON.format(step=step, ms=9.5, loss="nan", skipped=0, batch=8) + TIMERS + EVAL for step in range(1, 31)),
    *(f" {step}%|█▎        | {step}/1000 [02:00<13:54, 59.61s/it]" for step in range(1, 21)),
    *(MEGATRON.format(step=1 + step % 2, ms=9.5, loss="2.0E-01", skipped=0, batch=8) for step in range(12)),
]


@pytest.mark.usefixtures("small_bounds")
def test_of_more_than_is_held_the_same_is_kept() -> None:
    """Every second line of the longest parts, the first timers and parts: of each how many is known."""
    for size in (1, 2000, 1_000_000):
        assert_same("\n".join(MANY) + "\n", size)
    parts = read_lines("a.out", "\n".join(MANY).split("\n"))
    steps = [part.steps["megatron"] for part in parts]
    assert [(each.count, each.stride, each["step"].tolist()) for each in steps] == [
        (40, 16, [1, 17, 33, 40]), (30, 8, [1, 9, 17, 25, 30]), (2, 1, [1, 2]), (2, 1, [1, 2]),
    ]  # fmt: skip
    assert [each.totals.get("skipped") for each in steps] == [13, 0, 0, 0]
    assert [each.totals.get("nan_loss") for each in steps] == [None, 30, None, None]
    assert [part.left_out for part in parts] == [{}, {}, {}, {"lines of steps after 2000 restarts": 8}]
    assert (len(parts[1].evals), len(parts[1].progress)) == (30, 20)
    # The first six lines, then every fourth.
    assert parts[1].timers_s == {"forward": (pytest.approx(0.15), 12), "backward-send": (pytest.approx(0.015), 12)}


def test_a_line_that_is_too_long_is_read_in_part() -> None:
    text = "iter 7: loss 3.5000, time 250.00ms" + " x" * 40_000 + " iter 8: loss 2.5000, time 250.00ms"
    assert_same(text + "\n", 1_000_000)
    (part,) = read_lines("a.out", [text])
    assert (part.steps["nanogpt"]["step"].tolist(), part.left_out) == ([7], {"lines over 64,000 characters, cut": 1})
