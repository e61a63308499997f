"""What the texts of a log mean: figures, units, types, arguments."""

import math

import pytest

from hpc_gpt.reader.pattern import (
    Arguments,
    dtype_named,
    figure,
    literal_of,
    quotient,
    scaled,
    unit,
    without_unknown,
)

# A group of a pattern that matched 1000 -> the field, and its value.
UNITS = """\
step_ms: step_s 1; seconds_per_step: step_s 1000; ms_per_step: step_s 1; steps_per_s: step_s 0.001; loss: loss 1000
runtime_min: runtime_s 60000; runtime_hours: runtime_s 3600000; elapsed_ms: elapsed_s 1; save_ms: save_s 1
mfu_percent: mfu 10; params_millions: params 1e9; params_billions: params 1e12; params_gi: params 1073741824000
params_estimated_billions: params_estimated 1e12; loss_bits: loss 693.147180; loss_eval_bits: loss_eval 693.147180
at_ms: at 1; tokens_per_ms: tokens_per_s 1e6; gflops: tflops 1
memory_allocated_bytes: memory_allocated_gib 9.31322575e-07; memory_allocated_mib: memory_allocated_gib 0.9765625
memory_allocated_mb: memory_allocated_gib 0.931322575; memory_allocated_gb: memory_allocated_gib 931.322575
memory_reserved_bytes: memory_reserved_gib 9.31322575e-07; memory_reserved_mib: memory_reserved_gib 0.9765625
memory_reserved_gb: memory_reserved_gib 931.322575
balance_loss_of_sequences: balance_loss 1000; balance_loss_of_ranks: balance_loss 1000"""
TEXTS = (
    "engine device dtype recompute name job_id node node_list rank_name torch_version framework_version words key value"
)
TEXTS += " deepspeed_version position_embedding model_type"


@pytest.mark.parametrize("line", UNITS.replace("\n", "; ").split("; "))
def test_units(line: str) -> None:
    name, field, value = line.replace(":", "").split()
    found = scaled(name, "1000")
    assert found is not None
    assert (found[0], found[1]) == (field, pytest.approx(float(value), rel=1e-8))
    assert unit(name)[0] == field


def test_texts_stay_texts() -> None:
    assert [scaled(name, " 12 ") for name in TEXTS.split()] == [(name, "12") for name in TEXTS.split()]
    assert (scaled("loss", "cat"), scaled("steps_per_s", "0")) == (None, None)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (" 12.5 % ", 12.5),
        ("1_000", None),
        ("1_000K", None),
        ("1,234,567.5", 1234567.5),
        (".5", 0.5),
        ("-1.5e-3", -0.0015),
        ("2.5K", 2500),
        ("2.5k", 2500),
        ("2.5M", 2.5e6),
        ("2.5G", 2.5e9),
        ("2.5B", 2.5e9),
        ("2.5T", 2.5e12),
        ("2.5 Q", None),
        ("832.1 (avg 830.0)", 832.1),
        ("12.3/12.9", 12.3),
        ("1 days, 2:03:04", 93784),
        ("2 day 1:00:01", 176401),
        ("3:04", 184),
        ("1:03:04.5", 3784.5),
        ("2d 1h 1m 1s", 176461),
        ("5m", 300),
        ("1,5", 1.5),
        ("1,5e1", 15),
        ("1,500", 1500),
        ("-1,25", -1.25),
        ("1e400", None),
        ("1" + "0" * 62, 1e62),
        ("1" + "0" * 64, None),
        ("", None),
        ("%", None),
        ("cat", None),
    ],
)
def test_figures(text: str, value: float | None) -> None:
    assert figure(text) == (None if value is None else pytest.approx(value, rel=1e-12))


def test_figures_that_are_none() -> None:
    for text in ("nan", "NaN", "-nan", "nan(ind)"):
        found = figure(text)
        assert found is not None
        assert math.isnan(found)
    assert [figure(text) for text in ("inf", "-inf", "Infinity", "+INF")] == [math.inf, -math.inf, math.inf, math.inf]


def test_types_by_any_of_their_names() -> None:
    names = {
        "fp16": "fp16 float16 half 16-mixed 16 torch.float16 Half",
        "bf16": "bf16 bfloat16 bf16-mixed torch.bfloat16",
        "fp32": "fp32 float32 float 32 torch.float",
    }
    found = {(dtype, name): dtype_named(f" {name} ") for dtype, several in names.items() for name in several.split()}
    assert {key: dtype for key, dtype in found.items() if dtype != key[0]} == {}
    assert dtype_named("fp8") is None


def test_a_dump_is_read_by_the_first_name_that_is_given() -> None:
    given = Arguments({"a": " None ", "b": " 8 ", "c": "1.0", "d": "1.5", "e": "x" * 33, "f": " True ", "g": "false"})
    assert [given.text(*names) for names in (("a", "b"), ("b", "c"), ("a",), ("z",))] == ["8", "8", None, None]
    for name in ("none", "null", "", "None"):
        assert Arguments({"a": name}).text("a") is None
    assert [given.whole(*names) for names in (("b", "c"), ("a", "c"), ("d", "b"), ("e",), ("f", "b"))] == [
        8,
        1,
        8,
        None,
        8,
    ]
    assert given.whole("h", "d") is None
    assert Arguments({"a": "0" * 31 + "7", "b": "0" * 32 + "7"}).whole("b", "a") == 7
    assert [given.true(*names) for names in (("f",), ("g",), ("g", "f"), ("z",), ("b", "z"))] == [
        True,
        False,
        True,
        None,
        False,
    ]
    assert Arguments({"a": "true"}).true("a") is True
    assert Arguments({"a": "torch.half"}).dtype("b", "a") == "fp16"
    assert given.dtype("z") is None
    assert without_unknown({"a": 0, "b": None, "c": ""}) == {"a": 0, "c": ""}


def test_a_quotient_is_whole_and_of_known_factors() -> None:
    several = [(8, 2, 2), (8, 3), (None, 2), (8, None), (8, 0), (0, 2), (8,), (8, -2), (8, 16)]
    assert [quotient(*each) for each in several] == [2, None, None, None, None, None, 8, None, None]


@pytest.mark.parametrize("regex", [r"\d+", "(?:ab|cd)", "abc|abd", "(?i:abc)d", "(?i)abc"])
def test_a_pattern_without_one_text_asks_for_a_literal(regex: str) -> None:
    with pytest.raises(AssertionError, match="name a literal"):
        literal_of(regex)
