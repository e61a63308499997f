"""The DeepSpeed configuration of a run, every key that matters written out.

DeepSpeed's defaults change between versions (`gradient_clipping` became 1.0 in 2026), so none is relied upon.
"""

from __future__ import annotations

from typing import Any

from hpc_gpt.settings.resolve import Resolved

ENGINES = frozenset({"deepspeed-3d", "deepspeed-zero", "hf-deepspeed"})
# What a bucket holds at the most. With one data-parallel rank nothing is sent, and a bucket only takes memory.
BUCKET_ELEMENTS = 500_000_000
BUCKET_ELEMENTS_ALONE = 50_000_000
# ZeRO-3 updates its states in groups of so many numbers. Offloaded, a group is a layer, as DeepSpeed builds a group's
# states twice for a moment; `offload_ratio` deals whole groups out to device and host.
SUB_GROUP_ELEMENTS = 1_000_000_000
_SUB_GROUPS_TO_DEAL_OUT = 32
# Of ZeRO-3's weights: those gathered ahead of their use, and those that may be whole at once.
PREFETCH_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 1_000_000_000


def stage_that_runs(engine: str, stage: int, dtype: str) -> int:
    """The ZeRO stage that runs if an engine (by name) is asked for `stage`; the same if it is not DeepSpeed's.

    fp32 runs the stage asked for. With bf16 and fp16 stage 0 becomes 1: a pipeline in bf16 always gets
    BF16_Optimizer, which shards the optimizer whatever the stage, and DeepSpeed sums bf16 gradients in fp32 only from
    stage 1 on; fp16 without ZeRO has no gradient norm that is right for tied weights. The arithmetic is the same.
    """
    return max(1, stage) if engine in ENGINES and dtype != "fp32" else stage


def zero_stage(resolved: Resolved) -> int:
    """The run's `stage_that_runs`; 0 for an engine that is not DeepSpeed's."""
    stage = resolved.engine.zero_stage
    assert stage is not None, "resolve settles it"
    return stage_that_runs(resolved.engine.name, stage, resolved.train.dtype)


def clips_itself(resolved: Resolved) -> bool:
    """Whether norm and clipping are ours (`train.engines.optimizer.GradientNorm`), not DeepSpeed's.

    Without ZeRO DeepSpeed 0.19.8 takes the norm over stage 0 alone (and, unclipped, takes none).
    """
    return zero_stage(resolved) == 0


def takes_bf16_optimizer(dtype: str, stage: int, offload: str) -> bool:
    """Whether DeepSpeed's BF16_Optimizer runs: ZeRO-1 (`stage` as it runs) in bf16, gradients summed in fp32."""
    return dtype == "bf16" and stage == 1 and offload == "none"


def shards_in_bf16_optimizer(resolved: Resolved) -> bool:
    """`takes_bf16_optimizer` of a run."""
    return takes_bf16_optimizer(resolved.train.dtype, zero_stage(resolved), resolved.engine.offload)


def longest_bucket(dp: int, params: int) -> int:
    """Elements of a bucket, which DeepSpeed allocates whole: no more than the model's `params`."""
    return min(BUCKET_ELEMENTS_ALONE if dp == 1 else BUCKET_ELEMENTS, params)


def bucket_elements(resolved: Resolved) -> int:
    """`longest_bucket` of a run."""
    return longest_bucket(resolved.layout.dp, resolved.model.params)


def deepspeed_config(resolved: Resolved) -> dict[str, Any]:
    """What `deepspeed.initialize` gets and ds_config.json holds; plain JSON values."""
    batch, dtype = resolved.batch, resolved.train.dtype
    # fp16 gradients stay fp16: with a wider buffer DeepSpeed sums tied gradients of the wrong tensor.
    accumulate = "fp16" if dtype == "fp16" else "fp32"
    config: dict[str, Any] = {
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
            # ZeRO-1's and ZeRO-3's optimizers look at the norm anyway; the one of ZeRO-2, and of ZeRO-1 offloaded,
            # would take a step that is not finite.
            "check_grad_overflow": zero_stage(resolved) in (1, 2) and not shards_in_bf16_optimizer(resolved),
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
        "zero_optimization": _zero(resolved),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "checkpoint": {"tag_validation": "Ignore", "load_universal": False, "use_node_local_storage": False},
        # Cycles of Python objects may hold GPU memory; whether its collector costs time here is not measured.
        "disable_python_gc": False,
        # Everything below measures or prints, and synchronises the device to do so.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
    }
    if resolved.engine.name == "deepspeed-3d":
        config["pipeline"] = {
            # Recomputation is the model's own (`Block.recompute`), the same for every engine.
            "activation_checkpoint_interval": 0,
            "use_reentrant": False,
            "pipe_partitioned": False,
            "grad_partitioned": False,
        }
    if resolved.engine.offload_path is not None:
        config["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
            "use_gds": False,
        }
    return config


def _zero(resolved: Resolved) -> dict[str, Any]:
    """The section on ZeRO; the keys of stage 3 and of offloading stand there only where they are used."""
    engine, stage = resolved.engine, zero_stage(resolved)
    # The host's copies order themselves; a pipeline reduces after its last micro-batch.
    overlaps = stage > 1 and resolved.layout.dp > 1 and (stage == 3 or engine.offload == "none")
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "overlap_comm": overlaps,
        "reduce_bucket_size": bucket_elements(resolved),
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket_elements(resolved),
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "ignore_unused_parameters": True,
        "compute_grad_norm": True,
        "enable_sanity_checks": False,
    }
    if stage == 3:
        zero |= {
            "sub_group_size": sub_group_elements(resolved),
            "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
            # Norms and biases, the longest of 4 hidden, stay whole on every rank; every matrix is split, if there is
            # another rank for a part of it.
            "stage3_param_persistence_threshold": 4 * resolved.model.hidden,
            "stage3_model_persistence_threshold": 2**63 - 1,
            "stage3_max_live_parameters": LIVE_ELEMENTS,
            "stage3_max_reuse_distance": LIVE_ELEMENTS,
            "stage3_module_granularity_threshold": 0,
            "stage3_gather_16bit_weights_on_model_save": False,
            "stage3_use_all_reduce_for_fetch_params": False,
            "stage3_allgather_sequential": False,
            "memory_efficient_linear": False,
            "zero_hpz_partition_size": 1,
            "zero_quantized_weights": False,
            "zero_quantized_nontrainable_weights": False,
            "zero_quantized_gradients": False,
            "override_module_apply": True,
            "log_trace_cache_warnings": False,
            "pipeline_loading_checkpoint": False,
        }
    if engine.offload != "none":
        place = _place(resolved)
        # Four states of a parameter are on their way at once: itself, its gradient and two moments.
        zero["offload_optimizer"] = place | {
            "buffer_count": 4,
            "pipeline_read": False,
            "pipeline_write": False,
            "fast_init": False,
            "ratio": engine.offload_ratio,
        }
        if engine.offload == "full":
            zero["offload_param"] = place | {
                "buffer_count": 5,
                "buffer_size": 100_000_000,
                "max_in_cpu": 1_000_000_000,
            }
    return zero


def sub_group_elements(resolved: Resolved) -> int:
    """Numbers of one group of ZeRO-3's states on a rank. DeepSpeed's own loading needs the groups of the checkpoint."""
    engine, model = resolved.engine, resolved.model
    if engine.offload == "none":
        return SUB_GROUP_ELEMENTS
    ranks = resolved.layout.tp * resolved.layout.dp
    limits = [SUB_GROUP_ELEMENTS, model.block_params // ranks]
    if engine.offload_ratio < 1:
        limits.append(model.params // ranks // _SUB_GROUPS_TO_DEAL_OUT)
    return max(1, min(limits))


def _place(resolved: Resolved) -> dict[str, Any]:
    path = resolved.engine.offload_path
    # Pinned memory is CUDA's: the engine switches it off where the ranks find no GPU.
    place: dict[str, Any] = {"device": "cpu" if path is None else "nvme", "pin_memory": True}
    return place if path is None else place | {"nvme_path": path}
