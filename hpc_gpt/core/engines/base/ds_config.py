"""The DeepSpeed configuration of a run, with every key that matters.

DeepSpeed's defaults change between versions (`gradient_clipping` became 1.0 in 2026), so we do not rely on them.
"""

from typing import Any

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.resolved import Resolved

DS_CONFIG = "ds_config.json"  # in the run folder
# The most elements of a bucket. With one data-parallel rank nothing is sent, and a bucket only costs memory.
BUCKET_ELEMENTS = 500_000_000
BUCKET_ELEMENTS_ALONE = 50_000_000
# ZeRO-3 updates its states in groups of so many elements. If they are offloaded, a group is a layer, because DeepSpeed
# briefly holds a group's states twice.
SUB_GROUP_ELEMENTS = 1_000_000_000
# Elements of ZeRO-3's weights that are gathered before their use, and that may be gathered at the same time.
PREFETCH_ELEMENTS = 50_000_000
LIVE_ELEMENTS = 1_000_000_000


def stage_that_runs(stage: int) -> int:
    """The ZeRO stage that runs if `stage` is requested: 0 becomes 1, which has the same arithmetic.

    A pipeline in bf16 always gets BF16_Optimizer, which shards the optimizer at any stage. DeepSpeed 0.19.8 sums bf16
    gradients in fp32 only from stage 1 on. Without ZeRO it computes a wrong gradient norm: for tied weights in fp16,
    and in fp32 only that of the first pipeline stage, and none if it does not clip.
    """
    return max(1, stage)


def zero_stage(resolved: Resolved) -> int:
    """The run's `stage_that_runs`."""
    stage = resolved.engine.zero_stage
    assert stage is not None, "resolve gives it a value"
    return stage_that_runs(stage)


def takes_bf16_optimizer(dtype: str, stage: int, offload: str) -> bool:
    """Whether DeepSpeed's BF16_Optimizer runs: ZeRO-1 (the stage that runs) in bf16, with gradients summed in fp32."""
    return dtype == "bf16" and stage == 1 and offload == "none"


def shards_in_bf16_optimizer(resolved: Resolved) -> bool:
    """`takes_bf16_optimizer` for a run."""
    return takes_bf16_optimizer(resolved.train.dtype, zero_stage(resolved), resolved.engine.offload)


def longest_bucket(dp: int, params: int) -> int:
    """Elements of a bucket: at most the model's `params`, as DeepSpeed allocates all; even, as ZeRO 1 and 2 need."""
    return min(BUCKET_ELEMENTS_ALONE if dp == 1 else BUCKET_ELEMENTS, params + params % 2)


def deepspeed_config(resolved: Resolved) -> dict[str, Any]:
    """The configuration for `deepspeed.initialize` and ds_config.json, as plain JSON values."""
    batch, dtype = resolved.batch, resolved.train.dtype
    # fp16 gradients stay fp16: with a wider buffer DeepSpeed sums tied gradients of the wrong tensor.
    accumulate = "fp16" if dtype == "fp16" else "fp32"
    return {
        # DeepSpeed counts what each rank of its data axis reads; with cp several ranks read each sample.
        "train_batch_size": batch.global_batch * resolved.layout.cp,
        "train_micro_batch_size_per_gpu": batch.micro_batch,
        "gradient_accumulation_steps": batch.micro_batches,
        "gradient_clipping": resolved.train.clip,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "data_types": {"grad_accum_dtype": accumulate},
        "communication_data_type": accumulate,
        "bf16": {
            "enabled": dtype == "bf16",
            # Add each gradient to its fp32 buffer at once, and free the bf16 gradient.
            "immediate_grad_update": True,
            # The optimizers of ZeRO-1 and ZeRO-3 always check the norm. Those of ZeRO-2 and of offloaded ZeRO-1 would
            # make a step that is not finite.
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
        # Reference cycles may hold GPU memory, so Python's garbage collector stays on; its cost is not measured.
        "disable_python_gc": False,
        # The keys below measure or print, which synchronises the device.
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "memory_breakdown": False,
        "dump_state": False,
        "timers": {"throughput": {"enabled": False, "synchronized": False}},
        "flops_profiler": {"enabled": False},
        "comms_logger": {"enabled": False},
    }


def _zero(resolved: Resolved) -> dict[str, Any]:
    """The section `zero_optimization`, with the keys of stage 3 and of offloading only if they are used."""
    engine, stage = resolved.engine, zero_stage(resolved)
    # Copies to the host keep their own order, and a pipeline reduces after its last micro-batch.
    overlaps = stage > 1 and resolved.layout.data_ranks > 1 and (stage == 3 or engine.offload == "none")
    bucket = longest_bucket(resolved.layout.data_ranks, resolved.model.params)
    zero: dict[str, Any] = {
        "stage": stage,
        "reduce_scatter": True,
        "contiguous_gradients": True,
        "overlap_comm": overlaps,
        "reduce_bucket_size": bucket,
        "use_multi_rank_bucket_allreduce": True,
        "allgather_partitions": True,
        "allgather_bucket_size": bucket,
        "round_robin_gradients": False,
        "parameter_alignment": False,
        "load_from_fp32_weights": True,
        "elastic_checkpoint": False,
        "ignore_unused_parameters": True,
        "compute_grad_norm": True,
        "enable_sanity_checks": False,
    }
    if stage == 3:
        zero |= _stage_3(resolved)
    if engine.offload != "none":
        zero |= _offloading(engine)
    return zero


def _stage_3(resolved: Resolved) -> dict[str, Any]:
    return {
        "sub_group_size": sub_group_elements(resolved),
        "stage3_prefetch_bucket_size": PREFETCH_ELEMENTS,
        # Norms and biases (at most 4 hidden) stay whole on every rank. Every matrix is split if there is more
        # than one rank.
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


def _offloading(engine: Engine) -> dict[str, Any]:
    # Pinned memory needs CUDA: the engine switches it off if the ranks have no GPU.
    place: dict[str, Any] = {"device": "cpu", "pin_memory": True}
    # Four states of a parameter are in transfer at once: the parameter, its gradient and two moments.
    optimizer = {
        "buffer_count": 4,
        "pipeline_read": False,
        "pipeline_write": False,
        "fast_init": False,
        "ratio": 1.0,
    }
    parameters = {"buffer_count": 5, "buffer_size": 100_000_000, "max_in_cpu": 1_000_000_000}
    config = {"offload_optimizer": place | optimizer}
    return config | ({"offload_param": place | parameters} if engine.offload == "full" else {})


def sub_group_elements(resolved: Resolved) -> int:
    """Elements of one group of ZeRO-3's states on a rank. DeepSpeed loads only checkpoints with the same groups."""
    engine, model = resolved.engine, resolved.model
    if engine.offload == "none":
        return SUB_GROUP_ELEMENTS
    ranks = resolved.layout.tp * resolved.layout.data_ranks
    return max(1, min(SUB_GROUP_ELEMENTS, model.kinds[0].params // ranks))
