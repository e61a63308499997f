"""Logs that no program prints: nothing is raised, nothing hangs, and no figure that cannot be is taken."""

import math
import random
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_gpt.reader.lines.fields import figure
from hpc_gpt.reader.lines.growing_parts import MOST_GIB
from hpc_gpt.reader.lines.matches import all_patterns
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.read_log import LogRead, read_log
from hpc_gpt.reader.lines.step_rows import MOST_STEP
from tests import marked
from tests.reader.lines.comparable import comparable
from tests.reader.lines.test_blocks import SPECIMENS
from tests.reader.reading import read_log_plainly, specimen_of

ABSURD = (
    "9" * 400, "1" * 20, "1e999", "-1e999", "1e-999", "1e308", "-1", "0", "-0.0", "00", "nan", "inf", "-inf", "1_0",
    "0x10", "1.2.3", "1e", "١٢٣", "²", "9,9,9", "99999999999999999999:99:99", "", "K", "%",
)  # fmt: skip
NESTED = ("'", '"', "{", "}", "[", "]", "(", ")", "\\", "{'a': {'", '\\"', "]]]", "'''", "<script>", "\x1b[", "\x1b]0;")
MANY = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(path: Path, data: bytes) -> LogRead:
    """Read it both ways: the same from both, and no figure that cannot be."""
    path.write_bytes(data)
    found, plain = read_log(path), read_log_plainly(path)
    assert (found.lines, found.left_out, found.refused) == (plain.lines, plain.left_out, plain.refused)
    assert [comparable(part) for part in found.parts] == [comparable(part) for part in plain.parts]
    for part in found.parts:
        check_part(part)
    return found


def check_part(part: Part) -> None:
    """No figure that cannot be."""
    for steps in part.steps.values():
        for name, column in steps.columns.items():
            assert not np.isinf(column).any(), name
        known = steps["step"][~np.isnan(steps["step"])]
        assert ((known >= 0) & (known <= MOST_STEP)).all()
        assert not (steps["step_s"] <= 0).any()
        assert not (steps["tokens_per_s"] < 0).any()
    for facts in part.facts.values():
        for fact in facts:
            assert not isinstance(fact.value, float) or math.isfinite(fact.value)
    for memory in part.memory.values():
        for gib in (memory.allocated_gib, memory.reserved_gib):
            assert gib is None or 0 <= gib <= MOST_GIB
    for _, loss, _ in part.evals:
        assert not math.isinf(loss)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "run.out"


@st.composite
def hurt_lines(draw: st.DrawFn) -> bytes:
    """A line that a program prints, and what happened to it."""
    line = draw(st.sampled_from(SPECIMENS))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(line)))
        match draw(st.integers(0, 4)):
            case 0:
                line = line[:place]
            case 1:
                line = line[:place] + draw(st.sampled_from(NESTED)) * draw(st.integers(1, 40)) + line[place:]
            case 2:
                numbers = list(re.finditer(r"[-+]?\d[\d.,]*(?:[eE][-+]?\d+)?", line))
                if numbers:
                    number = draw(st.sampled_from(numbers))
                    line = line[: number.start()] + draw(st.sampled_from(ABSURD)) + line[number.end() :]
            case 3:
                line = line[:place] + draw(st.text(max_size=20)) + line[place:]
            case _:
                line = line[:place] + line[draw(st.integers(place, len(line))) :]
    return line.encode("utf-8", "surrogatepass") + draw(
        st.sampled_from((b"\n", b"\r", b"\r\n", b"\0\n", b"\xff\n", b""))
    )


@MANY
@given(st.binary(max_size=5000))
@example(b"\x1f\x8b")
@example(b"\x28\xb5\x2f\xfd")
@example(b"\xff\xfe")
@example(b"\xff\xfe\n")
@example(b"\0")
def test_random_bytes(log: Path, data: bytes) -> None:
    check(log, data)


@MANY
@given(st.lists(st.one_of(hurt_lines(), st.binary(max_size=30)), max_size=30))
def test_hurt_lines(log: Path, lines: list[bytes]) -> None:
    check(log, b"a log\n" * 20 + b"".join(lines))


NUMBER = re.compile(r"\d[\d.,]*(?:[eE][-+]?\d+)?")


@pytest.mark.parametrize("absurd", ABSURD)
def test_all_numbers_of_every_line_absurd(log: Path, absurd: str) -> None:
    check(log, "\n".join(NUMBER.sub(lambda _: absurd, line) for line in SPECIMENS).encode())


TURNS = range(len(ABSURD))


@pytest.mark.parametrize("turn", marked(TURNS, TURNS[4:]))
def test_every_number_of_every_line_absurd(log: Path, turn: int) -> None:
    """One number of a line at a time: in all turns with every absurd one, in each with the next."""
    numbers = [(line, number) for line in SPECIMENS for number in NUMBER.finditer(line)]
    # 7 and the count of absurd ones have no factor in common.
    lines = [
        line[: number.start()] + ABSURD[(place + 7 * turn) % len(ABSURD)] + line[number.end() :]
        for place, (line, number) in enumerate(numbers)
    ]
    check(log, "\n".join(lines).encode())


@pytest.mark.parametrize("text", ["1e999", "-1e999", "9" * 400, "1" * 65, "1e400K"])
def test_no_figure_is_infinite_but_one_that_says_so(text: str) -> None:
    assert figure(text) is None
    assert figure("inf") == math.inf


def test_more_than_is_held_is_counted(log: Path) -> None:
    data = b"".join(b"Traceback (most recent call last):\nRuntimeError: %d\n" % number for number in range(3000))
    (part,) = check(log, data).parts
    assert len(part.failures) == 1000
    assert part.left_out["failures beyond the limit"] >= 2000


@pytest.mark.long
def test_no_pattern_takes_long_over_a_long_line() -> None:
    """Each pattern over its own words, cut and drawn out to a line of 30,000 characters: a pattern whose work grows
    with the square of the line takes minutes of CPU; all together take 10 s."""
    searching = (
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))\n"
        "from tests.reader.lines.test_fuzz import long_lines\n"
        "from hpc_gpt.reader.lines.matches import find\n"
        "for line in long_lines():\n    find(line)\n"
    )
    subprocess.run([sys.executable, "-c", searching], check=True, cwd=Path(__file__).parents[3])


def long_lines() -> list[str]:
    """Lines of 30,000 characters, a few for each pattern."""
    dice = random.Random(0)
    fills = (" ", "a", "1", ".", " 1", "a ", "1,", "[", "(", '"', "| a: 1 ", "=1 ", "\t", "/", ":", "_")
    found = []
    for each in all_patterns():
        lines = [line for line in specimen_of(each.dialect.name).splitlines() if each.regex.search(line)] or [
            each.pattern.literal
        ]
        line = lines[0]
        cut = line[: dice.randrange(len(line) + 1)]
        fill = dice.choice(fills)
        drawn = cut + fill * (30_000 // len(fill))
        found.append(drawn if each.pattern.literal in drawn else drawn + each.pattern.literal)
    return found
