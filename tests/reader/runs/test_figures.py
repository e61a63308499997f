"""What follows from a record's own sizes."""

from dataclasses import replace

import pytest

from hpc_gpt.core.formulas import memory_seed003_gib, tflops_hardware
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.report.compare import SETTING_KEYS

RUN = Record(
    gpus=8, tp=2, pp=2, dp=2, micro_batch=4, global_batch=32, seq=128, hidden=64, layers=4, heads=4, vocab=1000,
    params=400_000, dtype="bf16", recompute="none",
)  # fmt: skip


def test_training_parallelisms_memory_is_that_of_one_ranks_share():
    record = add_figures(RUN)
    share = {"params": 100_000, "batch": 4, "seq": 128, "layers": 2, "hidden": 32, "heads": 2, "vocab": 500}
    assert record.memory_seed003_gib == pytest.approx(memory_seed003_gib(**share))
    assert "2 B C (2 V + l (6 e + h C))" in record.sources["memory_seed003_gib"]
    assert record.step_s is None, "it needs no step time"


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("h100-80g", None, "no dtype is named"),
        ("abacus", "bf16", "no peaks known"),
        ("v100-32g", "bf16", "no dense bf16"),
    ],
)
def test_what_lacks_for_utilisation_is_told(device, dtype, words):
    record = add_figures(replace(RUN, step_s=1.0, device=device, dtype=dtype))
    assert record.mfu is None
    assert words in record.sources["mfu"]
    assert any(flag.startswith(words) and "None" not in flag for flag in record.flags)


def test_flops_of_a_run_of_ours_are_those_of_its_own_matrices():
    shape = ModelShape(64, 4, 4, 1000, 128, kv_heads=2, head_dim=32, ffn=96, mlp="swiglu", bias="none")
    sizes = {"layers": 4, "hidden": 64, "vocab": 1000, "seq": 128, "global_batch": 32, "gpus": 8, "step_s": 0.5}
    expected = tflops_hardware(
        **sizes, recompute="none", layer_weights=64 * 32 * (4 + 2 + 2 + 4) + 3 * 64 * 96, attention_width=128
    )
    found = add_figures(replace(RUN, step_s=0.5, params=260_000, settings={"model": shape.table()}))
    assert found.tflops_hardware == expected
    plain = add_figures(replace(RUN, step_s=0.5, params=260_000, settings={"model": {"tied": True}}))
    assert plain.tflops_hardware == tflops_hardware(**sizes, recompute="none") != expected
    # Nothing is computed again: one count of the matrices that multiply for both.
    assert (found.tflops_model, plain.tflops_model) == pytest.approx((found.tflops_hardware, plain.tflops_hardware))
    assert "weights that multiply" in found.sources["tflops_model"]


def test_another_models_log_hides_which_parameters_multiply():
    counted = 4 * 12 * 64**2 + 1000 * 64
    run = replace(RUN, step_s=0.5, params=counted + 4_000)
    assert add_figures(run).tflops_model == pytest.approx(add_figures(run).tflops_hardware)
    other = add_figures(replace(run, params=2 * counted))
    assert other.sources["tflops_model"] == "(6 P + 12 L h s) s B / (t n 1e12), PaLM appendix B"
    assert other.tflops_model


def test_shares_of_an_fp8_run_are_of_fp8s_peak_and_say_so():
    sizes = {"step_s": 1.0, "gpus": 1, "global_batch": 8, "seq": 1024, "layers": 12, "hidden": 768, "vocab": 50304,
             "params": 124_000_000, "recompute": "none", "device": "h100-80g", "dtype": "bf16"}  # fmt: skip
    of_16, of_8 = (add_figures(Record(**sizes, matmul=matmul)) for matmul in (None, "fp8-tensor"))
    assert (of_16.mfu, of_16.hfu) == pytest.approx((2 * of_8.mfu, 2 * of_8.hfu), rel=1e-2)
    assert "dense fp8 TFLOP/s of h100-80g" in of_8.sources["mfu"]
    assert "matmul" in SETTING_KEYS
