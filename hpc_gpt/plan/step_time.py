"""Seconds of one optimizer step, part by part, from shapes and a machine's rates.

A pipeline of p stages runs m micro-batches through: the slowest stage takes m slots, the others one each to fill and
drain, divided by the chunks of a stage where they are interleaved (Narayanan et al. 2021, arXiv:2104.04473, 2.2).
"""

from __future__ import annotations

from hpc_gpt.plan.communication import Links
from hpc_gpt.plan.compute import LayerTime, Rates, head_time, layer_time
from hpc_gpt.plan.constants import DEFAULT, Constants
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.parameters import layer_params
from hpc_gpt.plan.prediction import StepTime
from hpc_gpt.plan.training import Training
from hpc_gpt.plan.update import moved_bytes

__all__ = ["DEFAULT", "Constants", "StepModel", "predict_step"]

_COMPILED_LAUNCHES = 0.4  # kernels of a compiled layer over those of an eager one (inductor's code for GPT-2)
# Of the stops of a step (scale, norm, clipping, logs) DDP's plain loop makes this part.
_DDP_STOPS = 0.25
_KEPT = 4096  # layers whose seconds are kept, so that memory stays flat
# CPU Adam goes at the host memory's rate: about this share of a node's 200 GB/s for each GPU, times its GPUs.
_HOST_MEMORY_B_S = 150e9
# DeepSpeed's ZeRO-3 gathers one parameter at a time, mostly while nothing computes. Source of the cost over one ring of
# the same bytes: BigScience's V100 rows (3 to 10). Of the seconds of a layer and micro-batch that its hooks take: one
# H200, 124M and 1.5B parameters (6 ms more than ZeRO-1 in both).
_PER_PARAMETER = ("deepspeed-zero", "hf-deepspeed")
_PER_PARAMETER_COST = 4.0
_PER_PARAMETER_S = 6e-3


class StepModel:
    """Predicts steps of trainings on one machine; keeps what trainings of the same shape, tp and micro-batch share."""

    def __init__(self, machine: Machine, constants: Constants = DEFAULT) -> None:
        self.machine, self.constants = machine, constants
        self.links = Links(machine, constants)
        self._rates: dict[str, Rates] = {}
        self._layers: dict[tuple[object, ...], tuple[LayerTime, tuple[float, float]]] = {}

    def predict(self, training: Training) -> StepTime:
        """The step's parts, in seconds."""
        shape, constants, pp, vp = training.shape, self.constants, training.pp, training.vp
        micro_batches = training.micro_batches
        layer, (head_forward, head_backward) = self._layer(training)
        head = head_forward + head_backward
        comm = self._tensor_parallel_s(training)
        busy = layer.forward_s + layer.backward_s + layer.again_s + comm
        # The host launches forward, backward and recomputation; where it is slower than the GPU, the GPU waits.
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
        dp = (
            self._reduction_s(training, params, (layer.forward_s + layer.backward_s) * first)
            + micro_batches * most * gathers
        )
        optimizer, offload = self._update_s(training, params)
        if training.activations_on_host:  # each layer's input goes there and comes back
            kept = 2.0 * training.micro_batch * shape.seq / training.cp * shape.hidden
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

    def _layer(self, training: Training) -> tuple[LayerTime, tuple[float, float]]:
        key = (
            training.shape,
            training.tp,
            training.cp,
            training.micro_batch,
            training.recompute,
            training.sequence_parallel,
            training.flash,
            training.engine,
            training.compiled,
            training.fused_loss,
            training.loss_chunks > 1,
            training.dtype,
        )
        known = self._layers.get(key)
        if known is None:
            if len(self._layers) >= _KEPT:
                self._layers.clear()
            known = self._layers[key] = self._work_out(training)
        return known

    def _work_out(self, training: Training) -> tuple[LayerTime, tuple[float, float]]:
        rates = self._rates.get(training.dtype)
        if rates is None:
            rates = self._rates[training.dtype] = Rates(self.machine, self.constants, training.dtype)
        return layer_time(training, rates), head_time(training, rates)

    def _tensor_parallel_s(self, training: Training) -> float:
        """All-reduces of T h two-byte values: two forward, two backward, two with recomputation, a layer. Under
        sequence parallelism each is a gather and a reduce-scatter, of the same bytes."""
        if training.tp == 1:
            return 0.0
        size = 2.0 * training.micro_batch * training.shape.seq / training.cp * training.shape.hidden
        times = 6 if training.recompute == "full" else 4
        return times * 2 * self.links.ring_s(size, training.tp)

    def _sends_s(self, training: Training) -> float:
        """Activations to the next stage and gradients back, a micro-batch, for every chunk of a stage. Megatron
        sends each rank's part and gathers inside the node (Narayanan et al. 2021, 4.1)."""
        if training.pp == 1:
            return 0.0
        size = 2.0 * training.micro_batch * training.shape.seq / training.cp * training.shape.hidden
        gathered = 0.0
        if training.engine == "megatron-lm" or training.sequence_parallel:
            gathered = 0.0 if training.sequence_parallel else self.links.ring_s(size, training.tp)
            size /= training.tp
        stride = training.tp * training.cp * training.dp
        # Activations go one way while gradients come the other: links carry both at once, but for what waits.
        return (1 + self.constants.exposed) * training.vp * (self.links.send_s(size, stride) + gathered)

    def _gathers_s(self, training: Training, busy: float) -> float:
        """ZeRO-3 and FSDP: what gathering a layer's parameters twice and scattering its gradients takes of a
        micro-batch's time that its compute does not hide."""
        one_by_one = training.engine in _PER_PARAMETER
        if training.sharding < 3 or (training.dp == 1 and not one_by_one):
            return 0.0
        size = 2.0 * layer_params(training.shape, training.tp)
        takes = 3 * self.links.ring_s(size, training.dp * training.cp, training.tp, self.links.reduction_b_s)
        if one_by_one:
            return takes * _PER_PARAMETER_COST + _PER_PARAMETER_S
        return max(0.0, takes - busy) + self.constants.exposed * min(takes, busy)

    def _reduction_s(self, training: Training, params: float, hidden_s: float) -> float:
        """All-reduce of a stage's gradients once a step, or reduce-scatter of them and gather of parameters."""
        group = training.dp * training.cp
        if training.sharding >= 3 or group == 1:
            return 0.0
        summed = params * (4.0 if training.engine == "megatron-lm" and training.dtype == "bf16" else 2.0)
        # What comes back of a sharded optimizer is parameters, in 2 bytes, and not the sums.
        back = params * 2.0 if training.distributed_optimizer else summed
        takes = self.links.ring_s(summed, group, training.tp, self.links.reduction_b_s)
        takes += self.links.ring_s(back, group, training.tp, self.links.reduction_b_s)
        if training.engine in ("ddp", "fsdp") or training.distributed_optimizer:
            # Behind the last micro-batch's backward, and the gathers behind the next step's first forward.
            return max(0.0, takes - hidden_s) + self.constants.exposed * min(takes, hidden_s)
        return takes

    def _update_s(self, training: Training, params: float) -> tuple[float, float]:
        """Seconds of the optimizer on the GPU, and of moving and updating what the host holds."""
        sharded = training.sharding >= 1 or training.distributed_optimizer
        own = params / training.dp if sharded else params
        if training.offload == "none":
            return own * moved_bytes(training) / (self.machine.memory_gb_s * 1e9 * self.constants.memory), 0.0
        # Every gradient is summed on the host; what stays on the GPU is updated there, one group after the other.
        ratio = training.offload_ratio
        stays = (1 - ratio) * own
        moved = own * (4 + 2 * ratio) / self.links.host_b_s + stays * 4 / self.links.host_b_s
        updated = ratio * own * moved_bytes(training) / (_HOST_MEMORY_B_S / self.links.per_node)
        if training.offload == "full":
            moved += own * 2 * 2 * training.micro_batches / self.links.host_b_s
        return stays * moved_bytes(training) / (self.machine.memory_gb_s * 1e9 * self.constants.memory), moved + updated

    def _band(self, training: Training, host_bound: bool, across: float) -> float:
        """What four of five rows lay within of a source that no fit had seen (test_step_time_published.py): more where
        nodes are joined, where the host decides, and most by the part of a step that a network's rate decides."""
        band = 0.12 if self.constants == DEFAULT else 0.08
        if training.gpus > self.links.per_node:
            band += 0.04
        if host_bound:
            band += 0.04
        return min(0.6, band + across)


_LAST: dict[str, StepModel] = {}


def predict_step(training: Training, machine: Machine, constants: Constants = DEFAULT) -> StepTime:
    """One training's step on one machine. What it worked out is kept for the same machine and constants."""
    model = _LAST.get("model")
    if model is None or model.machine is not machine or model.constants != constants:
        model = _LAST["model"] = StepModel(machine, constants)
    return model.predict(training)


def _slowest(training: Training, per_layer: float, head: float) -> tuple[int, int, bool]:
    """Layers of the first and of the slowest stage, and whether that is the last one, which has the head as well."""
    if training.stage_layers is not None:
        counts = training.stage_layers
        first, most, last = counts[0], max(counts), counts[-1]
    else:  # as even as can be, the first ones taking what is over
        last, over = divmod(training.shape.layers, training.pp)
        first = most = last + (over > 0)
    if last * per_layer + head >= most * per_layer:
        return first, last, True
    return first, most, False


def _stage_params(training: Training, layers: int) -> float:
    """Parameters of the first stage on one GPU; positions and norms are too few to matter for time."""
    shape = training.shape
    copies = 1 if shape.tied or training.pp > 1 else 2
    return layers * layer_params(shape, training.tp) + copies * shape.vocab * shape.hidden / training.tp
