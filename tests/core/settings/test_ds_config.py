"""The DeepSpeed configuration: whole, plain JSON, and the right stage and clipping for each dtype."""

import json
from dataclasses import replace
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.engines import ds_config_of, engine_of
from hpc_gpt.core.engines.base.ds_config import shards_in_bf16_optimizer, zero_stage
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.training import training_of


def settings(dtype: str = "fp32", stage: int = 1, dp: int = 2, **engine: Any) -> Resolved:
    pp = 1 if engine else 2
    experiment = Experiment(
        model=Model(hidden=32, layers=4, heads=4),
        engine=Engine(**{"zero_stage": stage, **engine}),
        layout=LayoutRequest(gpus=2 * pp * dp, tp=2, pp=pp, dp=dp, micro_batch=2, global_batch=24),
        train=replace(Train(), dtype=dtype, clip=0.5),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=8))


@pytest.mark.parametrize(
    ("dtype", "asked", "given"), [("fp32", 0, 1), ("fp32", 1, 1), ("bf16", 0, 1), ("bf16", 1, 1), ("fp16", 0, 1)]
)
def test_stage_and_clipping_for_each_dtype(dtype: str, asked: int, given: int) -> None:
    resolved = settings(dtype, asked)
    config = ds_config_of(resolved)
    assert zero_stage(resolved) == config["zero_optimization"]["stage"] == given
    assert config["gradient_clipping"] == 0.5


@pytest.mark.parametrize(("dtype", "width"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")])
def test_gradients_accumulate_and_travel_in(dtype: str, width: str) -> None:
    config = ds_config_of(settings(dtype))
    assert config["data_types"]["grad_accum_dtype"] == width
    assert config["communication_data_type"] == width
    assert [key for key in ("bf16", "fp16") if config[key]["enabled"]] == [dtype] * (dtype != "fp32")


ZERO = {"name": "deepspeed-zero"}


@hypothesis.settings(max_examples=50, deadline=None)
@given(
    stage=st.integers(0, 3),
    dtype=st.sampled_from(["fp32", "bf16", "fp16"]),
    dp=st.sampled_from([1, 2, 3]),
    offload=st.sampled_from(["none", "optimizer", "full"]),
)
def test_deepspeed_reads_what_every_zero_setting_becomes(stage, dtype, dp, offload):
    from deepspeed.runtime.config import DeepSpeedConfig

    try:
        resolved = settings(dtype, stage, dp, **ZERO, offload=offload)
    except UserError:
        return  # test_engines knows which
    config = ds_config_of(resolved)
    assert json.loads(json.dumps(config)) == config
    assert "pipeline" not in config
    zero, ran = config["zero_optimization"], zero_stage(resolved)
    assert zero["stage"] == ran == max(stage, 1)
    assert ("offload_optimizer" in zero) is (offload != "none")
    assert ("offload_param" in zero) is (offload == "full")
    for name in ("offload_optimizer", "offload_param"):
        if name in zero:
            assert zero[name]["device"] == "cpu"
            assert zero[name]["pin_memory"] is True
    if offload != "none":
        assert zero["offload_optimizer"]["ratio"] == 1.0
    assert not (zero["overlap_comm"] and dp == 1)
    # One rank pretends to be all of them, as DeepSpeed asks the launcher how many there are.
    alone = {**config, "train_batch_size": 24 // dp}
    read = DeepSpeedConfig(json.loads(json.dumps(alone)))
    section = read.zero_config
    assert section.stage == ran
    for key, value in zero.items():
        name = key.removeprefix("stage3_")
        if not isinstance(value, dict):
            assert getattr(section, name) == value, key
    assert read.gradient_clipping == 0.5


def test_no_key_of_zero_is_left_to_deepspeeds_defaults() -> None:
    """Keys that are left out are switches for what we never do, off in every version, or aliases of others."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    config = ds_config_of(settings("bf16", 3, **ZERO, offload="full"))["zero_optimization"]
    known = {entry.alias or name for name, entry in DeepSpeedZeroConfig.model_fields.items()}
    written = config.keys()
    assert written <= known
    assert known - written == {
        "cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory", "legacy_stage1", "zenflow", "leaf_module",
        "stage3_gather_fp16_weights_on_model_save", "save_muon_momentum_buffer_in_memory",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dtype", "stage", "offload", "checks"),
    [("bf16", 1, "none", False), ("bf16", 2, "none", True), ("bf16", 3, "none", False), ("bf16", 1, "optimizer", True)],
)
def test_a_bf16_step_not_finite_is_found_where_deepspeed_misses(dtype, stage, offload, checks):
    resolved = settings(dtype, stage, **ZERO, offload=offload)
    assert ds_config_of(resolved)["bf16"]["check_grad_overflow"] is checks
    assert shards_in_bf16_optimizer(resolved) is (stage == 1 and offload == "none")


def test_only_matrices_are_split_by_zero_3() -> None:
    resolved = settings("fp32", 3, **ZERO)
    threshold = ds_config_of(resolved)["zero_optimization"]["stage3_param_persistence_threshold"]
    longest_bias, smallest_matrix = 4 * 32, 32 * 32
    assert longest_bias <= threshold < smallest_matrix // 2


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("hidden", [32, 2048, 33])
def test_a_bucket_is_no_longer_than_the_model_and_plan_knows_it(dp: int, hidden: int) -> None:
    """DeepSpeed allocates it whole, and refuses an odd one."""
    resolved = settings("bf16", 2, dp, **ZERO)
    shape = replace(resolved.model, hidden=hidden, head_dim=8, layers=24, bias="none", norm="rmsnorm")
    resolved = replace(resolved, model=shape)
    assert shape.params % 2 == hidden % 2
    zero = ds_config_of(resolved)["zero_optimization"]
    longest = 50_000_000 if dp == 1 else 500_000_000
    assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == min(longest, shape.params + hidden % 2)
    training = training_of(resolved)
    assert engine_of(training).bucket_elements(training) == zero["reduce_bucket_size"]


def test_what_goes_to_the_host_is_in_groups_small_enough() -> None:
    """DeepSpeed briefly holds a group's states twice."""
    whole = ds_config_of(settings("bf16", 3, 2, **ZERO, offload="optimizer"))["zero_optimization"]
    assert whole["sub_group_size"] == settings().model.kinds[0].params // 4
    kept = ds_config_of(settings("bf16", 3, 2, **ZERO))["zero_optimization"]
    assert kept["sub_group_size"] == 10**9
