"""The reader of blocks gives what the reader of lines gives, whatever the log."""

import random
import re

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.reader.lines import growing_parts as parts_module
from hpc_gpt.reader.lines import read_log, step_rows
from hpc_gpt.reader.lines import stretches as stretches_module
from hpc_gpt.reader.lines.dialects import dialects
from hpc_gpt.reader.lines.line_reader import LineReader
from hpc_gpt.reader.lines.matches import find
from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.read_log import BlockReader
from tests import examples
from tests.reader.lines.comparable import comparable
from tests.reader.reading import read_lines, specimen_of

SPECIMENS = [line for dialect in dialects() for line in specimen_of(dialect.name).splitlines() if line.strip()]
MEGATRON = (
    " iteration {step:8d}/    1000 | consumed samples: {step:12d} | elapsed time per iteration (ms): {ms:.1f} |"
    " learning rate: 1.500E-04 | global batch size: {batch:5d} | lm loss: {loss} | loss scale: 16384.0 |"
    " grad norm: 9.804 | number of skipped iterations: {skipped:3d} | number of nan iterations:   0 |"
)
TIMERS = "\ntime (ms) | forward: 12.5 | backward-send: 1.25"
EVAL = "\n[2024-04-06 03:02:14] validation loss at iteration 10 | lm loss value: 9.5E+00 | lm loss PPL: 1.3E+04 | "
PREFIXES = ("", "12: ", "[default7]: ", "[default3]: ", "[rank0]:", "[2024-04-06 03:02:12] ", "\x1b[32m", "é ")
NOISE = ("", "0: loading", "> building indices ...", "WARNING: 12 of 64", "\0\0", "\x1b[0m", "x" * 300, "99%", "é|ü: 3")
TRACEBACK = (
    *("Traceback (most recent call last):", '  File "x.py", line 3, in f', "    raise Empty", "", "queue.Empty"),
    *("RuntimeError:", "  CUDA error: uncorrectable ECC error encountered"),
    "During handling of the above exception, another exception occurred:",
)
ENDS = ("\n", "\n", "\n", "\r\n", "\r")


def other_digits(line: str, seed: int) -> str:
    """The line with other digits, each for each."""
    dice = random.Random(seed)
    return re.sub("[0-9]", lambda _: str(dice.randrange(10)), line)


def other_step(line: str, step: int) -> str:
    """The line with another step where it names one."""
    for match, _ in find(line):
        if match.groupdict().get("step"):
            return line[: match.start("step")] + str(step).rjust(len(match["step"])) + line[match.end("step") :]
    return line


@st.composite
def stretches(draw: st.DrawFn) -> str:
    """Lines of one sort."""
    end = draw(st.sampled_from(ENDS))
    prefix = draw(st.sampled_from(PREFIXES))
    count = draw(st.integers(1, 30))
    first = draw(st.integers(0, 200))
    match draw(st.integers(0, 5)):
        case 5:
            texts = draw(st.lists(st.sampled_from(TRACEBACK), min_size=1, max_size=12))
            return "".join(f"{prefix}{line}{end}" for line in (TRACEBACK[0], *texts))
        case 0:
            text = draw(st.sampled_from(NOISE))
            return f"{prefix}{text}{end}" * count
        case 1:
            skipped = draw(st.integers(0, 1))
            loss = draw(st.sampled_from(("3.28E+01", "nan", "1.0E-01", "inf")))
            batch = draw(st.sampled_from((4, 8, 4000)))
            found = [
                MEGATRON.format(step=step, ms=2000 + step * 0.7, loss=loss, skipped=skipped, batch=batch)
                for step in range(first, first + count)
            ]
            behind = draw(st.sampled_from(("", TIMERS, EVAL, TIMERS + EVAL)))
            every = draw(st.integers(1, 4))
            texts = [line + (behind if not index % every else "") for index, line in enumerate(found)]
            return "".join(f"{prefix}{line}{end}" for line in texts)
        case 2:
            line = draw(st.sampled_from(SPECIMENS))
            return "".join(f"{prefix}{other_step(line, step)}{end}" for step in range(first, first + count))
        case 3:
            line = draw(st.sampled_from(SPECIMENS))
            seed = draw(st.integers(0, 100))
            return "".join(f"{prefix}{other_digits(line, seed + each)}{end}" for each in range(count))
        case _:
            line = draw(st.sampled_from(SPECIMENS))
            return line[: draw(st.integers(0, len(line)))] + draw(st.sampled_from(("", end)))


def blocks(text: str, size: int) -> list[bytes]:
    """Return the log in pieces that end after a newline or a carriage return."""
    found, held = [], b""
    for piece in re.split(rb"(?<=[\r\n])", text.encode()):
        held += piece
        if len(held) >= size:
            found.append(held)
            held = b""
    return [*found, held]


def in_blocks(text: str, size: int) -> list[Part]:
    """What the reader of blocks gives."""
    reader = BlockReader(LineReader("log"))
    for block in blocks(text, size):
        reader.take(block)
    return reader.finish()


def in_lines(text: str) -> list[Part]:
    """What the reader of lines gives."""
    return read_lines("log", text.removesuffix("\n").split("\n") if text else [])


def assert_same(text: str, size: int) -> None:
    """Both readers say the same of a log."""
    mine, plain = in_blocks(text, size), in_lines(text)
    assert [comparable(part) for part in mine] == [comparable(part) for part in plain]


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a short log reaches."""
    monkeypatch.setattr(parts_module, "MAX_ROWS", 16)
    monkeypatch.setattr(step_rows, "PENDING", 4)
    monkeypatch.setattr(parts_module, "MOST_PARTS", 4)
    monkeypatch.setattr(read_log, "_MOST_LINES", 3)
    for module in (parts_module, stretches_module):
        monkeypatch.setattr(module, "ALL_TIMERS", 6)
        monkeypatch.setattr(module, "SOME_TIMERS", 4)


LOGS = st.lists(stretches(), max_size=12).map("".join)


def megatron(step: int, loss: str = "1.0E-01", prefix: str = "12: ") -> str:
    return prefix + MEGATRON.format(step=step, ms=2000.0, batch=4, skipped=0, loss=loss) + "\n"


def of_two_programs(step: int) -> str:
    """A line of each program; from step 21 on the first one's line is there twice, which a task's label explains."""
    line = f"12: [2021-05-27 04:02:02,142] steps: {step} loss: 12.8004 iter time (s): 145.206 samples/sec: 7.052\n"
    return megatron(step) + line + megatron(step) * (step > 20)


STEPS = range(1, 31)
SEVERAL_RANKS = {
    "nan of two ranks": "".join(megatron(step, "nan", prefix) for prefix in ("[rank0]:", "12: ") for step in STEPS),
    "nan after none": "".join(
        [megatron(step, prefix="[rank0]:").replace(" lm loss: 1.0E-01 |", "") for step in STEPS]
        + [megatron(step, "nan") for step in STEPS]
    ),
    "a second program between": "".join(map(of_two_programs, STEPS)),
    "as before, but not at first": "".join(
        megatron(step) + megatron(step, "2.0E-01") + megatron(step) * (step > 20) for step in STEPS
    ),
}


@pytest.mark.parametrize("text", SEVERAL_RANKS.values(), ids=SEVERAL_RANKS)
def test_blocks_of_several_ranks_say_what_lines_say(text: str) -> None:
    assert_same(text, 1_000_000)


def test_a_nan_is_the_loss_of_a_rank_only_where_none_is_printed() -> None:
    """The last stage of a pipeline has the loss, also if it is NaN from the start. If all print NaN, none is better."""
    of_all, of_last = (in_lines(SEVERAL_RANKS[name])[0] for name in ("nan of two ranks", "nan after none"))
    assert (of_all.step_rank, of_last.step_rank) == (0, 12)


@settings(max_examples=examples(100), deadline=None)
@given(LOGS, st.sampled_from((1, 200, 3000, 1_000_000)))
def test_blocks_say_what_lines_say(text: str, size: int) -> None:
    assert_same(text, size)


@settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(LOGS, st.sampled_from((1, 200, 3000, 1_000_000)))
def test_blocks_say_what_lines_say_of_more_than_is_held(small_bounds: None, text: str, size: int) -> None:
    assert_same(text, size)


def test_every_specimen_with_other_digits() -> None:
    """Widths, dates and figures that only other digits give: the same from both."""
    for line in SPECIMENS:
        found = [other_step(other_digits(line, seed), seed) for seed in range(examples(15))]
        assert_same("\n".join([line, *found, *reversed(found)]), 1_000_000)


@pytest.mark.parametrize(("more", "last"), [((500, 950, 3), 950), ((500, 3), 8)])
def test_of_very_many_values_both_keep_the_largest(more: tuple[int, ...], last: int) -> None:
    batches = [900, *range(2, 18), *more]
    lines = [MEGATRON.format(step=at, ms=2000.0, loss="1.0E-01", skipped=0, batch=it) for at, it in enumerate(batches)]
    assert_same("\n".join(lines), 1_000_000)
    assert [fact.value for fact in in_lines("\n".join(lines))[0].facts["global_batch"]] == [900, *range(2, 8), last]


@pytest.mark.parametrize("prefix", ["", "[2024-04-06 03:02:12] "])
def test_evaluations_do_not_break_a_stretch(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many steps are taken at once even if an evaluation follows every tenth, and a second run begins."""
    steps = [
        prefix + MEGATRON.format(step=step, ms=2000.5, loss="1.0E-01", skipped=0, batch=4) + ("" if step % 10 else EVAL)
        for step in (*range(1, 300), *range(100, 300))
    ]
    taken: list[int] = []
    stretch = stretches_module._stretch
    monkeypatch.setattr(stretches_module, "_stretch", lambda *given: (taken.append(1), stretch(*given)))
    assert_same("\n".join(steps), 1_000_000)
    assert len(taken) < 10
