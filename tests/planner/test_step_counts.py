"""What a layer, the head and the update move and multiply, counted by hand, where all else takes no time."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.machine import DEFAULT
from hpc_gpt.planner.step_time import head_s, layer_time, predict_step
from tests.planner.machines import machine_named

# One byte a second, or one FLOP; heads of 64, an MLP of 4 h.
BYTES: Any = SimpleNamespace(bytes=1.0, forward=math.inf, backward=math.inf, plain=math.inf,
                             product_s=lambda *sizes: 0.0, layer_product_s=lambda *sizes: 0.0)  # fmt: skip
FLOPS: Any = SimpleNamespace(bytes=math.inf, forward=1.0, backward=1.0, plain=1.0,
                             product_s=lambda m, n, k, times=1: 2.0 * m * n * k * times,
                             layer_product_s=lambda m, n, k: 2.0 * m * n * k)  # fmt: skip
H, SEQ, VOCAB = 512, 64, 1024
GPT2 = Training(ModelShape(H, 4, 8, vocab=VOCAB, seq=SEQ), flash=True, engine="ddp", micro_batch=2)
LLAMA = replace(
    GPT2, shape=replace(GPT2.shape, mlp="swiglu", positions="rope", tied=False, kv_heads=2, ffn=1024, bias="none")
)
WIDE = replace(GPT2, shape=replace(GPT2.shape, heads=4))  # of 128


@pytest.mark.parametrize(
    ("run", "bytes_of_a_token"),
    [
        (GPT2, 22 * H + 4 * 3 * H + 4 * 4 * H),
        (replace(GPT2, tp=2), 22 * H + (4 * 3 * H + 4 * 4 * H) / 2),
        (replace(GPT2, tp=2, sequence_parallel=True), (22 * H + 4 * 3 * H + 4 * 4 * H) / 2),
        (replace(GPT2, compiled=True), (22 * H + 4 * 3 * H + 4 * 4 * H) / 2),  # half of the passes are fused
        # Two of eight heads are keys; eager, norms, gate and rotation are passes of their own.
        (LLAMA, 40 * H + 4 * 1.5 * H + 10 * 1024 + 28 * 1.25 * H),
        (replace(LLAMA, compiled=True), (22 * H + 4 * 1.5 * H + 6 * 1024 + 4 * 1.25 * H) / 2),
        (replace(LLAMA, engine="megatron-lm"), 22 * H + 4 * 1.5 * H + 6 * 1024 + 4 * 1.25 * H),
    ],
)  # fmt: skip
def test_a_layers_passes_move_these_bytes(run: Training, bytes_of_a_token: float) -> None:
    layer, tokens = layer_time(run, BYTES), 2 * SEQ
    weights = sum(matrix.size for matrix in run.shape.kinds[-1].matrices) / run.tp
    assert layer.forward_s == pytest.approx(tokens * bytes_of_a_token)
    assert layer.backward_s == pytest.approx(2 * layer.forward_s + 8 * weights)  # fp32 sums are read and written
    half = layer_time(replace(run, grad_sum="bf16"), BYTES)
    assert layer.backward_s - half.backward_s == pytest.approx(4 * weights)
    assert (layer.core_s, layer.again_s) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changes", "spared"),
    [
        ({"keep_residuals": True}, 10.0 * H),
        ({"fused_bias_gradients": True}, 1.7 * (3 * H + 4 * H)),
        ({"fused_bias_gradients": True, "tp": 2}, 1.7 * (3 * H + 4 * H) / 2),
        ({"fused_bias_gradients": True, "matmul": "fp8-row"}, 0.0),
        ({"keep_residuals": True, "fused_bias_gradients": True}, 10.0 * H + 1.7 * 7 * H),
        ({"matmul": "fp8-row"}, 0.0),
        ({}, 0.0),
    ],
)
def test_a_fused_backward_pass_moves_less(changes: dict, spared: float) -> None:
    plain = replace(GPT2, **{key: changes[key] for key in changes.keys() & {"tp", "matmul"}})
    found = layer_time(plain, BYTES).backward_s - layer_time(replace(GPT2, **changes), BYTES).backward_s
    assert found == pytest.approx(2 * SEQ * spared)


@pytest.mark.parametrize(("matmul", "each"), [("fp8-tensor", 8.0), ("fp8-row", 4.0), ("mxfp8", 4.0), ("nvfp4", 6.0)])
def test_operands_are_cast_in_both_passes(matmul: Any, each: float) -> None:
    """QKV, out, up and down have inputs of 1, 1, 1 and 4 h, and outputs of 3, 1, 4 and 1; a tensor is scaled first."""
    none, cast = (layer_time(replace(GPT2, matmul=how), BYTES) for how in ("none", matmul))
    assert cast.forward_s - none.forward_s == pytest.approx(2 * SEQ * each * 7 * H)
    assert cast.backward_s - none.backward_s == pytest.approx(2 * SEQ * each * 9 * H)


@pytest.mark.parametrize(
    ("changes", "products"),
    [({}, 0), ({"recompute": "full"}, 1), ({"recompute": "selective"}, 0), ({"tp": 2}, 0)],
)
def test_a_layers_products_are_two_flops_a_weight_and_token(changes: dict, products: int) -> None:
    run = replace(WIDE, flash=False, **changes)
    layer = layer_time(run, FLOPS)
    weights, core = 2 * 2 * SEQ * 12 * H**2 / run.tp, 2 * 2 * 2 * SEQ * SEQ * H / run.tp  # q k and p v
    assert layer.forward_s == pytest.approx(weights + core)
    assert layer.backward_s == pytest.approx(2 * weights + 2 * core)
    assert layer.core_s == pytest.approx(3 * core)
    again = {"full": weights + core, "selective": core}.get(run.recompute, 0.0)
    assert layer.again_s == pytest.approx(again)


def test_scores_are_read_and_written_with_mask_and_dropout() -> None:
    """Softmax 4 bytes a score, dropout 5; backward two bytes more; heads of no multiple of 64 are a tenth slower."""
    none, eager = (layer_time(replace(GPT2, flash=flash), BYTES) for flash in (True, False))
    scores = 2 * SEQ * SEQ * 8
    assert eager.forward_s - none.forward_s == pytest.approx(9 * scores)
    assert eager.backward_s - none.backward_s == pytest.approx(11 * scores)
    odd = layer_time(replace(GPT2, flash=False, shape=replace(GPT2.shape, hidden=320)), FLOPS)  # heads of 40
    assert odd.core_s == pytest.approx(1.1 * 3 * 2 * 2 * 2 * SEQ * SEQ * 320)
    odder = layer_time(replace(GPT2, flash=False, shape=replace(GPT2.shape, hidden=8 * 36)), FLOPS)
    assert odder.core_s == pytest.approx(3 * 2 * 2 * 2 * SEQ * SEQ * 8 * 36)  # at the plain rate


@pytest.mark.parametrize(
    ("run", "ranks_of_a_sequence", "narrow"),
    [
        (WIDE, 1, (1.0, 1.0)),
        (GPT2, 1, (0.8, 0.87)),
        (replace(WIDE, cp=2, cp_exchange="heads", engine="deepspeed-3d"), 1, (1.0, 1.0)),
        (replace(WIDE, cp=2, cp_exchange="keys", engine="deepspeed-3d"), 2, (1.0, 1.0)),
    ],
)
def test_fused_attention_does_half_and_more_of_short_parts(run: Training, ranks_of_a_sequence: int, narrow) -> None:
    """Of all pairs half are masked; (s + 320) / s is lost on the diagonal; five products backward for two."""
    none = replace(run, shape=replace(run.shape, seq=SEQ))
    half = 4 * (2 * SEQ / run.cp) * SEQ * H / 2 * (1 + 320 / (SEQ / ranks_of_a_sequence))
    assert layer_time(none, FLOPS).core_s == pytest.approx(half / narrow[0] + 2.5 * half / narrow[1])


def test_a_ring_adds_up_the_output_of_every_other_rank() -> None:
    run = replace(WIDE, cp=4, cp_exchange="ring", engine="megatron-lm")
    assert layer_time(run, BYTES).core_s == pytest.approx(3 * 3 * 20 * (2 * SEQ / 4) * H)


@pytest.mark.parametrize(
    ("changes", "bytes_of_a_logit", "products"),
    [
        ({}, 30, 3),
        ({"compiled": True}, 15, 3),
        ({"fused_loss": "kernel"}, 15, 3),
        ({"compiled_loss": True}, VALUES["passes.compiled_loss_bytes"], 3),
        ({"compiled_loss": True, "dtype": "fp32"}, 2 * VALUES["passes.compiled_loss_bytes"], 3),
        ({"one_pass_loss": True}, VALUES["passes.one_pass_loss_bytes"], 3),
        ({"one_pass_loss": True, "loss_chunks": 4}, VALUES["passes.one_pass_loss_bytes"], 3),
        ({"loss_chunks": 4}, 1.6 * 30, 4),  # the forward pass, six tenths of it, again
        ({"tp": 2}, 15, 1.5),
    ],
)
def test_the_head_moves_and_multiplies_its_logits(changes: dict, bytes_of_a_logit: float, products: float) -> None:
    run = replace(GPT2, **changes)
    assert head_s(run, BYTES) == pytest.approx(2 * SEQ * VOCAB * bytes_of_a_logit)
    assert head_s(run, FLOPS) == pytest.approx(products * 2 * 2 * SEQ * VOCAB * H)


@pytest.mark.parametrize(
    ("changes", "moved"),
    [
        ({}, 38),
        ({"optimizer_mode": "foreach"}, 90),
        ({"optimizer_mode": "for-loop"}, 90),
        ({"optimizer_mode": "compiled"}, 30),  # the sums are in 16 bits
        ({"optimizer_mode": "compiled", "micro_batches": 2}, 34),
        ({"optimizer_mode": "compiled", "engine": "deepspeed-zero"}, 38),
        ({"optimizer_mode": "compiled", "dtype": "fp32"}, 38),
    ],
)
def test_the_update_moves_these_bytes_a_parameter(changes: dict, moved: float) -> None:
    machine = machine_named("h100-80g", 8, None)
    constants = replace(DEFAULT, step_s=1e-12, memory=0.5)
    run = replace(GPT2, **changes)
    params = 4 * sum(matrix.size for matrix in run.shape.kinds[-1].matrices) + VOCAB * H
    seconds = predict_step(run, machine, constants).optimizer_s
    assert seconds * machine.memory_gb_s * 1e9 / 2 / moved == pytest.approx(params, rel=0.01)
