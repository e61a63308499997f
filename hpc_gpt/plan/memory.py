"""Peak memory of every pipeline stage, part by part, and whether it fits a card.

Two moments can be the peak. At work: states, the micro-batches in flight, one layer's backward pass or the logits,
buckets and gathered layers. In the step: states, and the fp32 copies of gradients that the optimizer works on. The
larger decides. PyTorch reserves more than it allocates: what is freed and allocated anew in every step does not fit
into the holes it left.
"""

from __future__ import annotations

from hpc_gpt.plan.activations import (
    gradients_of_layer,
    in_flight,
    kept_of_layer,
    layer_bytes,
    logit_elements,
    remade_of_layer,
)
from hpc_gpt.plan.buffers import GIB, context_gib, sent_between_stages, work_buffers
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.parameters import largest_matrix, layer_params, layers_of_stages, outer_params, vocab_rows
from hpc_gpt.plan.prediction import Memory, StageMemory
from hpc_gpt.plan.states import held, rule_of
from hpc_gpt.plan.training import Training

# Of the bytes renewed in a step, the share for which PyTorch's allocator finds no hole: seed 001's Megatron and
# DeepSpeed logs reserve 4.5 to 5.5 of 6 and 2.3 to 3.3 of 6 bytes a parameter beyond what was ever allocated.
RENEWED_SLACK = 0.75
# Of activations and buffers, whose sizes repeat: blocks rounded up to 2 MiB and cut.
REPEATED_SLACK = 0.03


def predict_memory(training: Training, machine: Machine | None = None) -> Memory:
    """Every stage's parts, at its peak. `machine` changes nothing yet: a card's size decides `fits` alone."""
    return Memory(tuple(_stages(training, range(training.pp))))


def fits(memory: Memory, machine: Machine) -> bool:
    """Whether what nvidia-smi would show of the stage that decides is within the card."""
    return memory.stages[memory.deciding].nvidia_smi <= machine.memory_gib


def logit_bytes(training: Training) -> float:
    """Bytes of one logit at the peak.

    Megatron: 2 + 4 + 4, 16 bits, fp32, softmax (planner README, closed form 4). DeepSpeed's pipeline keeps the last
    micro-batch's loss with all it hangs on, 14 bytes, through the step (seed 001's log: 0.68 GiB of the last stage).
    PyTorch's cross-entropy in fp32: 2 + the log-softmax and two gradients of 4. A fused one: logits and gradients, 2 + 2.
    """
    if training.fused_loss:
        return 4.0
    return 10.0 if training.engine == "megatron-lm" else 14.0


def _stages(training: Training, wanted: range) -> list[StageMemory]:
    shape, tp, pp = training.shape, training.tp, training.pp
    states, rule, layer = held(training), rule_of(training), layer_bytes(training)
    block = layer_params(shape, tp)
    kept = 0.0 if training.activations_on_host else kept_of_layer(training, layer)
    half = 4 if training.dtype == "fp32" else 2
    work = remade_of_layer(training, layer) + gradients_of_layer(layer) + half * largest_matrix(shape, tp)
    context = context_gib(training)
    on_host = kept_of_layer(training, layer) if training.activations_on_host else 0.0
    stages = []
    for stage, layers in zip(wanted, layers_of_stages(training), strict=True):
        params = layers * block + outer_params(shape, tp, pp, stage)
        flying = in_flight(training, stage)
        activations = flying * layers * kept
        logits = logit_elements(training, vocab_rows(shape, tp)) * logit_bytes(training) if stage == pp - 1 else 0.0
        buffers = work_buffers(training, rule, params, stage) + sent_between_stages(training, layer, flying, stage)
        stays = training.engine == "deepspeed-3d"  # the logits do, see logit_bytes
        workspace = work if stays else max(0.0, work - logits)
        at_work = states.gradients * params + activations + logits + buffers + workspace
        in_step = states.step_gradients * params + (logits if stays else 0.0)
        gradients = states.gradients
        if in_step > at_work:
            gradients, activations, buffers, workspace = states.step_gradients, 0.0, 0.0, 0.0
            logits = logits if stays else 0.0
        parts = (
            states.parameters * params / GIB,
            gradients * params / GIB,
            states.optimizer * params / GIB,
            activations / GIB,
            logits / GIB,
            (buffers + workspace) / GIB,
        )
        reserved = sum(parts) + RENEWED_SLACK * states.renewed * params / GIB + REPEATED_SLACK * sum(parts[3:])
        host = (states.host * params + flying * layers * on_host) / GIB
        stages.append(StageMemory(*parts, reserved=reserved, nvidia_smi=reserved + context, host=host))
    return stages
