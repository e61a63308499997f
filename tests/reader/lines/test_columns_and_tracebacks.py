"""How a field's bytes become a figure, for many lines at once, and which line of a traceback is its exception."""

import math
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from hpc_gpt.reader.lines.columns import DigitColumn, TimeColumn
from hpc_gpt.reader.lines.fields import STEP_FIELDS
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.reader.lines.step_rows import sound_columns
from tests.reader.reading import read_log_plainly


@pytest.mark.parametrize(
    ("texts", "figures", "fast"),
    [
        (("1.5E-04", "2.7E-03"), (1.5e-4, 2.7e-3), True), (("-12.25", "-00.50"), (-12.25, -0.5), True),
        (("7e+02", "3e+11"), (700.0, 3e11), True), (("1.25e3", "9.99e9"), (1250.0, 9.99e9), True),
        (("1,234", "9,000"), (1234.0, 9000.0), True), (("38.12%", "00.50%"), (38.12, 0.5), True),
        (("1.05M", "9.00M"), (1.05e6, 9e6), True), (("480B", "007B"), (4.8e11, 7e9), True),
        (("+5", "+0"), (5.0, 0.0), True),
        (("-1.5E-30", "-2.5E+25"), (-1.5e-30, -2.5e25), True), (("1.5E-30", "2.5E-25"), (1.5e-30, 2.5e-25), True),
        (("123456789012345", "000000000000001"), (123456789012345.0, 1.0), True), (("7", "8"), (7.0, 8.0), True),
        # More digits than are exact, and what is no number of digits alone: each is read by itself.
        (("0.1234567890123456", "9.8765432109876543"), (0.1234567890123456, 9.8765432109876543), False),
        (("nan", "inf"), (math.nan, math.inf), False), (("0:14:31.50", "1:00:00.25"), (871.5, 3600.25), False),
    ],
)  # fmt: skip
def test_a_field_is_read_as_its_text_in_every_line(texts: tuple, figures: tuple, fast: bool) -> None:
    lines = [f"loss: {text} |\n".encode() for text in texts]
    end = 6 + len(texts[0])
    places = np.array([0, len(lines[0])])
    for name, factor in (("loss", 1.0), ("step_ms", 1e-3)):
        column = DigitColumn.of(name, lines[0], 6, end)
        assert (column.numeral is not None) is fast
        assert (column.start, column.width) == (6, end - 6)
        assert column.read(b"".join(lines), places) == pytest.approx([each * factor for each in figures], nan_ok=True)
    # A group with blanks around it has the same column.
    assert DigitColumn.of("loss", lines[0], 5, end + 1) == DigitColumn.of("loss", lines[0], 6, end)


def test_a_figure_that_cannot_be_is_none_and_counted() -> None:
    """By field, of -1, 0, 2e9, nan, inf and -inf: what is kept, and how many are counted."""
    nan = math.nan
    diverged = dict.fromkeys(("loss", "loss_eval", "grad_norm", "lr"), ([-1, 0, 2e9, nan, nan, nan], 0))
    signed = dict.fromkeys(("step", "skipped_so_far", "epoch", "at"), ([-1, 0, 2e9, nan, nan, nan], 2))
    mixture = dict.fromkeys(("balance_loss", "z_loss", "expert_load"), ([-1, nan, 2e9, nan, nan, nan], 0))
    expected = {"step_s": ([nan] * 6, 5), **diverged, **signed, **mixture}
    for name in STEP_FIELDS:
        kept, count = expected.get(name, ([nan, 0, 2e9, nan, nan, nan], 3))
        left_out: dict[str, int] = {}
        found = sound_columns({name: np.array([-1, 0, 2e9, nan, math.inf, -math.inf])}, left_out)[name]
        assert np.array_equal(found, kept, equal_nan=True), name
        assert left_out == ({f"impossible figures of {name}": count} if count else {}), name
    assert sound_columns({"step_s": np.array([1e9, 1e-9])}, {})["step_s"].tolist() == [1e9, 1e-9]


TIMES = ["2024-02-29 23:59:59.125", "2000-02-29 00:00:00.000", "1969-12-31 10:20:30.500", "2023-12-31 01:02:03.999"]
NO_TIMES = ["2023-02-29 10:00:00.000", "1900-02-29 10:00:00.000", "2024-00-10 10:00:00.000", "2024-13-10 10:00:00.000",
            "2024-04-31 10:00:00.000", "2024-04-00 10:00:00.000", "2024-04-10 24:00:00.000", "2024-04-10 10:60:00.000",
            "2024-04-10 10:00:60.000", "0000-04-10 10:00:00.000"]  # fmt: skip
SPANS = (("year", (0, 4)), ("month", (5, 7)), ("day", (8, 10)), ("hour", (11, 13)), ("minute", (14, 16)),
         ("second", (17, 19)), ("part", (20, 23)))  # fmt: skip


def test_a_time_of_day_is_a_second_or_none() -> None:
    data = "".join(f"[{text}]" for text in TIMES + NO_TIMES).encode()
    places = np.arange(len(TIMES + NO_TIMES)) * 25
    expected = [datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp() for text in TIMES]
    assert TimeColumn(1, SPANS).read(data, places).tolist()[: len(TIMES)] == expected
    assert np.isnan(TimeColumn(1, SPANS).read(data, places)[len(TIMES) :]).all()
    whole = TimeColumn(1, SPANS[:-1]).read(data, places)[: len(TIMES)]
    assert whole.tolist() == [math.floor(each) for each in expected]


BEGIN = "Traceback (most recent call last):"
FRAME = '  File "a.py", line 3, in f'
SOURCE = "    item = queue.get()"


WORDS = '    raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")'
MARKS = "    " + "^" * 40


@pytest.mark.parametrize("label", ["", "[rank3]: ", "2025-01-02 10:00:07 n7: "])
@pytest.mark.parametrize(
    ("lines", "failures"),
    [
        ([BEGIN, FRAME, WORDS, MARKS, "KeyError: 'loss'"], [(5, "KeyError: 'loss'")]),
        ([BEGIN, FRAME, WORDS, "KeyError: 'loss'"], [(4, "KeyError: 'loss'")]),
        ([BEGIN, FRAME, "    run(", "        check=True,  # RuntimeError: a wrong one", "    )", "KeyError: 'a'"],
         [(6, "KeyError: 'a'")]),
        ([BEGIN, FRAME, SOURCE, FRAME, "    except RuntimeError:", "    ^^^^^^", "queue.Empty"],
         [(7, "queue.Empty at `except RuntimeError:`")]),
        # The log ends in it: that it failed is known, and not by what.
        ([BEGIN, FRAME, SOURCE, FRAME, WORDS, MARKS], [(1, "a traceback that the log cuts off")]),
        # Of a log that begins in it, the marks are no message.
        (["RuntimeError:", MARKS], [(1, "RuntimeError:")]),
        # Indented words after the exception, and those of an exception itself, are said.
        ([BEGIN, FRAME, SOURCE, "KeyError: 'a'", WORDS[10:]], [(4, "KeyError: 'a'"), (5, "CUDA out of memory")]),
        ([BEGIN, FRAME, WORDS, "RuntimeError: CUDA out of memory. Tried 2 GiB"], [(4, "RuntimeError: CUDA")]),
    ],
)  # fmt: skip
def test_quoted_source_and_the_marks_below_it_are_no_cause(
    tmp_path: Path, label: str, lines: list[str], failures: list[tuple]
) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(f"{label}{line}\n" for line in ["training starts", *lines]))
    for read in (read_log, read_log_plainly):
        said = {each.place.line - 1: each.message for part in read(log).parts for each in part.failures}
        found = list(said.items())  # two patterns may take one line
        assert [number for number, _ in found] == [number for number, _ in failures], found
        assert all(words in message for (_, message), (_, words) in zip(found, failures, strict=True)), found
