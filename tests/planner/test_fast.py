"""Fast settings: which engine has which by default, and that none is where it must not be."""

import itertools
from dataclasses import replace

import pytest

from hpc_gpt.core.engines import engines
from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.rules.engine import engine_faults
from hpc_gpt.planner.fast import FAST_SETTINGS, with_fast_settings

GPT2, LLAMA = preset("gpt2"), preset("llama3.2-1b")
BLOCK = Engine("ddp", compile="block")
ALL = Engine("ddp", compile="edges", one_pass_loss=True, keep_residuals=True)


@pytest.mark.parametrize("shape", [GPT2, LLAMA])
def test_ddp_has_all_three(shape: ModelShape) -> None:
    assert with_fast_settings(BLOCK, shape, Train()) == ALL


@pytest.mark.parametrize(
    "engine",
    [
        Engine("ddp"),
        Engine("ddp", compile="block", compile_backend="aot_eager"),
        Engine("ddp", compile="block", loss_chunks=4),
        Engine("hf-deepspeed", compile="block"),
        Engine("megatron-lm"),
        Engine("command"),
    ],
    ids=["not compiled", "aot_eager", "chunks", "hf-deepspeed", "megatron-lm", "command"],
)
def test_others_have_none(engine: Engine) -> None:
    assert with_fast_settings(engine, GPT2, Train()) == engine


def test_none_beside_deterministic_kernels() -> None:
    assert with_fast_settings(BLOCK, GPT2, Train(deterministic=True)) == BLOCK


@pytest.mark.parametrize("setting", FAST_SETTINGS, ids=lambda setting: setting.key)
def test_a_key_that_is_given_stays(setting) -> None:
    given = with_fast_settings(BLOCK, GPT2, Train(), {f"engine.{setting.key}"})
    assert given == replace(ALL, **{setting.key: getattr(BLOCK, setting.key)})


def test_a_default_never_causes_a_refusal() -> None:
    """Every engine, stage, split and shape, beside each switch of [engine] at each of a few values."""
    switches = [{}, {"recompute": "full"}, {"recompute": "selective"}, {"activation_offload": True}, {"tiles": 2}]
    switches += [{"offload": "optimizer"}, {"offload": "full"}, {"sequence_parallel": True}, {"compile": "whole"}]
    switches += [{"sharded_optimizer": True}, {"reshard": False}, {"partition": "parameters"}, {"loss_chunks": 2}]
    layouts = (Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1), Layout(1, 1, 1, 2))
    ran = set()
    for name, stage, shape, layout, given in itertools.product(
        engines(), (None, 0, 1, 2, 3), (GPT2, LLAMA), layouts, switches
    ):
        engine = Engine(**{"name": name, "zero_stage": stage, "compile": "block", **given})
        if engine_faults(engine, layout, shape, Train()):
            continue
        fast = with_fast_settings(engine, shape, Train(), {f"engine.{key}" for key in given})
        assert engine_faults(fast, layout, shape, Train()) == [], fast
        ran |= {(name, setting.key) for setting in FAST_SETTINGS if getattr(fast, setting.key) == setting.value}
    ours = {name for name, facts in engines().items() if facts.trains_our_model and not facts.is_program}
    every = set(itertools.product(ours, (setting.key for setting in FAST_SETTINGS)))
    assert every - ran == {("deepspeed-3d", "compile")}
