"""Peak memory of every pipeline stage, part by part, and whether it fits a card.

Two moments can be the peak. At work: states, the micro-batches in flight, one layer's backward pass or the logits,
buckets and gathered layers. In the step: states, and the fp32 copies of gradients that the optimizer works on. The
larger decides. PyTorch reserves more than it allocates: what is freed and allocated anew in every step does not fit
into the holes it left.
"""

from __future__ import annotations

from collections.abc import Iterator

from hpc_gpt.plan.activations import (
    gradients_of_layer,
    in_flight,
    kept_of_layer,
    layer_bytes,
    logit_elements,
)
from hpc_gpt.plan.buffers import GIB, buckets, context_gib, gathered, sent_between_stages
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.parameters import largest_matrix, layer_params, layers_of_stages, outer_params, vocab_rows
from hpc_gpt.plan.prediction import Memory, StageMemory
from hpc_gpt.plan.states import held, rule_of
from hpc_gpt.plan.training import Training

# Of the bytes renewed in a step, the share for which PyTorch's allocator finds no hole: seed 001's Megatron and
# DeepSpeed logs reserve 4.5 to 5.5 of 6 and 2.3 to 3.3 of 6 bytes a parameter beyond what was ever allocated.
RENEWED_SLACK = 0.8
# Of activations and buffers, whose sizes repeat: blocks rounded up to 2 MiB and cut.
REPEATED_SLACK = 0.03


# What fragments even when PyTorch, at the card's end, gives back every block that is free.
LEAST_SLACK = 0.02


def predict_memory(training: Training, machine: Machine | None = None) -> Memory:
    """Every stage's parts, at its peak.

    At the end of a card PyTorch gives free blocks back before it gives up. So with a `machine` what is reserved stays
    within it as long as what is allocated does.
    """
    return Memory(tuple(_stages(training, machine.memory_gib if machine else None)))


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether what nvidia-smi would show of the stage that decides is within the card."""
    return memory.stages[memory.deciding].nvidia_smi <= machine.memory_gib


def logit_bytes(training: Training) -> float:
    """Bytes of one logit at the peak.

    Megatron: 2 + 4 + 4, 16 bits, fp32, softmax (planner README, closed form 4). DeepSpeed's pipeline keeps the last
    micro-batch's loss with all it hangs on, 14 bytes, through the step (seed 001's log: 0.68 GiB of the last stage).
    PyTorch's cross-entropy in fp32: 2 + the log-softmax's 4 and two gradients of 4; compiled, one of those less. A
    kernel of its own: logits and gradients in 16 bits, 2 + 2.
    """
    if training.fused_loss:
        return 4.0
    if training.engine == "megatron-lm" or (training.compiled and training.engine in ("fsdp", "ddp")):
        return 10.0
    return 14.0


def _stages(training: Training, card_gib: float | None) -> Iterator[StageMemory]:
    shape, tp, pp = training.shape, training.tp, training.pp
    states, rule, layer, whole = held(training), rule_of(training), layer_bytes(training), gathered(training)
    block = layer_params(shape, tp)
    kept = kept_of_layer(training, layer)
    on_gpu, on_host = (0.0, kept) if training.activations_on_host else (kept, 0.0)
    half = 4 if training.dtype == "fp32" else 2
    # One layer's backward pass: what is made anew, gradients of activations and of the largest matrix.
    layer_work = layer.kept - kept + gradients_of_layer(layer) + half * largest_matrix(shape, tp) + whole.layers
    context = context_gib(training)
    # The optimizer's fp32 copy of one gradient, beside its predecessor's.
    step_work = 4 * largest_matrix(shape, tp) if states.step_gradients > states.gradients else 0.0
    # DeepSpeed's pipeline holds on to them.
    keeps_logits = training.engine == "deepspeed-3d"
    for stage, layers in enumerate(layers_of_stages(training)):
        params = layers * block + outer_params(shape, tp, pp, stage)
        flying = in_flight(training, stage)
        activations = flying * layers * on_gpu
        logits = logit_elements(training, vocab_rows(shape, tp)) * logit_bytes(training) if stage == pp - 1 else 0.0
        buffers = buckets(training, rule, params) + sent_between_stages(training, layer, flying, stage)
        if keeps_logits or layer_work > logits + whole.loss:
            work, work_logits = layer_work, logits if keeps_logits else 0.0
        else:
            work, work_logits = whole.loss, logits
        at_work = states.gradients * params + activations + buffers + work + work_logits
        gradients, logits_then = states.gradients, work_logits
        if states.step_gradients * params + step_work + (logits if keeps_logits else 0.0) > at_work:
            gradients, activations, buffers, work = states.step_gradients, 0.0, 0.0, step_work
            logits_then = logits if keeps_logits else 0.0
        parts = (
            states.parameters * params / GIB,
            gradients * params / GIB,
            states.optimizer * params / GIB,
            activations / GIB,
            logits_then / GIB,
            (buffers + work) / GIB,
        )
        allocated, repeated = sum(parts), sum(parts[3:])
        reserved = allocated + RENEWED_SLACK * states.renewed * params / GIB + REPEATED_SLACK * repeated
        if card_gib is not None:
            reserved = min(reserved, max(card_gib - context, allocated * (1 + LEAST_SLACK)))
        host = (states.host * params + flying * layers * on_host) / GIB
        yield StageMemory(*parts, reserved=reserved, nvidia_smi=reserved + context, host=host)
