"""What the texts of a log mean: figures, units, types, arguments."""

import math

import pytest

from hpc_gpt.reader.lines.arguments import dtype_named
from hpc_gpt.reader.lines.fields import figure, scaled, unit

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


def test_units() -> None:
    for line in UNITS.replace("\n", "; ").split("; "):
        name, field, value = line.replace(":", "").split()
        assert scaled(name, "1000") == (field, pytest.approx(float(value), rel=1e-8)), name
        assert unit(name)[0] == field


FIGURES = {
    " 12.5 % ": 12.5, "1_000": None, "1_000K": None, "1,234,567.5": 1234567.5, ".5": 0.5, "-1.5e-3": -0.0015,
    "2.5K": 2500, "2.5k": 2500, "2.5M": 2.5e6, "2.5G": 2.5e9, "2.5B": 2.5e9, "2.5T": 2.5e12, "2.5 Q": None,
    "832.1 (avg 830.0)": 832.1, "12.3/12.9": 12.3, "1 days, 2:03:04": 93784, "2 day 1:00:01": 176401,
    "3:04": 184, "1:03:04.5": 3784.5, "2d 1h 1m 1s": 176461, "5m": 300, "1,5": 1.5, "1,5e1": 15, "1,500": 1500,
    "-1,25": -1.25, "1e400": None, "1" + "0" * 62: 1e62, "1" + "0" * 64: None, "": None, "%": None, "cat": None,
}  # fmt: skip


def test_figures() -> None:
    found = {text: figure(text) for text in FIGURES}
    assert found == pytest.approx(FIGURES, rel=1e-12)


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
