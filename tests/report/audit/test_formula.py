"""Formulas in a document's words: read without running anything, exact, and bounded."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.report.audit.formula import FormulaError, parse
from hpc_gpt.report.audit.quantities import Named, named

SEED = "model_size_in_B * 4 * 2 * seq * global_batch_size / (time_in_sec_per_interation * total_gpus * 1e3)"


def test_the_seeds_formula_knows_its_names():
    quantities = [name.quantity for name in parse(SEED).names.values()]
    assert quantities == ["size", "seq", "global_batch", "step_s", "gpus"]
    assert parse(SEED).names["model_size_in_B"] == Named("size", "b")
    assert parse(SEED).names["time_in_sec_per_interation"].unit == "s"


def test_the_seeds_one_liner_filled_in():
    formula = parse("$ms*4*2*1024*$gbs / ( $sp * $ng * 1e3)")
    values = {"$ms": 48, "$gbs": 1024, "$sp": 171, "$ng": 64}
    assert formula.filled({name: str(value) for name, value in values.items()}) == (
        "48 * 4 * 2 * 1024 * 1024 / (171 * 64 * 1e3)"
    )
    figure = formula.value({name: Fraction(value) for name, value in values.items()})
    assert figure == Fraction(48 * 8 * 1024 * 1024, 171 * 64 * 1000)


@pytest.mark.parametrize(
    ("text", "quantities"),
    [
        ("micro-batch-size * pp_chunks * dp_size", ["micro_batch", "micro_batches", "dp"]),
        ("micro bs * DP", ["micro_batch", "dp"]),
        ("micro batch size x GAS x data parallel size", ["micro_batch", "micro_batches", "dp"]),
        ("glob_bs/samples_per_second", ["global_batch", "samples_per_s"]),
        ("number of GPUs / (TP × PP)", ["gpus", "tp", "pp"]),
        ("gpus-tp", ["gpus", "tp"]),
    ],
)
def test_names_of_several_words_and_hyphens(text, quantities):
    assert [name.quantity for name in parse(text).names.values()] == quantities


def test_a_symbol_that_the_document_explains():
    formula = parse("8 * P / t", {"P": Named("size"), "t": Named("step_s", "s")})
    assert formula.value({"P": Fraction(3), "t": Fraction(2)}) == 12


arithmetic = st.recursive(
    st.integers(1, 99).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({' '.join(parts)})"),
    max_leaves=8,
)


@given(arithmetic)
def test_it_counts_as_python_counts(text):
    words = text.replace("(", "( ").replace(")", " )").split()
    exact = "".join(f"Fraction({word})" if word.isdigit() else word for word in words)
    try:
        expected = eval(exact, {"Fraction": Fraction})
    except ZeroDivisionError:
        with pytest.raises(FormulaError, match="zero"):
            parse(text).value({})
    else:
        assert parse(text).value({}) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "   ",
        "gpus *",
        "(gpus",
        "gpus)",
        "* gpus",
        "gpus gpus gpus *",
        "gpus ** ",
        "__import__('os').system('true')",
        "gpus.real",
        "lambda: 1",
        "size[0]",
        "1 if gpus else 2",
        "unheard_of * 2",
        "gpus ; gpus",
        "gpus = 4",
        "size, gpus",
        "(" * 1000 + "1" + ")" * 1000,
        "(" * 50 + "1" + ")" * 50,
        "1+" * 500 + "1",
        "gpus(tp)",
        "gpus (tp + 1)",
        "gpus * ()",
        "gpus // tp",
        "gpus * * tp",
        "(" * 150 + "1" + ")" * 150,
        "\x00",
        "gpus * \ud800",
        "1e99999",
    ],
)
def test_what_is_no_formula_is_refused(text):
    with pytest.raises(FormulaError):
        parse(text)


@pytest.mark.parametrize(
    "text",
    ["1 / 0", "1 / (gpus - gpus)", "0 ** -1", "gpus ** 64 ** 64", "9**9**9", "9 ** 999999999", "2 ** 0.5", "10 ** 65"],
)
def test_what_has_no_value_or_too_large_a_one_is_refused(text):
    with pytest.raises(FormulaError):
        parse(text).value({"gpus": Fraction(64)})


def test_powers_of_a_formula():
    assert parse("10**12").value({}) == 10**12
    assert parse("2^30").value({}) == 2**30
    assert parse("72 * hidden^2").value({"hidden": Fraction(8)}) == 72 * 64
    assert parse("-2**2").value({}) == -4


def test_towers_stay_small():
    with pytest.raises(FormulaError, match="too large"):
        parse("(9**8)" + "**8" * 6).value({})
    with pytest.raises(FormulaError, match="too large"):
        parse("(((9**8)**8)**8)**8").value({})


@given(st.text(alphabet="gpus1290.+-*/()^ ex$_-×", max_size=80))
def test_any_text_is_a_formula_or_is_refused(text):
    try:
        formula = parse(text)
        formula.value({name: Fraction(7) for name in formula.names})
    except FormulaError as fault:
        assert str(fault)


@pytest.mark.parametrize(
    ("heading", "quantity", "unit"),
    [
        ("GPUs", "gpus", None),
        ("# GPUs", "gpus", None),
        ("Glob-BS", "global_batch", None),
        ("PP Chunks", "micro_batches", None),
        ("Mic-BS", "micro_batch", None),
        ("Iteration Time (ms)", "step_s", "ms"),
        ("Step time [s]", "step_s", "s"),
        ("Step s", "step_s", "s"),
        ("Throughput (tokens/s)", "tokens_per_s", "tokens/s"),
        ("Throughput s", "step_s", "s"),
        ("tokens_per_s", "tokens_per_s", None),
        ("Tokens per second per GPU", "tokens_per_s_per_gpu", None),
        ("TFLOP/s/GPU", "tflops", None),
        ("TFLOPs model", "tflops_model", None),
        ("Params (B)", "size", "b"),
        ("MFU (%)", "mfu", "%"),
    ],
)
def test_a_heading(heading, quantity, unit):
    assert named(heading) == Named(quantity, unit)


@pytest.mark.parametrize(
    "heading", ["SP", "ms", "Step", "Batch Size", "Loss", "", "GPU Usage %", "Size (GB)", "x" * 500]
)
def test_a_heading_that_may_be_anything_is_not_known(heading):
    assert named(heading) is None
