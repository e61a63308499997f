"""Bytes a parameter that each way of training holds: weights, gradients, optimizer; at work, in the step, between.

`bytes_rule` of a Training names one of RULES; None means the engine's own way here (`rule_of`).

megatron-2021-fp16: 2 + 2 + 12, in the step 6 more: fp32 copies of the fp16 gradients, freed before the next step's
first gradient, and a flat copy for the all-reduce (Megatron-LM 2.4; planner README: 20 after a step, 22 peak).
megatron: 2 + 4 + 12, one fp32 gradient buffer; distributed optimizer 6 + 12/dp (Megatron-LM, docs of dist_optimizer).
deepspeed-fp16: ZeRO-0 2 + 2 + 12, in the step 4 more; ZeRO-1 4 + 12/dp, in the step 4/dp more; ZeRO-2 2 + 14/dp;
ZeRO-3 16/dp (Rajbhandari et al. 2020, section 5; DeepSpeed runtime/fp16/fused_optimizer.py and runtime/zero).
deepspeed-bf16: the same with gradients summed in fp32 (data_types.grad_accum_dtype), 4 each and no copy in the step.
bf16-optimizer: 2 + (2 + 4) + 12/dp (DeepSpeed runtime/bf16_optimizer.py).
bf16-optimizer-immediate: 2 + 4 + 12/dp, a 16-bit gradient being added to its fp32 sum at once (immediate_grad_update).
masters: 2 + 4 + 4 + 8, the moments over dp if sharded (train/engines/master_weights.py); with the compiled update and
one gradient a step 2 + 2 + 4 + 8, as it stays in 16 bits (flat_masters.py). DDP's buckets of half gradients 2 more.
fsdp: weights 4, gradients 4, moments 8, all over dp (PyTorch's FSDP with mixed precision).
fp32: 4 + 4 + 8, sharded by the ZeRO stage; ZeRO has master weights of its own, 4 more.

Under our own configuration ZeRO-3 keeps its gradients' sums from step to step (grad_partitions_flat_buffer). Of what
is offloaded the host has master weights, moments and fp32 gradients, 16; with ZeRO-1 and -2 also a copy of the weights
on its way back and the sums of a step, with ZeRO-3 in fp16 the sums a second time (stage_1_and_2.py, stage3.py; of bf16
and fp32 train/engines/zero_step.py; measured as `memory.zero_buffers` was).

The optimizer's update needs more for a moment (`update_bytes`). torch 2.13's AdamW (torch/optim/adam.py): fused kernels
keep everything in registers. foreach makes the square roots of all second moments at once, 4 bytes each. for-loop does
so a tensor at a time, twice (root and quotient), while the tensor before still has its own. Under ZeRO a tensor is a
rank's flat share of all parameters that decay alike, so that the loop has one tensor, and needs twice what foreach
does. Measured with torch's profiler on a CPU to within 1 % of a parameter's bytes: ddp in bf16 18 fused, 22 foreach;
ZeRO-1 in bf16 18, 22, and 26 for-loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.training import Training
from hpc_gpt.settings.ds_config import SUB_GROUP_ELEMENTS, stage_that_runs, takes_bf16_optimizer

RULES = (
    "megatron-2021-fp16",
    "megatron",
    "deepspeed-fp16",
    "deepspeed-bf16",
    "bf16-optimizer",
    "bf16-optimizer-immediate",
    "masters",
    "fsdp",
    "fp32",
)


@dataclass(frozen=True)
class Held:
    """Bytes a parameter on one GPU.

    `gradients` and `step_gradients`: while micro-batches run, and while the optimizer works. `renewed`: what is freed
    and allocated anew in every step, which leaves holes. `host`: what offloading moved to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    step_gradients: float
    renewed: float
    host: float = 0.0


def rule_of(training: Training) -> str:
    """The rule a training goes by; ConfigError for a name that is none."""
    if training.bytes_rule is not None:
        if training.bytes_rule not in RULES:
            raise ConfigError(f"no bytes rule {training.bytes_rule!r}", f"use one of {', '.join(RULES)}")
        return training.bytes_rule
    engine, dtype = training.engine, training.dtype
    if engine == "fsdp":
        return "fsdp"
    if dtype == "fp32":
        return "fp32"
    if engine == "ddp":
        return "masters"
    if engine == "megatron-lm":
        return "megatron"
    if dtype == "fp16":
        return "deepspeed-fp16"
    stage = stage_that_runs(engine, training.zero_stage, dtype)
    if takes_bf16_optimizer(dtype, stage, training.offload):
        return "bf16-optimizer-immediate"
    return "deepspeed-bf16"


def held(training: Training) -> Held:
    """Bytes a parameter of the training."""
    rule, stage, dp, sharded = rule_of(training), training.zero_stage, training.dp, training.sharded_optimizer
    if rule == "megatron-2021-fp16":
        return Held(2, 2, 12, 8, 6)
    if rule == "megatron":
        return Held(2, 4, 12 / dp if sharded else 12, 4, 0)
    if rule in ("bf16-optimizer", "bf16-optimizer-immediate"):
        half = 2 if rule == "bf16-optimizer" else 0
        return Held(2, 4 + half, 12 / dp, 4 + half, half)
    if rule == "masters":
        if sums_in_half(training):
            return Held(2, 2, 12, 2, 2)
        bucket = 2 if dp > 1 else 0
        return Held(2, 4 + bucket, 4 + (8 / dp if sharded else 8), 4 + bucket, 4)
    if rule == "fsdp":
        whole = stage in (1, 2)  # weights stay gathered, in 16 bits beside their fp32 shards
        states = Held(4 / dp + (2 if whole else 0), 4 / dp, 8 / dp, 4 / dp, 4 / dp)
        if training.offload == "full":
            return Held(0, 0, 0, 0, 0, states.parameters + states.gradients + states.optimizer)
        return states
    weight = 4 if training.dtype == "fp32" or rule == "fp32" else 2
    gradient = 4 if rule == "deepspeed-bf16" else weight
    master = 0 if rule == "fp32" and not stage else 4
    states = _zero(training, weight, gradient, master)
    return states if training.bytes_rule is not None else _as_ours(training, states, weight, gradient)


def _zero(training: Training, weight: int, gradient: int, master: int) -> Held:
    """ZeRO's stages: the optimizer over dp from 1 on, gradients from 2, weights in 3. Of bytes a parameter each.

    The optimizer works on fp32 copies of its share of the gradients, made in the step and freed after it.
    """
    stage, dp = training.zero_stage, training.dp
    parameters = weight / dp if stage == 3 else float(weight)
    gradients = gradient / dp if stage >= 2 else float(gradient)
    optimizer = (master + 8) / (dp if stage >= 1 or training.sharded_optimizer else 1)
    copy = (4 / dp if stage >= 1 else 4.0) if gradient == 2 else 0.0
    host = 0.0
    if training.offload != "none" and stage >= 1:
        # The host has master weights, moments and the fp32 gradients; with ZeRO-2 and -3 a gradient leaves as it comes.
        host, optimizer, copy = optimizer + 4 / dp, 0.0, 0.0
        gradients = 0.0 if stage >= 2 else gradients
        if training.offload == "full":
            host, parameters = host + parameters, 0.0
    return Held(parameters, gradients, optimizer, gradients + copy, gradients + copy, host)


def _as_ours(training: Training, states: Held, weight: int, gradient: int) -> Held:
    """What DeepSpeed 0.19.8 holds otherwise: see above.

    With an `offload_ratio` below 1 the groups of ZeRO-3 that stay on the GPU have master weights, moments and the
    optimizer's fp32 gradients there (stage3.py, subgroup_to_device); the sums of all fp16 gradients are the host's.
    """
    stage, dp = training.zero_stage, training.dp
    if training.offload != "none" and stage in (1, 2):
        sums = gradient if training.micro_batches > 1 or gradient != weight else 0
        return replace(states, host=states.host + (weight + sums) / dp)
    if training.offload != "none" and stage == 3:
        stays = (1 - training.offload_ratio) * 16 / dp
        sums = gradient if gradient == 2 else 0
        return replace(states, host=states.host + sums / dp - stays, optimizer=states.optimizer + stays)
    if stage == 3:
        return replace(states, renewed=states.renewed - states.gradients)
    return states


def update_bytes(training: Training, params: float, matrix: float, table: float) -> float:
    """Bytes made in the step and freed in it, beside Held's; `params` of one GPU of the stage.

    `matrix`: parameters of a layer's largest one, of which two follow upon each other. `table`: of the embedding, 0
    if the stage has none. 0 of somebody else's run, whose rule counts everything.
    """
    if training.bytes_rule is not None or training.offload != "none":
        return 0.0
    mode, stage = training.optimizer_mode, training.zero_stage
    if training.is_deepspeed and stage >= 1:
        own = params / training.dp
        if stage == 3:
            own = min(SUB_GROUP_ELEMENTS, own)
        return own * _with_flat_gradients(training, {"foreach": 4.0, "for-loop": 8.0}.get(mode, 0.0))
    shared = training.dp if training.engine == "fsdp" or training.sharded_optimizer else 1
    if mode == "foreach":
        return 4 * params / shared
    if mode == "for-loop":
        # Whole parameters are dealt out over ddp's ranks, parts of each over FSDP's.
        return 4 * max(3 * matrix, 2 * table) / (training.dp if training.engine == "fsdp" else 1)
    return 0.0


def _with_flat_gradients(training: Training, made: float) -> float:
    """Bytes a parameter of a rank's share: what the update makes, and the gradients laid end to end for it.

    ZeRO-3's sums are what its update reads (train/engines/zero_step.py). ZeRO-1 and -2 flatten fp32 and fp16 gradients,
    and free the parameters' own before the update; bf16's sums are flat already.
    """
    if training.zero_stage == 3 or training.dtype == "bf16":
        return made
    width = 4 if training.dtype == "fp32" else 2
    return max(width, made + (0 if training.dtype == "fp32" else -2))


def moved_bytes(training: Training) -> float:
    """Bytes read and written for a parameter in a step, by counting, with the norm and the clipping.

    fused: fp32 master weight, two moments and the gradient read, three of them written, 2 of the half weight; and once
    more over the gradient for its norm and its scale. foreach and for-loop: weight decay 8, the first moment 12, the
    second 8 + 12, root, quotient and sum with epsilon 8 each, the weight 16, in place of fused's 28. What more launches
    cost is not counted. compiled: one pass reads master weight, moments and gradient and writes master weight, moments
    and half weight, after one that reads the gradient for the norm.
    """
    if training.optimizer_mode in ("foreach", "for-loop"):
        return 80 + 2 + 2 * 4
    if _is_compiled(training):
        gradient = 2 if sums_in_half(training) else 4
        return (4 + 8 + gradient) + (4 + 8 + 2) + gradient
    return 4 * 4 + 3 * 4 + 2 + 2 * 4


def sums_in_half(training: Training) -> bool:
    """Whether the compiled update finds its gradients in 16 bits: a step has one of each (engines/ddp.py)."""
    return _is_compiled(training) and training.micro_batches == training.dp == 1


def _is_compiled(training: Training) -> bool:
    """Only engine ddp has it, and only for half weights."""
    return training.optimizer_mode == "compiled" and training.engine == "ddp" and training.dtype != "fp32"
