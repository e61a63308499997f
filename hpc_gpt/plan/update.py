"""What an optimizer's update needs for a moment beside the states, and the bytes that it moves, by the way it computes.

torch 2.13's AdamW (torch/optim/adam.py): fused kernels keep everything in registers. foreach makes the square roots of
all second moments at once, 4 bytes each. for-loop does so a tensor at a time, twice (root and quotient), while the
tensor before still has its own. Under ZeRO a tensor is a rank's flat share of all parameters that decay alike, so that
the loop has one tensor, and needs twice what foreach does. Measured with torch's profiler on a CPU to within 1 % of a
parameter's bytes: ddp in bf16 18 fused, 22 foreach; ZeRO-1 in bf16 18, 22, and 26 for-loop.
"""

from __future__ import annotations

from hpc_gpt.plan.training import Training

# Elements of ZeRO-3's pieces of a rank's share, each updated for itself (sub_group_size of settings/ds_config.py).
SUB_GROUP = 1e9


def update_bytes(training: Training, params: float, matrix: float, table: float) -> float:
    """Bytes made in the step and freed in it, beside Held's; `params` of one GPU of the stage.

    `matrix`: parameters of a layer's largest one, of which two follow upon each other. `table`: of the embedding, 0
    where the stage has none. 0 of somebody else's run, whose rule counts everything.
    """
    if training.bytes_rule is not None or training.offload != "none":
        return 0.0
    ranks, stage = training.dp * training.cp, training.zero_stage
    mode = training.optimizer_mode
    if training.engine.startswith(("deepspeed", "hf")) and stage >= 1:
        own = params / ranks
        if stage == 3:
            own = min(SUB_GROUP, own)
        made = {"foreach": 4.0, "for-loop": 8.0}.get(mode, 0.0)
        return own * _with_flat_gradients(training, made)
    shared = ranks if training.engine == "fsdp" or training.distributed_optimizer else 1
    if mode == "foreach":
        return 4 * params / shared
    if mode == "for-loop":
        # Whole parameters are dealt out over ddp's ranks, parts of each over FSDP's.
        return 4 * max(3 * matrix, 2 * table) / (ranks if training.engine == "fsdp" else 1)
    return 0.0


def _with_flat_gradients(training: Training, made: float) -> float:
    """Bytes a parameter of a rank's share: what the update makes, and the gradients laid end to end for it.

    ZeRO-3's sums are what its update reads (train/engines/zero_sums.py). ZeRO-1 and -2 flatten fp32 and fp16 gradients,
    and free the parameters' own before the update; bf16's sums are flat already.
    """
    if training.zero_stage == 3:
        return made
    if training.dtype == "bf16":
        return made
    width = 4 if training.dtype == "fp32" else 2
    return max(width, made + (0 if training.dtype == "fp32" else -2))


def moved_bytes(training: Training) -> float:
    """Bytes read and written for a parameter in a step, by counting, with the norm and the clipping.

    fused: fp32 master, two moments and the gradient read, three of them written, 2 of the half weight; and once more
    over the gradient for its norm and its scale. foreach and for-loop: weight decay 8, the first moment 12, the second
    8 + 12, root, quotient and sum with epsilon 8 each, the weight 16, in place of fused's 28. What more launches cost
    is not counted. compiled: one pass reads master, moments and gradient and writes master, moments and half, after one
    that reads the gradient for the norm.
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
    """Engine ddp alone has it, and of half weights."""
    return training.optimizer_mode == "compiled" and training.engine == "ddp" and training.dtype != "fp32"
