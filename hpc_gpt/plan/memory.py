"""Peak memory of every pipeline stage, part by part, and whether it fits a card.

Two moments can be the peak. At work: states, the micro-batches in flight, one layer's backward pass or the logits,
buckets and gathered layers. In the step: states, the fp32 copies of gradients that the optimizer works on, and what its
update makes (update.py). The larger decides. PyTorch reserves more than it allocates: what is freed and allocated anew
in every step does not fit into the holes it left.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import overload

from hpc_gpt.plan.activations import (
    gradients_of_layer,
    in_flight,
    kept_of_layer,
    layer_bytes,
    logit_elements,
)
from hpc_gpt.plan.buffers import GIB, buckets, context_gib, embedding_masks, gathered, sent_between_stages
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.parameters import largest_matrix, layer_params, layers_of_stages, outer_params, vocab_rows
from hpc_gpt.plan.prediction import Memory, StageMemory
from hpc_gpt.plan.states import held
from hpc_gpt.plan.training import Training
from hpc_gpt.plan.update import update_bytes
from hpc_gpt.plan.zero_buffers import standing_bucket

# Of the bytes renewed in a step, the share for which PyTorch's allocator finds no hole: large blocks are segments of
# their own and are not joined. Between 0.8 and 1 on each of seed 001's logs and the BLOOM tables.
RENEWED_SLACK = 0.9
# Of activations and buffers, whose sizes repeat: blocks rounded up to 2 MiB and cut.
REPEATED_SLACK = 0.03
# What fragments even when PyTorch, at the card's end, gives back every block that is free.
LEAST_SLACK = 0.02


def predict_memory(training: Training, machine: Machine | None = None) -> Memory:
    """Every stage's parts, at its peak.

    At the end of a card PyTorch gives free blocks back before it gives up. So with a `machine` what is reserved stays
    within it as long as what is allocated does. A stage is worked out when it is asked for.
    """
    layers = layers_of_stages(training)
    return Memory(_Stages(training, layers, machine.memory_gib if machine else None), _extremes(layers))


@lru_cache(maxsize=4096)
def _extremes(layers: tuple[int, ...]) -> tuple[int, ...]:
    """First, last, and of those between with as many layers the first, which has most in flight."""
    first_of = {count: stage for stage, count in reversed([*enumerate(layers)][1:-1])}
    return tuple(sorted({0, len(layers) - 1, *first_of.values()}))


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether what nvidia-smi would show of the stage that decides is within the card; `memory` predicted for it."""
    return memory.stages[memory.deciding].nvidia_smi <= machine.memory_gib


def logit_bytes(training: Training) -> float:
    """Bytes of one logit at the peak.

    Megatron: 2 + 4 + 4, 16 bits, fp32, softmax (planner README, closed form 4). DeepSpeed's pipeline keeps the last
    micro-batch's loss with all it hangs on, 14 bytes, through the step (seed 001's log: 0.68 GiB of the last stage).
    PyTorch's cross-entropy in fp32: 2 + the log-softmax's 4 and two gradients of 4; compiled, one of those less.
    transformers' own stays in 16 bits: logits, their shifted copy, log-softmax and two gradients. A kernel of its own:
    logits and gradients, 2 + 2.
    """
    if training.fused_loss:
        return 4.0
    if training.dtype == "fp32":
        return 16.0
    if training.engine in ("megatron-lm", "hf-deepspeed"):
        return 10.0
    return 10.0 if training.compiled and training.engine in ("fsdp", "ddp") else 14.0


class _Stages(Sequence[StageMemory]):
    """The stages of one training. What they share is worked out once, in bytes."""

    def __init__(self, training: Training, layers: Sequence[int], card_gib: float | None) -> None:
        shape, tp = training.shape, training.tp
        self._training, self._layers, self._card_gib = training, layers, card_gib
        self._held = held(training)
        self._layer = layer = layer_bytes(training)
        whole = gathered(training)
        kept = kept_of_layer(training, layer)
        self._on_gpu, self._on_host = (0.0, kept) if training.activations_on_host else (kept, 0.0)
        matrix = largest_matrix(shape, tp)
        half = 4 if training.dtype == "fp32" else 2
        # One layer's backward pass: what is made anew, gradients of activations and of the largest matrix.
        self._layer_work = layer.kept - kept + gradients_of_layer(layer) + half * matrix + whole.layers
        self._loss_work = whole.loss
        # The optimizer's fp32 copy of one gradient, beside its predecessor's.
        self._step_work = 4 * matrix if self._held.step_gradients > self._held.gradients else 0.0
        self._logits = logit_elements(training, vocab_rows(shape, tp)) * logit_bytes(training)
        # DeepSpeed's pipeline holds on to them; of a loss in chunks there are none to hold on to.
        self._keeps_logits = training.engine == "deepspeed-3d" and training.loss_chunks == 1
        self._context = context_gib(training)
        self._matrix, self._table = matrix, vocab_rows(shape, tp) * shape.hidden
        self._standing = standing_bucket(training)

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
        layers = self._layers[stage]
        block = layer_params(training.shape, training.tp)
        params = layers * block + outer_params(training.shape, training.tp, training.pp, stage)
        flying = in_flight(training, stage)
        activations = flying * layers * self._on_gpu
        buffers = buckets(training, params) + sent_between_stages(training, self._layer, flying, stage)
        buffers += embedding_masks(training, self._layer, flying, stage)
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
        in_step += step_work + kept_logits + self._standing
        allocated = max(held_at_work + comes_and_goes, in_step)
        # Into the holes goes what comes and goes with each layer, not what is in flight.
        reserved = max(held_at_work + max(comes_and_goes, holes), in_step + holes)
        if in_step > held_at_work + comes_and_goes:
            gradients = states.step_gradients * params
            activations, buffers, work, work_logits = 0.0, self._standing, step_work, kept_logits
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
