"""Seconds of the passes over one layer and of the head, on one GPU of a tensor-parallel group.

Letters: b micro-batch, s sequence, h hidden, t tp, d head's width, T = b s tokens, V vocabulary. Times add up of
products (FLOPs at the rate that large products reach, plus their operands at memory bandwidth, which is what makes
narrow ones slow), of passes over activations at memory bandwidth, and of attention. A host that launches a layer
slower than the GPU works it through decides instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hpc_gpt.plan.constants import Constants
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.training import Training

# W per TFLOP/s of peak under which a card's power holds its clock down (an A100's, which keeps its clock in products),
# and how the clock follows power there. Source: H100 at 500 and 700 W, torchtitan's and Megatron-LM's tables.
_COOL_W = 1.28
_CLOCK = 0.2
# How the clock follows a limit set below the die's own: near the lowest voltage it falls almost as power does.
_LIMITED = 0.6
_TILE = 128  # rows and columns of a product's tile: a part of one takes as long (cuBLAS, CUTLASS)
# Attention's products whose width is not a multiple of 8 leave the matrix units; this part of the fp32 rate is left.
# Source: BigScience's chronicles-prequel.md, 150 against 128 wide heads.
_OFF_UNITS = 0.4
_TORCH = ("fsdp", "ddp", "hf-deepspeed")  # engines without kernels fused by hand
_COMPILED = 0.5  # what torch.compile leaves of the bytes of these passes (one H200: eager 351k, compiled 524k tokens/s)
_ODD_WIDTH = 1.1  # multiples of 8 but not of 64 (NVIDIA, "Matrix multiplication background", tile quantisation)


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds on the GPU for one layer and one micro-batch, communication aside; `again_s` is recomputation."""

    forward_s: float
    backward_s: float
    again_s: float


class Rates:
    """A device's rates under `constants`, for one dtype. FLOP/s and bytes/s."""

    def __init__(self, machine: Machine, constants: Constants, dtype: str) -> None:
        peaks = machine.peak_tflops
        peak = (
            peaks.get(dtype)
            or peaks.get("fp16" if dtype == "bf16" else "bf16")
            or peaks.get("fp32")
            or max(peaks.values(), default=1.0)
        )
        warm = _clock(machine, peak)
        self.flops = peak * 1e12 * constants.gemm * warm
        self.bytes = machine.memory_gb_s * 1e9 * constants.memory
        self.attention = self.flops * constants.attention
        self.plain = min(self.flops, (peaks.get("fp32") or peak / 16) * 1e12 * _OFF_UNITS)

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products of m x k by k x n."""
        tiled = math.ceil(m / _TILE) * math.ceil(n / _TILE) * (_TILE * _TILE)
        return batch * (2 * tiled * k / self.flops + 2 * (m * n + n * k + m * k) / self.bytes)


def _clock(machine: Machine, peak: float) -> float:
    """The part of the peak's clock that a card holds in large products."""
    if machine.power_w is None:
        return 1.0 if machine.sustained is None else machine.sustained
    full = machine.full_power_w or machine.power_w
    own = machine.sustained or min(1.0, float((full / peak / _COOL_W) ** _CLOCK))
    return own * float((machine.power_w / full) ** _LIMITED)


def layer_time(training: Training, rates: Rates) -> LayerTime:
    """One layer's forward, backward and recomputation of one micro-batch on one GPU."""
    shape, tp = training.shape, training.tp
    hidden, seq = shape.hidden, shape.seq
    tokens = training.micro_batch * seq / training.cp
    width, ffn = hidden / tp, shape.mlp / tp
    products = (
        rates.product_s(tokens, width * (1 + 2 * shape.kv_share), hidden)
        + rates.product_s(tokens, hidden, width)
        + rates.product_s(tokens, ffn * (2 if shape.gated else 1), hidden)
        + rates.product_s(tokens, hidden, ffn)
    )
    core, core_back = _attention(training, rates, tokens)
    passes = tokens * _pass_bytes(training) / rates.bytes
    weights = (hidden * width * (2 + 2 * shape.kv_share) + hidden * ffn * (3 if shape.gated else 2)) * 8 / rates.bytes
    forward = products + passes + core
    again = 0.0
    if training.recompute == "full":
        again = forward
    elif training.recompute == "selective":
        # Megatron repeats the attention's core; torchtitan's policy keeps the attention and every other product.
        again = products / 2 + passes if training.engine == "fsdp" else core
    return LayerTime(forward, 2 * products + 2 * passes + core_back + weights, again)


def _pass_bytes(training: Training) -> float:
    """Bytes that norms, dropout, residuals, biases, activations and turned positions move forward, per token.

    With kernels as Megatron's (bias and dropout and residual in one, bias and GELU in one): 4 h a norm, 7 h a dropout
    with its residual, 4 f or 6 f for the MLP's activation, 4 for each of Q, K, V to be transposed. An eager model that
    is gated normalises in fp32, multiplies its gate apart and turns positions in several passes. A compiled one fuses
    norms with residuals and activations with what feeds them. Source: Korthikanti et al. 2022, 4.1, for what is kept;
    the passes counted from Megatron-LM's, torchtitan's and inductor's kernels.
    """
    shape = training.shape
    width, ffn = shape.hidden / training.tp, shape.mlp / training.tp
    split = training.tp if training.sequence_parallel else 1  # who splits the sequence splits these as well
    eager = shape.gated and not training.compiled and training.engine in _TORCH
    each = shape.hidden / split * (40 if eager else 22) + 4 * width * (1 + 2 * shape.kv_share)
    each += ffn * ((10 if eager else 6) if shape.gated else 4)
    if not shape.positions:
        each += width * (1 + shape.kv_share) * (28 if eager else 4)
    return each * (_COMPILED if training.compiled else 1)


def _attention(training: Training, rates: Rates, tokens: float) -> tuple[float, float]:
    """Forward's and backward's seconds between Q, K, V and their output."""
    shape = training.shape
    width = shape.hidden / training.tp
    head = shape.hidden // shape.heads
    flops = 4 * tokens * shape.seq * width
    if training.flash:
        # Half of it for causality; backward has five products for forward's two (Dao 2022, arXiv:2205.14135). A head
        # of 64 keeps the matrix units waiting on exponentials.
        forward = flops / 2 / rates.attention * (1.25 if head < 128 else 1.0)
        return forward, 2.5 * forward
    heads = shape.heads / training.tp * training.micro_batch / training.cp
    products = rates.product_s(shape.seq, shape.seq, head, heads) + rates.product_s(shape.seq, head, shape.seq, heads)
    if head % 8:
        products = flops / rates.plain
    elif head % 64:
        products *= _ODD_WIDTH
    # Softmax with its mask (read and write 2 bytes) and dropout (the same and its mask of 1) over the scores.
    scores = heads * shape.seq * shape.seq / rates.bytes
    return products + 9 * scores, 2 * products + 11 * scores


def head_time(training: Training, rates: Rates) -> tuple[float, float]:
    """Forward's and backward's seconds of the head and its loss, of one micro-batch. Logits are read and written in
    two bytes once and in four several times (maximum, exponential, sum, gradient). In chunks they are made again in
    the backward pass."""
    shape = training.shape
    tokens = training.micro_batch * shape.seq / training.cp
    vocab = shape.vocab / training.tp
    product = rates.product_s(tokens, vocab, shape.hidden)
    logits = tokens * vocab / rates.bytes * (_COMPILED if training.compiled or training.fused_loss else 1)
    forward = product + 18 * logits
    again = forward if training.loss_chunks > 1 else 0.0
    return forward, 2 * product + 12 * logits + again
