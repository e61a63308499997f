"""The planner against the trainer: parameters of each stage, bytes of model and optimizer, FLOPs of a step."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpc_gpt.core.formulas import tflops_hardware, tflops_model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.launcher.plan.memory import predict_memory, stage_params
from hpc_gpt.launcher.plan.training import training_of
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from tests import marked
from tests.distributed.ranks import launch_ranks
from tests.train.plan_states import CASES, TOO_LONG, WORLD

pytestmark = pytest.mark.xdist_group("train-plan_equality")


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank held of every case, by its name: one launch."""
    folder = tmp_path_factory.mktemp("states")
    launch_ranks("tests.train.plan_states", WORLD, folder)
    found: dict[str, list[dict[str, Any]]] = json.loads((Path(folder) / "found.json").read_text())
    return found


@pytest.mark.parametrize("name", marked(CASES, TOO_LONG))
def test_parameters_of_each_stage_are_those_of_the_engine(name: str, states: dict[str, list[dict[str, Any]]]) -> None:
    training = training_of(CASES[name])
    for rank in states[name]:
        assert rank["parameters"] == stage_params(training, rank["at"][1])


@pytest.mark.parametrize("name", marked(CASES, TOO_LONG))
def test_bytes_of_model_and_optimizer_are_those_of_the_engine(name, states):
    memory = predict_memory(training_of(CASES[name]))
    for stage, predicted in enumerate(memory.stages):
        ranks = [rank for rank in states[name] if rank["at"][1] == stage]
        model = [rank["model_bytes"] for rank in ranks]
        optimizer = [rank["optimizer_bytes"] for rank in ranks]
        assert model == [pytest.approx(predicted.parameters * 2**30, abs=1e-3)] * len(ranks)
        if "sharded" in name:  # whole parameters at a time: alike in the sum alone
            optimizer = [sum(optimizer) / len(ranks)] * len(ranks)
        assert optimizer == [pytest.approx(predicted.optimizer * 2**30, abs=1e-3)] * len(ranks)


def _counted(shape: ModelShape, batch: int = 1) -> int:
    """FLOPs of a forward and backward pass, as torch counts them: no numbers, only shapes; attention written out."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InitialWeights, "normal", lambda self, name, size, std=0.0, **_: torch.empty(size, device="meta"))
        model = Gpt(shape, seed=1).to("meta")
    tokens = torch.zeros(batch, shape.seq, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    return int(counter.get_total_flops())


SHAPES = {
    "tiny": ModelShape(hidden=32, layers=3, heads=4, vocab=61, seq=16),
    "untied": ModelShape(hidden=64, layers=2, heads=2, vocab=100, seq=48, tied=False),
    "gpt2": preset("gpt2"),
    "gpt2-xl": preset("gpt2-xl"),
}


def figure_of(formula: Callable[..., float], shape: ModelShape, batch: int, **more: Any) -> float:
    """FLOPs of a step of so many sequences, by a formula."""
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "seq": shape.seq}
    return 1e12 * formula(**sizes, **more, global_batch=batch, gpus=1, step_s=1.0)


@pytest.mark.parametrize("name", marked(SHAPES, ["gpt2-xl"]))
def test_hardware_flops_are_those_that_torch_counts(name: str) -> None:
    shape = SHAPES[name]
    figure = figure_of(tflops_hardware, shape, 2, vocab=shape.padded_vocab, recompute="none")
    assert round(figure) == pytest.approx(_counted(shape, batch=2), rel=1e-12)


@pytest.mark.parametrize("name", marked(["gpt2", "gpt2-xl"], ["gpt2-xl"]))
def test_model_flops_are_those_that_torch_counts_to_a_percent(name: str) -> None:
    shape = SHAPES[name]
    assert figure_of(tflops_model, shape, 1, params=shape.params) == pytest.approx(_counted(shape), rel=0.01)
