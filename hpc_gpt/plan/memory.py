"""Peak memory of every pipeline stage, part by part, and whether it fits on a card.

The peak is at one of two moments. In the passes: states, activations of the micro-batches in flight, the backward pass
of one layer or the logits, buckets, and gathered layers. In the optimizer step: states, the fp32 copies of gradients,
and the temporaries of the update. PyTorch reserves more than it allocates: memory that is freed and allocated again in
every step leaves holes that the next allocation does not fit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import overload

from hpc_gpt.plan.layers import (
    LayerBytes,
    gradients_of_layer,
    in_flight,
    kept_of_layer,
    largest_matrix,
    layer_bytes,
    layer_params,
    layers_of_stages,
    outer_params,
    stage_params,
    vocab_rows,
)
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.states import held, rule_of, update_bytes
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.ds_config import LIVE_ELEMENTS, PREFETCH_ELEMENTS, longest_bucket

GIB = 2.0**30
# Share of the bytes renewed in a step for which PyTorch's allocator finds no hole: large blocks are segments of their
# own and are not joined. Between 0.8 and 1 on each of seed 001's logs and the BLOOM tables.
RENEWED_SLACK = 0.9
# The same of activations and buffers, whose sizes repeat: their blocks are rounded up to 2 MiB and split.
REPEATED_SLACK = 0.03
# The share that is left when the card is full and PyTorch gives back every free block.
LEAST_SLACK = 0.02
# CUDA's context with the kernels of torch, cuBLAS and NCCL on one GPU: 0.5 on V100 to 0.9 on H100 with CUDA graphs
# and workspaces. And the channel buffers of one NCCL communicator: 2 x 4 MiB x 16 to 24 channels and up.
CONTEXT_GIB = 0.75
COMMUNICATOR_GIB = 0.4
# reduce_bucket_size and allgather_bucket_size by DeepSpeed's default, which others run with.
OTHERS_BUCKET = 5e8
# Elements of a gradient whose norm DeepSpeed takes at once.
NORM_ELEMENTS = 2.5e8


@dataclass(frozen=True)
class StageMemory:
    """GiB on one GPU of a pipeline stage. `allocated` is the peak: the sum of all parts from parameters to buffers."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserved: float
    nvidia_smi: float
    host: float = 0.0  # offloaded by this GPU

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Memory:
    """The stages from first to last. `extremes`: the stages that can need the most; None means all."""

    stages: Sequence[StageMemory]
    extremes: Sequence[int] | None = None

    @cached_property
    def deciding(self) -> int:
        """The number of the stage that needs the most."""
        candidates = range(len(self.stages)) if self.extremes is None else self.extremes
        return max(candidates, key=lambda stage: (self.stages[stage].nvidia_smi, -stage))


def predict_memory(training: Training, machine: Machine | None = None) -> Memory:
    """The parts of every stage at its peak; a stage is computed when it is read.

    PyTorch gives free blocks back before it runs out of memory. So on a `machine`, reserved memory stays within the
    card as long as allocated memory does.
    """
    layers = layers_of_stages(training)
    return Memory(_Stages(training, layers, machine.memory_gib if machine else None), _extremes(layers))


@lru_cache(maxsize=4096)
def _extremes(layers: tuple[int, ...]) -> tuple[int, ...]:
    """The first and the last stage, and of the stages between with equally many layers the first: it has most in
    flight."""
    first_of = {count: stage for stage, count in reversed([*enumerate(layers)][1:-1])}
    return tuple(sorted({0, len(layers) - 1, *first_of.values()}))


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether the deciding stage fits on the machine's card, by what nvidia-smi would show of it."""
    return memory.stages[memory.deciding].nvidia_smi <= machine.memory_gib


class _Stages(Sequence[StageMemory]):
    """The stages of one training. What they share is computed once, in bytes."""

    def __init__(self, training: Training, layers: Sequence[int], card_gib: float | None) -> None:
        shape, tp = training.shape, training.tp
        self._training, self._layers, self._card_gib = training, layers, card_gib
        self._held = held(training)
        self._layer = layer = layer_bytes(training)
        gathered_in_layers, gathered_in_loss = gathered(training)
        kept = kept_of_layer(training, layer)
        self._on_gpu, self._on_host = (0.0, kept) if training.activations_on_host else (kept, 0.0)
        self._matrix, rows = largest_matrix(shape, tp), vocab_rows(shape, tp)
        half = 4 if training.dtype == "fp32" else 2
        # One layer's backward pass: recomputed activations, gradients of activations and of the largest matrix.
        self._layer_work = layer.kept - kept + gradients_of_layer(layer) + half * self._matrix + gathered_in_layers
        self._loss_work = gathered_in_loss
        if training.one_pass_loss:
            # The gradient of the head's weight, made in the forward pass; pieces are added in fp32.
            self._loss_work += (half if training.loss_chunks == 1 else 4) * rows * shape.hidden
        # The optimizer's fp32 copy of one gradient, while the copy before it is not freed yet.
        self._step_work = 4 * self._matrix if self._held.step_gradients > self._held.gradients else 0.0
        self._logits = shape.seq * training.micro_batch / training.loss_chunks * rows * logit_bytes(training)
        # DeepSpeed's pipeline keeps the logits until the step. A loss of hidden states has none to keep.
        self._keeps_logits = (
            training.engine == "deepspeed-3d" and training.loss_chunks == 1 and not training.one_pass_loss
        )
        self._context = context_gib(training)
        self._table = rows * shape.hidden
        self._lasting_bucket = lasting_bucket(training)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, stage: int) -> StageMemory: ...

    @overload
    def __getitem__(self, stage: slice) -> Sequence[StageMemory]: ...

    def __getitem__(self, stage: int | slice) -> StageMemory | Sequence[StageMemory]:
        if isinstance(stage, slice):
            return [self._stage(number) for number in range(len(self))[stage]]
        return self._stage(range(len(self))[stage])

    def _stage(self, stage: int) -> StageMemory:
        training, states, last = self._training, self._held, stage == len(self._layers) - 1
        layers, params = self._layers[stage], stage_params(training, stage)
        flying = in_flight(training, stage)
        activations = flying * layers * self._on_gpu
        buffers = buckets(training, params) + sent_between_stages(training, self._layer, flying, stage)
        if stage == 0 and self._layer.dropout:
            # Masks of the dropout after the embedding: sbh bytes a micro-batch (Korthikanti et al. 2022, section 4.3).
            buffers += flying * self._layer.stream / 2
        logits = self._logits if last else 0.0
        kept_logits = logits if self._keeps_logits else 0.0
        work, work_logits = self._layer_work, kept_logits
        if logits + self._loss_work > kept_logits + work:
            work, work_logits = self._loss_work, logits
        table = self._table if last or stage == 0 else 0.0
        step_work = self._step_work + update_bytes(training, params, self._matrix, table)
        gradients = states.gradients * params
        holes = RENEWED_SLACK * states.renewed * params
        held_at_work = (states.parameters + states.optimizer) * params + gradients + activations + buffers + kept_logits
        comes_and_goes = work + work_logits - kept_logits
        in_step = (states.parameters + states.optimizer + states.step_gradients) * params
        in_step += step_work + kept_logits + self._lasting_bucket
        allocated = max(held_at_work + comes_and_goes, in_step)
        # The temporaries of a layer fit into the holes; activations in flight do not.
        reserved = max(held_at_work + max(comes_and_goes, holes), in_step + holes)
        if in_step > held_at_work + comes_and_goes:
            gradients = states.step_gradients * params
            activations, buffers, work, work_logits = 0.0, self._lasting_bucket, step_work, kept_logits
        reserved += REPEATED_SLACK * (activations + work_logits + buffers + work)
        reserved /= GIB
        if self._card_gib is not None:
            reserved = min(reserved, max(self._card_gib - self._context, allocated / GIB * (1 + LEAST_SLACK)))
        return StageMemory(
            parameters=states.parameters * params / GIB,
            gradients=gradients / GIB,
            optimizer=states.optimizer * params / GIB,
            activations=activations / GIB,
            logits=work_logits / GIB,
            buffers=(buffers + work) / GIB,
            reserved=reserved,
            nvidia_smi=reserved + self._context,
            host=(states.host * params + flying * layers * self._on_host) / GIB,
        )


def logit_bytes(training: Training) -> float:
    """Bytes of one logit at the peak.

    Megatron: 2 + 4 + 4 for 16 bits, fp32, softmax (planner README, closed form 4). DeepSpeed's pipeline keeps the loss
    of the last micro-batch and its graph, 14 bytes, through the step (seed 001's log: 0.68 GiB of the last stage).
    PyTorch's cross-entropy in fp32: 2 + 4 for the log-softmax and two gradients of 4; one gradient less in a compiled
    model of somebody else. transformers' loss stays in 16 bits: logits, their shifted copy, log-softmax and two
    gradients. A fused kernel, and our own loss if it is compiled, hold the logits and their gradient alone: 2 + 2, in
    fp32 4 + 4 (tests/model/test_techniques.py counts what is kept). In one pass the gradient overwrites the logits.
    """
    if training.one_pass_loss:
        return 4.0 if training.dtype == "fp32" else 2.0
    if training.fused_loss:
        return 4.0
    others = training.engine in ("megatron-lm", "hf-deepspeed")
    if training.compiled_loss and not others:
        return 8.0 if training.dtype == "fp32" else 4.0
    if training.dtype == "fp32":
        return 16.0
    return 10.0 if others or training.compiled else 14.0


def sent_between_stages(training: Training, layer: LayerBytes, flying: float, stage: int) -> float:
    """Bytes of the outputs that a stage keeps until their gradients arrive, in addition to the inputs of its layers:
    one stream a micro-batch.

    DeepSpeed splits them over the tensor-parallel group (pipe/engine.py, PartitionedTensor).
    """
    if stage == training.pp - 1:
        return 0.0
    return flying * layer.stream / (training.tp if training.engine == "deepspeed-3d" else 1)


def context_gib(training: Training) -> float:
    """GiB that nvidia-smi shows in addition to PyTorch's reserved memory: CUDA's context, and NCCL's buffers for the
    world and for every axis that is split."""
    split = sum(size > 1 for size in (training.tp, training.pp, training.dp))
    return CONTEXT_GIB + COMMUNICATOR_GIB * (split + 1 if split > 1 else split)


def gathered(training: Training) -> tuple[float, float]:
    """(bytes in the layers' passes, bytes in the loss) of unsharded weights and gradients under ZeRO-3 and FSDP.

    In the passes: the layers that are gathered, and the gradients of one; in the loss: embeddings and head with theirs.
    ZeRO-3 keeps stage3_max_live_parameters gathered (1e9 by DeepSpeed's default as well); a single rank of ours owns
    all weights and gathers only those on the host. FSDP gathers the current layer and the next one, keeps the root's
    own weights (embeddings, head) through the backward pass, and reduces in fp32.
    """
    zero3 = training.zero_stage == 3 and training.is_deepspeed
    owns_all = zero3 and training.dp == 1 and training.bytes_rule is None and training.offload != "full"
    if owns_all or not (zero3 or training.engine == "fsdp"):
        return 0.0, 0.0
    width = 4 if training.dtype == "fp32" else 2
    layer = layer_params(training.shape, training.tp)
    outer = sum(outer_params(training.shape, training.tp, training.pp, stage) for stage in {0, training.pp - 1})
    if zero3:
        live = max(layer, min(LIVE_ELEMENTS, training.shape.layers * layer + outer))
        return width * (live + layer), width * (max(live, layer + outer) + outer)
    return width * (2 * layer + outer) + (width + 4) * layer, width * (layer + outer) + (width + 4) * outer


def buckets(training: Training, params: float) -> float:
    """Bytes of the buckets through which gradients are reduced; `params`: parameters of one GPU of the stage.

    Others run with DeepSpeed's default sizes, or with fewer elements if there are no more parameters; with h^2 under
    ZeRO-3 (Hugging Face's "auto" and DeepSpeed's own examples).
    """
    if not training.is_deepspeed:
        return 0.0
    if training.bytes_rule is None:
        return zero_buffers(training, params)
    if training.zero_stage == 0:
        return 0.0
    width = 2 if training.dtype != "fp32" else 4
    if training.zero_stage == 3:
        return width * (2 * min(float(training.shape.hidden) ** 2, params) + min(PREFETCH_ELEMENTS, params))
    if rule_of(training).startswith("bf16-optimizer"):
        width = 4
    # ZeRO-2 fills one while the other is being reduced.
    return width * min(OTHERS_BUCKET, params) * (2 if training.zero_stage == 2 else 1)


def bucket_elements(training: Training) -> int:
    """Elements of a bucket in our configuration."""
    return longest_bucket(training.dp, training.shape.params)


def zero_buffers(training: Training, params: float) -> float:
    """Bytes of buckets, of the copies that are sent, and of what else a reduction needs, in our configuration
    (settings/ds_config.py); `params`: parameters of one GPU of the stage. A gradient longer than a bucket is reduced
    by itself.

    Read from DeepSpeed 0.19.8, which allocates a whole bucket of the configured length. Checked with torch's profiler
    on a CPU: all allocations of a step, 19M parameters, at one and two ranks, in bf16 and fp32
    (tests/plan/test_held_bytes.py does it at one rank). fp16 is only read: DeepSpeed does not train in it on a CPU.
    """
    stage, ranks = training.zero_stage, training.dp
    width = 4 if training.dtype == "fp32" else 2
    sent = 2 if training.dtype == "fp16" else 4  # data_types.grad_accum_dtype, communication_data_type
    bucket = bucket_elements(training)
    filled, norm = min(bucket, params), 0.0
    if ranks == 1:
        # The embedding's gradient is longer than these smaller buckets, and offloading takes its norm in fp64.
        table = training.shape.padded_vocab / training.tp * training.shape.hidden
        filled = min(max(bucket, table), params)
        norm = 8 * min(table, NORM_ELEMENTS) if training.offload != "none" else 0.0
    if rule_of(training) == "bf16-optimizer-immediate":
        # runtime/engine.py, allreduce_no_retain: the fp32 gradients are one tensor and are flattened in one piece.
        return 4 * params if ranks > 1 else 0.0
    if stage == 0:
        return width * filled if ranks > 1 else 0.0
    if stage == 1:
        # The pipeline engine allocates one for its reduction in addition to the optimizer's (reduce_gradients).
        return sent * bucket * (2 if training.engine == "deepspeed-3d" else 1)
    if stage == 2:
        # From two ranks on there are two: one is filled while the other is sent (overlap_comm).
        count = 2 if ranks > 1 and training.offload == "none" else 1
        # The flattened gradients, and their fp32 copy that is sent.
        copies = width + sent if width != sent else width if ranks > 1 else 0
        # If the sums are no wider, the gradients of a further micro-batch are kept apart from them until its end.
        further = ranks == 1 and width == sent and training.micro_batches > 1 and training.offload == "none"
        return width * bucket * count + copies * filled + (width * params if further else 0.0) + norm
    # reduce_scatter_coalesced: the bucket's gradients concatenated, and this rank's share of them.
    prefetched = width * min(PREFETCH_ELEMENTS, params) if ranks > 1 else 0.0
    return sent * bucket + sent * filled * (1 + 1 / ranks) + prefetched + norm


def lasting_bucket(training: Training) -> float:
    """Bytes of the bucket that ZeRO-3 keeps from step to step; 0 for other stages and other programs."""
    if training.bytes_rule is not None or training.zero_stage != 3:
        return 0.0
    return bucket_elements(training) * (2 if training.dtype == "fp16" else 4)
