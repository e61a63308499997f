"""The DeepSpeed configuration: whole, plain JSON, and the right stage and clipping for each dtype."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from hpc_gpt.cluster import ClusterProfile
from hpc_gpt.ds_config import clips_itself, deepspeed_config, zero_stage
from hpc_gpt.experiment import Engine, Experiment, LayoutRequest, Model, Train
from hpc_gpt.resolve import Resolved, resolve


def settings(dtype: str = "fp32", stage: int = 1, dp: int = 2) -> Resolved:
    experiment = Experiment(
        model=Model(hidden=32, layers=4, heads=4),
        engine=Engine(zero_stage=stage),
        layout=LayoutRequest(gpus=4 * dp, tp=2, pp=2, dp=dp, micro_batch=2, global_batch=24),
        train=replace(Train(), dtype=dtype, clip=0.5),
    )
    return resolve(experiment, ClusterProfile(name="test", scheduler="local", gpus_per_node=8))


def test_the_batch_is_ours() -> None:
    config = deepspeed_config(settings())
    assert config["train_batch_size"] == 24
    assert config["train_micro_batch_size_per_gpu"] == 2
    assert config["gradient_accumulation_steps"] == 6


@pytest.mark.parametrize(
    ("dtype", "asked", "given", "clips"),
    [("fp32", 0, 0, 0.0), ("fp32", 1, 1, 0.5), ("bf16", 0, 1, 0.5), ("bf16", 1, 1, 0.5), ("fp16", 0, 1, 0.5)],
)
def test_stage_and_clipping_for_each_dtype(dtype: str, asked: int, given: int, clips: float) -> None:
    resolved = settings(dtype, asked)
    config = deepspeed_config(resolved)
    assert zero_stage(resolved) == config["zero_optimization"]["stage"] == given
    # Without ZeRO the norm and clipping are ours: DeepSpeed would take the first stage's alone.
    assert config["gradient_clipping"] == clips
    assert clips_itself(resolved) is (given == 0)


@pytest.mark.parametrize(("dtype", "width"), [("fp32", "fp32"), ("bf16", "fp32"), ("fp16", "fp16")])
def test_gradients_accumulate_and_travel_in(dtype: str, width: str) -> None:
    config = deepspeed_config(settings(dtype))
    assert config["data_types"]["grad_accum_dtype"] == width
    assert config["communication_data_type"] == width
    assert [key for key in ("bf16", "fp16") if config[key]["enabled"]] == [dtype] * (dtype != "fp32")


def test_nothing_measures_or_prints_on_its_own() -> None:
    config = deepspeed_config(settings())
    assert config["timers"]["throughput"] == {"enabled": False, "synchronized": False}
    assert config["wall_clock_breakdown"] is config["memory_breakdown"] is False
    assert config["steps_per_print"] is None
    assert config["pipeline"]["use_reentrant"] is False


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_it_is_plain_json_and_deepspeed_reads_it(dtype: str) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    config = deepspeed_config(settings(dtype, dp=1))
    assert json.loads(json.dumps(config)) == config
    read = DeepSpeedConfig(json.loads(json.dumps(config)))
    assert read.gradient_clipping == 0.5
    assert read.train_batch_size == 24
    assert read.zero_config.stage == 1
    assert read.float16_config.initial_scale_power == 16
    assert read.timers_config.enabled is False
