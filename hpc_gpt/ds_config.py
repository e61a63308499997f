"""The DeepSpeed configuration of a run, every key that matters written out.

DeepSpeed's defaults change between versions (`gradient_clipping` became 1.0 in 2026), so none is relied upon.
"""

from __future__ import annotations

from typing import Any

from hpc_gpt.resolve import Resolved

BUCKET_ELEMENTS = 500_000_000


def zero_stage(resolved: Resolved) -> int:
    """The ZeRO stage DeepSpeed is given.

    fp32 runs the stage asked for. With bf16 and fp16 stage 0 becomes 1: a pipeline in bf16 always gets
    BF16_Optimizer, which shards the optimizer whatever the stage, and only stage 1 accumulates its gradients in
    fp32; fp16 without ZeRO has no gradient norm that is right for tied weights. The arithmetic is the same.
    """
    stage = resolved.engine.zero_stage
    assert stage is not None, "resolve settles it"
    return stage if resolved.train.dtype == "fp32" else 1


def clips_itself(resolved: Resolved) -> bool:
    """Whether norm and clipping are ours (`train.gradient_norm`), not DeepSpeed's.

    Without ZeRO DeepSpeed 0.19.8 takes the norm over stage 0 alone (and, unclipped, takes none).
    """
    return zero_stage(resolved) == 0


def deepspeed_config(resolved: Resolved) -> dict[str, Any]:
    """What `deepspeed.initialize` gets and ds_config.json holds; plain JSON values."""
    batch, dtype = resolved.batch, resolved.train.dtype
    # fp16 gradients stay fp16: with a wider buffer DeepSpeed sums tied gradients of the wrong tensor.
    accumulate = "fp16" if dtype == "fp16" else "fp32"
    return {
        "train_batch_size": batch.global_batch,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.micro_batches,
        "gradient_clipping": 0.0 if clips_itself(resolved) else resolved.train.clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "data_types": {"grad_accum_dtype": accumulate},
        "communication_data_type": accumulate,
        "bf16": {
            "enabled": dtype == "bf16",
            # Adds each gradient to its fp32 buffer as it comes, and frees the bf16 one.
            "immediate_grad_update": True,
            "check_grad_overflow": False,
        },
        "fp16": {
            "enabled": dtype == "fp16",
            "auto_cast": False,
            "loss_scale": 0,
            "initial_scale_power": 16,
            "loss_scale_window": 1000,
            "hysteresis": 2,
            "consecutive_hysteresis": False,
            "min_loss_scale": 1,
        },
        "zero_optimization": {
            "stage": zero_stage(resolved),
            "reduce_scatter": True,
            "contiguous_gradients": True,
            "overlap_comm": False,
            "reduce_bucket_size": BUCKET_ELEMENTS,
            "allgather_partitions": True,
            "allgather_bucket_size": BUCKET_ELEMENTS,
            "round_robin_gradients": False,
            "load_from_fp32_weights": True,
            "elastic_checkpoint": False,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "pipeline": {
            # Recomputation is the model's own (`Block.recompute`), the same for every engine.
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,
            "pipe_partitioned": False,
            "grad_partitioned": False,
        },
        "checkpoint": {"tag_validation": "Ignore", "load_universal": False, "use_node_local_storage": False},
        # Everything below measures or prints, and synchronises the device to do so.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
    }
