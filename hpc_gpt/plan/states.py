"""Bytes a parameter of each way to train: weights, gradients and optimizer states, in the passes and in the step.

`bytes_rule` of a Training names one of RULES; None means our engine's own (`rule_of`).

megatron-2021-fp16: 2 + 2 + 12, in the step 6 more: fp32 copies of the fp16 gradients, freed before the next step's
first gradient, and a flat copy for the all-reduce (Megatron-LM 2.4; planner README: 20 after a step, 22 peak).
megatron: 2 + 4 + 12, one fp32 gradient buffer; distributed optimizer 6 + 12/dp (Megatron-LM, docs of dist_optimizer).
deepspeed-fp16: ZeRO-0 2 + 2 + 12, in the step 4 more; ZeRO-1 4 + 12/dp, in the step 4/dp more; ZeRO-2 2 + 14/dp;
ZeRO-3 16/dp (Rajbhandari et al. 2020, section 5; DeepSpeed runtime/fp16/fused_optimizer.py and runtime/zero).
deepspeed-bf16: the same with gradients summed in fp32 (data_types.grad_accum_dtype), 4 each and no copy in the step.
bf16-optimizer: 2 + (2 + 4) + 12/dp (DeepSpeed runtime/bf16_optimizer.py).
bf16-optimizer-immediate: 2 + 4 + 12/dp: a 16-bit gradient is added to its fp32 sum at once (immediate_grad_update).
masters: 2 + 4 + 4 + 8, the moments over dp if sharded (train/engines/master_weights.py); with the compiled update and
one gradient a step 2 + 2 + 4 + 8, as it stays in 16 bits (flat_masters.py). DDP's 16-bit gradient buckets: 2 more.
fsdp: weights 4, gradients 4, moments 8, all over dp (PyTorch's FSDP with mixed precision).
fp32: 4 + 4 + 8, sharded by the ZeRO stage; ZeRO adds master weights, 4 more.

In our own configuration ZeRO-3 keeps the sums of its gradients from step to step (grad_partitions_flat_buffer). With
offload the host has master weights, moments and fp32 gradients, 16; under ZeRO-1 and -2 also a copy of the weights that
is sent back and the sums of a step, under ZeRO-3 in fp16 the sums twice (stage_1_and_2.py, stage3.py; for bf16 and fp32
train/engines/zero_step.py; measured like `memory.zero_buffers`).

The optimizer's update needs temporaries (`update_bytes`). torch 2.13's AdamW (torch/optim/adam.py): fused kernels keep
everything in registers. foreach computes the square roots of all second moments at once, 4 bytes each. for-loop does
so one tensor at a time, twice (root and quotient), while the tensor before still has its own. Under ZeRO a tensor is a
rank's flat share of all parameters with the same weight decay, so the loop has one tensor and needs twice as much as
foreach. Measured with torch's profiler on a CPU to within 1 % of a parameter's bytes: ddp in bf16 18 fused, 22 foreach;
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

    `gradients`: in the passes; `step_gradients`: in the optimizer step. `renewed`: freed and allocated again in every
    step, which leaves holes. `host`: offloaded to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    step_gradients: float
    renewed: float
    host: float = 0.0


def rule_of(training: Training) -> str:
    """The name of the training's rule. ConfigError for an unknown `bytes_rule`."""
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
    """Bytes a parameter that the training holds."""
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
        gathered = 2 if stage in (1, 2) else 0  # weights stay gathered in 16 bits, in addition to their fp32 shards
        states = Held(4 / dp + gathered, 4 / dp, 8 / dp, 4 / dp, 4 / dp)
        if training.offload == "full":
            return Held(0, 0, 0, 0, 0, states.parameters + states.gradients + states.optimizer)
        return states
    weight = 4 if training.dtype == "fp32" or rule == "fp32" else 2
    gradient = 4 if rule == "deepspeed-bf16" else weight
    master = 0 if rule == "fp32" and not stage else 4
    states = _zero(training, weight, gradient, master)
    return states if training.bytes_rule is not None else _as_ours(training, states, weight, gradient)


def _zero(training: Training, weight: int, gradient: int, master: int) -> Held:
    """ZeRO's stages, for so many bytes a parameter: optimizer over dp from stage 1 on, gradients from 2, weights in 3.

    The optimizer works on fp32 copies of its share of the gradients, which are allocated in the step and freed after
    it.
    """
    stage, dp = training.zero_stage, training.dp
    parameters = weight / dp if stage == 3 else float(weight)
    gradients = gradient / dp if stage >= 2 else float(gradient)
    optimizer = (master + 8) / (dp if stage >= 1 or training.sharded_optimizer else 1)
    copy = (4 / dp if stage >= 1 else 4.0) if gradient == 2 else 0.0
    host = 0.0
    if training.offload != "none" and stage >= 1:
        # The host has master weights, moments and fp32 gradients; under ZeRO-2 and -3 each gradient is sent at once.
        host, optimizer, copy = optimizer + 4 / dp, 0.0, 0.0
        gradients = 0.0 if stage >= 2 else gradients
        if training.offload == "full":
            host, parameters = host + parameters, 0.0
    return Held(parameters, gradients, optimizer, gradients + copy, gradients + copy, host)


def _as_ours(training: Training, states: Held, weight: int, gradient: int) -> Held:
    """The states with what DeepSpeed 0.19.8 holds in our configuration (module docstring).

    With an `offload_ratio` below 1, the ZeRO-3 groups that stay on the GPU have master weights, moments and the
    optimizer's fp32 gradients there (stage3.py, subgroup_to_device); the sums of all fp16 gradients are on the host.
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
    """Bytes of the update's temporaries, in addition to Held's; `params`: parameters of one GPU of the stage.

    `matrix`: parameters of a layer's largest matrix, of which two are updated in a row. `table`: parameters of the
    embedding, 0 if the stage has none. Returns 0 for another program's run, whose rule counts everything.
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
        # DDP's sharded optimizer distributes whole parameters over the ranks, FSDP a part of each.
        return 4 * max(3 * matrix, 2 * table) / (training.dp if training.engine == "fsdp" else 1)
    return 0.0


def _with_flat_gradients(training: Training, made: float) -> float:
    """Bytes a parameter of a rank's share: the `made` temporaries, and the gradients flattened for the update.

    ZeRO-3's update reads its sums (train/engines/zero_step.py). ZeRO-1 and -2 flatten fp32 and fp16 gradients and free
    the parameters' own before the update; in bf16 the sums are flat already.
    """
    if training.zero_stage == 3 or training.dtype == "bf16":
        return made
    width = 4 if training.dtype == "fp32" else 2
    return max(width, made + (0 if training.dtype == "fp32" else -2))


def moved_bytes(training: Training) -> float:
    """Bytes read and written a parameter in a step, counted by hand, with norm and clipping.

    fused: reads fp32 master weight, two moments and gradient, writes three of them and 2 for the 16-bit weight; then
    reads and writes the gradient for its norm and scale. foreach and for-loop, instead of fused's 28: weight decay 8,
    first moment 12, second 8 + 12, root, quotient and sum with epsilon 8 each, weight 16; further launches are not
    counted. compiled: one pass reads the gradient for the norm; the next reads master weight, moments and gradient and
    writes master weight, moments and 16-bit weight.
    """
    if training.optimizer_mode in ("foreach", "for-loop"):
        return 80 + 2 + 2 * 4
    if _is_compiled(training):
        gradient = 2 if sums_in_half(training) else 4
        return (4 + 8 + gradient) + (4 + 8 + 2) + gradient
    return 4 * 4 + 3 * 4 + 2 + 2 * 4


def sums_in_half(training: Training) -> bool:
    """Whether the compiled update gets its gradients in 16 bits, as a step has one of each (engines/ddp.py)."""
    return _is_compiled(training) and training.micro_batches == training.dp == 1


def _is_compiled(training: Training) -> bool:
    """Whether the update is compiled: only engine ddp's is, and only for 16-bit weights."""
    return training.optimizer_mode == "compiled" and training.engine == "ddp" and training.dtype != "fp32"
