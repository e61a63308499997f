"""Seconds of one optimizer step, part by part, from shapes and a machine's rates.

Letters: b micro-batch, s sequence, h hidden, t tp, d head's width, T = b s tokens, V vocabulary. A layer's time adds up
products (FLOPs at the rate that large products reach, plus their operands at memory bandwidth, which is what makes
narrow ones slow), passes over activations at memory bandwidth, and attention. If the host launches a layer slower than
the GPU works it through, the host decides instead.

A pipeline of p stages runs m micro-batches through: the slowest stage takes m slots, the others one each to fill and
drain, divided by the chunks of a stage if they are interleaved (Narayanan et al. 2021, arXiv:2104.04473, 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.plan.layers import layer_params, layers_of_stages
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.rates import DEFAULT, Constants, Links, Rates
from hpc_gpt.plan.states import moved_bytes
from hpc_gpt.plan.training import Training

_TORCH = ("fsdp", "ddp", "hf-deepspeed")  # engines without kernels fused by hand
_COMPILED = 0.5  # what torch.compile leaves of the bytes of these passes (one H200: eager 351k, compiled 524k tokens/s)
_ODD_WIDTH = 1.1  # multiples of 8 but not of 64 (NVIDIA, "Matrix multiplication background", tile quantisation)
_COMPILED_LAUNCHES = 0.4  # kernels of a compiled layer over those of an eager one (inductor's code for GPT-2)
# DDP's plain loop makes this part of the stops of a step (scale, norm, clipping, logs).
_DDP_STOPS = 0.25
# CPU Adam goes at the host memory's rate: about this share of a node's 200 GB/s for each GPU, times its GPUs.
_HOST_MEMORY_B_S = 150e9
# DeepSpeed's ZeRO-3 gathers one parameter at a time, mostly while nothing computes. Source of the cost over one ring of
# the same bytes: BigScience's V100 rows (3 to 10). Of the seconds of a layer and micro-batch that its hooks take: one
# H200, 124M and 1.5B parameters (6 ms more than ZeRO-1 in both).
_PER_PARAMETER = ("deepspeed-zero", "hf-deepspeed")
_PER_PARAMETER_COST = 4.0
_PER_PARAMETER_S = 6e-3


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: the parts sum up to `step_s`. `dp_s` is what nothing hides.

    `band` is the relative half width of the range that the true time is expected in.
    """

    compute_s: float
    recompute_s: float
    tp_s: float
    bubble_s: float
    p2p_s: float
    dp_s: float
    optimizer_s: float
    offload_s: float
    band: float

    @property
    def step_s(self) -> float:
        passes = self.compute_s + self.recompute_s + self.tp_s + self.bubble_s + self.p2p_s
        return passes + self.dp_s + self.optimizer_s + self.offload_s


@dataclass(frozen=True, slots=True)
class LayerTime:
    """Seconds on the GPU for one layer and one micro-batch, communication aside; `again_s` is recomputation."""

    forward_s: float
    backward_s: float
    again_s: float


def predict_step(training: Training, machine: Machine, constants: Constants = DEFAULT) -> StepTime:
    """The parts of one training's step on one machine, in seconds."""
    return _StepModel(machine, constants).predict(training)


class _StepModel:
    """Predicts steps on one machine."""

    def __init__(self, machine: Machine, constants: Constants) -> None:
        self.machine, self.constants = machine, constants
        self.links = Links(machine, constants)

    def predict(self, training: Training) -> StepTime:
        shape, constants, pp, vp = training.shape, self.constants, training.pp, training.vp
        micro_batches = training.micro_batches
        rates = Rates(self.machine, constants, training.dtype)
        layer, head = layer_time(training, rates), head_s(training, rates)
        comm = self._tensor_parallel_s(training)
        busy = layer.forward_s + layer.backward_s + layer.again_s + comm
        # The host launches forward, backward and recomputation; if it is slower than the GPU, the GPU waits.
        launching = constants.host_s * (3 if training.recompute == "full" else 2)
        waited = max(0.0, launching * (_COMPILED_LAUNCHES if training.compiled else 1) - busy)
        gathers = self._gathers_s(training, busy)
        per_layer = busy + waited + gathers
        first, most, at_end = _slowest(training, per_layer, head)
        compute = most * (layer.forward_s + layer.backward_s + waited) + head * at_end
        again, tensor, sends = most * layer.again_s, most * comm, self._sends_s(training)
        slot = compute + again + tensor + sends + most * gathers
        bubble = max(0.0, shape.layers * per_layer + head + pp * sends - slot) / vp if pp > 1 else 0.0
        params = _stage_params(training, first)
        hiding = (layer.forward_s + layer.backward_s) * first
        dp = self._reduction_s(training, params, hiding) + micro_batches * most * gathers
        optimizer, offload = self._update_s(training, params)
        if training.activations_on_host:  # each layer's input goes there and comes back
            kept = 2.0 * training.micro_batch * shape.seq * shape.hidden
            offload += 2 * micro_batches * most * kept / self.links.host_b_s
        across = dp + micro_batches * sends + (micro_batches * tensor if training.tp > self.links.per_node else 0.0)
        return StepTime(
            compute_s=micro_batches * compute,
            recompute_s=micro_batches * again,
            tp_s=micro_batches * tensor,
            bubble_s=bubble,
            p2p_s=micro_batches * sends,
            dp_s=dp,
            optimizer_s=optimizer + constants.step_s * (_DDP_STOPS if training.engine == "ddp" else 1),
            offload_s=offload,
            band=self._band(training, waited > 0, across / (across + micro_batches * slot + bubble)),
        )

    def _tensor_parallel_s(self, training: Training) -> float:
        """All-reduces of T h two-byte values: two forward, two backward, two with recomputation, a layer. Under
        sequence parallelism each is a gather and a reduce-scatter, of the same bytes."""
        if training.tp == 1:
            return 0.0
        size = 2.0 * training.micro_batch * training.shape.seq * training.shape.hidden
        times = 6 if training.recompute == "full" else 4
        return times * 2 * self.links.ring_s(size, training.tp)

    def _sends_s(self, training: Training) -> float:
        """Activations to the next stage and gradients back, a micro-batch, for every chunk of a stage. Megatron
        sends each rank's part and gathers inside the node (Narayanan et al. 2021, 4.1)."""
        if training.pp == 1:
            return 0.0
        size = 2.0 * training.micro_batch * training.shape.seq * training.shape.hidden
        gathered = 0.0
        if training.engine == "megatron-lm" or training.sequence_parallel:
            gathered = 0.0 if training.sequence_parallel else self.links.ring_s(size, training.tp)
            size /= training.tp
        stride = training.tp * training.dp
        # Activations go one way while gradients come the other: links carry both at once, but for what waits.
        return (1 + self.constants.exposed) * training.vp * (self.links.send_s(size, stride) + gathered)

    def _gathers_s(self, training: Training, busy: float) -> float:
        """ZeRO-3 and FSDP: what gathering a layer's parameters twice and scattering its gradients takes of a
        micro-batch's time that its compute does not hide."""
        one_by_one = training.engine in _PER_PARAMETER
        if training.sharding < 3 or (training.dp == 1 and not one_by_one):
            return 0.0
        size = 2.0 * layer_params(training.shape, training.tp)
        takes = 3 * self.links.ring_s(size, training.dp, training.tp, self.links.reduction_b_s)
        if one_by_one:
            return takes * _PER_PARAMETER_COST + _PER_PARAMETER_S
        return max(0.0, takes - busy) + self.constants.exposed * min(takes, busy)

    def _reduction_s(self, training: Training, params: float, hidden_s: float) -> float:
        """All-reduce of a stage's gradients once a step, or reduce-scatter of them and gather of parameters."""
        if training.sharding >= 3 or training.dp == 1:
            return 0.0
        summed = params * (4.0 if training.engine == "megatron-lm" and training.dtype == "bf16" else 2.0)
        # What comes back of a sharded optimizer is parameters, in 2 bytes, and not the sums.
        back = params * 2.0 if training.sharded_optimizer else summed
        takes = self.links.ring_s(summed, training.dp, training.tp, self.links.reduction_b_s)
        takes += self.links.ring_s(back, training.dp, training.tp, self.links.reduction_b_s)
        if training.engine in ("ddp", "fsdp") or training.sharded_optimizer:
            # During the last micro-batch's backward pass, and the gathers during the next step's first forward pass.
            return max(0.0, takes - hidden_s) + self.constants.exposed * min(takes, hidden_s)
        return takes

    def _update_s(self, training: Training, params: float) -> tuple[float, float]:
        """Seconds of the optimizer on the GPU, and of moving and updating what the host holds."""
        sharded = training.sharding >= 1 or training.sharded_optimizer
        own = params / training.dp if sharded else params
        memory_b_s = self.machine.memory_gb_s * 1e9 * self.constants.memory
        if training.offload == "none":
            return own * moved_bytes(training) / memory_b_s, 0.0
        # Every gradient is summed on the host; what stays on the GPU is updated there, one group after the other.
        ratio = training.offload_ratio
        stays = (1 - ratio) * own
        moved = own * (4 + 2 * ratio) / self.links.host_b_s + stays * 4 / self.links.host_b_s
        updated = ratio * own * moved_bytes(training) / (_HOST_MEMORY_B_S / self.links.per_node)
        if training.offload == "full":
            moved += own * 2 * 2 * training.micro_batches / self.links.host_b_s
        return stays * moved_bytes(training) / memory_b_s, moved + updated

    def _band(self, training: Training, host_bound: bool, across: float) -> float:
        """The relative error that four of five rows of a source were within when no fit had seen that source
        (test_step_time_published.py): more on several nodes, or if the host decides, and most by the part of a step
        that a network's rate decides."""
        band = 0.12 if self.constants == DEFAULT else 0.08
        if training.gpus > self.links.per_node:
            band += 0.04
        if host_bound:
            band += 0.04
        return min(0.6, band + across)


def _slowest(training: Training, per_layer: float, head: float) -> tuple[int, int, bool]:
    """Layers of the first and of the slowest stage, and whether that is the last one, which has the head as well."""
    counts = layers_of_stages(training)
    first, most, last = counts[0], max(counts), counts[-1]
    if last * per_layer + head >= most * per_layer:
        return first, last, True
    return first, most, False


def _stage_params(training: Training, layers: int) -> float:
    """Parameters of the first stage on one GPU; positions and norms are too few to matter for time."""
    shape = training.shape
    copies = 1 if shape.tied or training.pp > 1 else 2
    return layers * layer_params(shape, training.tp) + copies * shape.padded_vocab * shape.hidden / training.tp


def layer_time(training: Training, rates: Rates) -> LayerTime:
    """One layer's forward, backward and recomputation of one micro-batch on one GPU."""
    shape, tp = training.shape, training.tp
    hidden, seq = shape.hidden, shape.seq
    tokens = training.micro_batch * seq
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
    heads = shape.heads / training.tp * training.micro_batch
    products = rates.product_s(shape.seq, shape.seq, head, heads) + rates.product_s(shape.seq, head, shape.seq, heads)
    if head % 8:
        products = flops / rates.plain
    elif head % 64:
        products *= _ODD_WIDTH
    # Softmax with its mask (read and write 2 bytes) and dropout (the same and its mask of 1) over the scores.
    scores = heads * shape.seq * shape.seq / rates.bytes
    return products + 9 * scores, 2 * products + 11 * scores


def head_s(training: Training, rates: Rates) -> float:
    """Seconds of both passes of the head and its loss, of one micro-batch. Logits are read and written in two bytes
    once and in four several times (maximum, exponential, sum, gradient). In chunks they are made again in the backward
    pass."""
    shape = training.shape
    tokens = training.micro_batch * shape.seq
    vocab = shape.padded_vocab / training.tp
    product = rates.product_s(tokens, vocab, shape.hidden)
    logits = tokens * vocab / rates.bytes * (_COMPILED if training.compiled or training.fused_loss else 1)
    forward = product + 18 * logits
    again = forward if training.loss_chunks > 1 else 0.0
    return forward + (2 * product + 12 * logits + again)
