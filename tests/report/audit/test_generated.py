"""Tables worked out from their own formula hold in every cell, and one cell changed is the one that breaks."""

from __future__ import annotations

from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal
from fractions import Fraction

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.report.audit import audit
from tests.report.audit.documents import table

FORMULA = "TFLOPs: `8 * model_size_in_B * seq * global_batch_size / (step_time * gpus * 1e3)`"
HEADINGS = ["GPUs", "Size", "TP", "PP", "DP", "GAS", "MBS", "GBS", "Step time", "TFLOPs", "Tokens/s"]


def _print(value: Fraction, digits: int, way: str) -> str:
    number = Decimal(value.numerator) / Decimal(value.denominator)
    return format(number.quantize(Decimal(1).scaleb(-digits), way), "f")


@st.composite
def rows(draw):
    small = st.sampled_from([1, 2, 3, 4, 8, 16])
    tp, pp, dp, chunks, micro = (draw(small) for _ in range(5))
    gpus, batch = tp * pp * dp, micro * chunks * dp
    way = draw(st.sampled_from([ROUND_DOWN, ROUND_HALF_UP]))
    size = draw(st.sampled_from(["7.5B", "18B", "350M", "1.2T", "48B"]))
    billions = Fraction(size[:-1]) * {"M": Fraction(1, 1000), "B": 1, "T": 1000}[size[-1]]
    seconds = draw(st.decimals(min_value="0.5", max_value="900", places=4))
    digits = draw(st.integers(0, 4))
    time = format(seconds.quantize(Decimal(1).scaleb(-digits), ROUND_HALF_UP), "f")
    time = time if Fraction(time) else "1"
    tflops = 8 * billions * 2048 * batch / (Fraction(time) * gpus * 1000)
    tokens = Fraction(batch * 2048) / Fraction(seconds)
    # A column that prints 0 in all its other cells says nothing of the one that is changed.
    least = next(digits for digits in range(9) if tflops * 10**digits >= 1)
    printed = (_print(tflops, draw(st.integers(least, 4 + least)), way), _print(tokens, draw(st.integers(0, 3)), way))
    unit = draw(st.sampled_from(["s", " s", " sec"]))
    sizes = (gpus, size, tp, pp, dp, chunks, micro, batch)
    return (*map(str, sizes), f"{time}{unit}", *printed)


def document(lines):
    return f"# Results\n\n{FORMULA}\n\nThe sequence length is 2048.\n\n{table(HEADINGS, *lines)}"


@settings(max_examples=60)
@given(st.lists(rows(), min_size=1, max_size=6))
def test_no_cell_of_a_right_table_breaks(tmp_path_factory, lines):
    path = tmp_path_factory.mktemp("right") / "paper.md"
    path.write_text(document(lines))
    found = audit(path)
    assert not found.findings, [finding.arithmetic for finding in found.findings]
    assert found.exit_code == 0
    held = {(each.line, each.column) for each in found.cells if each.outcome == "holds"}
    for line in range(len(lines)):
        assert {(line + 9, name) for name in ("GPUs", "GBS", "TFLOPs", "Tokens/s")} <= held


@settings(max_examples=60)
@given(st.lists(rows(), min_size=3, max_size=6), st.data())
def test_a_changed_cell_is_the_one_that_breaks(tmp_path_factory, lines, data):
    at = data.draw(st.integers(0, len(lines) - 1))
    column = data.draw(st.sampled_from(["GPUs", "GBS", "TFLOPs", "Tokens/s"]))
    place = HEADINGS.index(column)
    cells = list(lines[at])
    # A time of `1s` is 0.5 to 1.5 s: a cell twice as large may still hold.
    cells[place] = str(5 * int(cells[place]) + 9) if "." not in cells[place] else str(5 * Decimal(cells[place]) + 9)
    changed = [*lines[:at], tuple(cells), *lines[at + 1 :]]
    path = tmp_path_factory.mktemp("wrong") / "paper.md"
    path.write_text(document(changed))
    found = audit(path)
    assert {finding.line for finding in found.findings} == {at + 9}
    broken = {finding.column for finding in found.findings}
    assert column in broken
    # What is worked out of a wrong cell is wrong with it; nothing else is.
    assert broken <= {column, "TFLOPs", "Tokens/s"} if column in ("GPUs", "GBS") else broken == {column}
