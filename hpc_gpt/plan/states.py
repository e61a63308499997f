"""Bytes a parameter that each way of training holds: weights, gradients, optimizer; at work, in the step, between.

`bytes_rule` of a Training names one of RULES; None means the engine's own way here (`rule_of`).

megatron-2021-fp16: 2 + 2 + 12, in the step 6 more: fp32 copies of the fp16 gradients, freed before the next one's first
gradient, and a flat copy for the all-reduce (Megatron-LM 2.4; planner README: 20 after a step, 22 peak).
megatron: 2 + 4 + 12, one fp32 gradient buffer; distributed optimizer 6 + 12/dp (Megatron-LM, docs of dist_optimizer).
deepspeed-fp16: ZeRO-0 2 + 2 + 12, in the step 4 more; ZeRO-1 4 + 12/dp, in the step 4/dp more; ZeRO-2 2 + 14/dp;
ZeRO-3 16/dp (Rajbhandari et al. 2020, section 5; DeepSpeed runtime/fp16/fused_optimizer.py and runtime/zero).
deepspeed-bf16: the same with gradients summed in fp32 (data_types.grad_accum_dtype), 4 each and no copy in the step.
bf16-optimizer: 2 + (2 + 4) + 12/dp (DeepSpeed runtime/bf16_optimizer.py).
bf16-optimizer-immediate: 2 + 4 + 12/dp, a 16-bit gradient being added to its fp32 sum at once (immediate_grad_update).
masters: 2 + 4 + 4 + 8, the moments over dp if sharded (train/engines/master_weights.py); with the compiled update and
one gradient a step 2 + 2 + 4 + 8, as it stays in 16 bits (flat_masters.py). DDP's buckets of half gradients 2 more.
fsdp: weights 4, gradients 4, moments 8, all over dp (PyTorch's FSDP with mixed precision).
fp32: 4 + 4 + 8, sharded by the ZeRO stage; ZeRO has masters of its own, 4 more.

Under our own configuration ZeRO-3 keeps its gradients' sums from step to step (grad_partitions_flat_buffer). The host
has of what is offloaded master, moments and fp32 gradients, 16; with ZeRO-1 and -2 a copy of the weights on its way
back and the sums of a step, with ZeRO-3 in fp16 the sums a second time (stage_1_and_2.py, stage3.py; of bf16 and fp32
train/engines/zero_sums.py; zero_buffers.py tells how it was measured). What the update needs for a moment is
update.py's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.training import Offload, Training
from hpc_gpt.plan.update import sums_in_half

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

    `gradients` and `step_gradients`: while micro-batches run, and while the optimizer works. `steady_gradients`: what
    is left between steps. `renewed`: of all this what is freed and allocated anew in every step, which leaves holes.
    `host`: what offloading moved to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    step_gradients: float
    steady_gradients: float
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
    # As ds_config.shards_in_bf16_optimizer has it.
    in_bf16_optimizer = engine == "deepspeed-3d" or (training.zero_stage <= 1 and training.offload == "none")
    return "bf16-optimizer-immediate" if in_bf16_optimizer else "deepspeed-bf16"


def held(training: Training) -> Held:
    """Bytes a parameter of the training."""
    return _held(
        rule_of(training),
        training.zero_stage,
        training.dp * training.cp,
        training.dtype == "fp32",
        training.distributed_optimizer,
        training.offload,
        training.offload_ratio,
        training.bytes_rule is None,
        sums_in_half(training),
        training.micro_batches > 1,
    )


@lru_cache(maxsize=4096)
def _held(
    rule: str,
    stage: int,
    dp: int,
    fp32: bool,
    sharded: bool,
    offload: Offload,
    ratio: float,
    ours: bool,
    in_half: bool,
    several: bool,
) -> Held:
    if rule == "megatron-2021-fp16":
        return Held(2, 2, 12, 8, 6, 6)
    if rule == "megatron":
        return Held(2, 4, 12 / dp if sharded else 12, 4, 4, 0)
    if rule in ("bf16-optimizer", "bf16-optimizer-immediate"):
        half = 2 if rule == "bf16-optimizer" else 0
        return Held(2, 4 + half, 12 / dp, 4 + half, 4, half)
    if rule == "masters":
        if in_half:
            return Held(2, 2, 12, 2, 0, 2)
        bucket = 2 if dp > 1 else 0
        return Held(2, 4 + bucket, 4 + (8 / dp if sharded else 8), 4 + bucket, bucket, 4)
    if rule == "fsdp":
        whole = stage in (1, 2)  # weights stay gathered, in 16 bits beside their fp32 shards
        states = Held(4 / dp + (2 if whole else 0), 4 / dp, 8 / dp, 4 / dp, 0, 4 / dp)
        return _all_on_host(states) if offload == "full" else states
    if rule == "fp32":
        states = _zero(stage, dp, offload, weight=4, gradient=4, master=4 if stage else 0, sharded=sharded)
        return _as_ours(states, stage, dp, offload, ratio, weight=4, gradient=4, several=several) if ours else states
    weight = 4 if fp32 else 2
    gradient = 4 if rule == "deepspeed-bf16" else weight
    states = _zero(stage, dp, offload, weight=weight, gradient=gradient, master=4, sharded=sharded)
    if not ours:
        return states
    return _as_ours(states, stage, dp, offload, ratio, weight=weight, gradient=gradient, several=several)


def _zero(stage: int, dp: int, offload: Offload, *, weight: int, gradient: int, master: int, sharded: bool) -> Held:
    """ZeRO's stages: the optimizer over dp from 1 on, gradients from 2, weights in 3.

    The optimizer works on fp32 copies of its share of the gradients, made in the step and freed after it.
    """
    parameters = weight / dp if stage == 3 else float(weight)
    gradients = gradient / dp if stage >= 2 else float(gradient)
    optimizer = (master + 8) / (dp if stage >= 1 or sharded else 1)
    copy = (4 / dp if stage >= 1 else 4.0) if gradient == 2 else 0.0
    host = 0.0
    if offload != "none" and stage >= 1:
        # The host has master, moments and the fp32 gradients; with ZeRO-2 and -3 a gradient leaves as it comes.
        host, optimizer, copy = optimizer + 4 / dp, 0.0, 0.0
        gradients = 0.0 if stage >= 2 else gradients
        if offload == "full":
            host, parameters = host + parameters, 0.0
    return Held(parameters, gradients, optimizer, gradients + copy, 0, gradients + copy, host)


def _as_ours(
    states: Held, stage: int, dp: int, offload: Offload, ratio: float, *, weight: int, gradient: int, several: bool
) -> Held:
    """What DeepSpeed 0.19.8 holds otherwise: see above. `several`: micro-batches.

    With a `ratio` below 1 the groups of ZeRO-3 that stay on the GPU have masters, moments and the optimizer's fp32
    gradients there (stage3.py, subgroup_to_device); the sums of all fp16 gradients are the host's.
    """
    if offload != "none" and stage in (1, 2):
        sums = gradient if several or gradient != weight else 0
        return replace(states, host=states.host + (weight + sums) / dp)
    if offload != "none" and stage == 3:
        stays = (1 - ratio) * 16 / dp
        sums = gradient if gradient == 2 else 0
        return replace(states, host=states.host + sums / dp - stays, optimizer=states.optimizer + stays)
    if stage == 3:
        return replace(states, steady_gradients=states.gradients, renewed=states.renewed - states.gradients)
    return states


def _all_on_host(states: Held) -> Held:
    return Held(0, 0, 0, 0, 0, 0, states.parameters + states.gradients + states.optimizer)
