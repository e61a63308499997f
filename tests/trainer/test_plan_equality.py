"""The planner against the trainer: parameters of each stage, bytes of model and optimizer, FLOPs of a step."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from hpc_gpt.core.formulas import tflops_hardware, tflops_model
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.planner.memory import predict_memory, stage_params
from hpc_gpt.planner.training import training_of
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from tests.chosen import asked
from tests.distributed.equality_cases import Case, micro_batches
from tests.distributed.ranks import Launch, Task
from tests.distributed.trainings import build, everyone

pytestmark = pytest.mark.xdist_group("train-plan_equality")


WORLD = 4
DP4, TP2_DP2, PP2_DP2, TP2_PP2 = Layout(1, 1, 4), Layout(2, 1, 2), Layout(1, 2, 2), Layout(2, 2, 1)


def _case(name: str, layout: Layout, dtype: str, tied: bool = True, **engine: Any) -> Resolved:
    """Sizes that every group of ranks divides, so that no engine pads its shares; the stages are uneven."""
    return Case(layout, Engine(name, **engine), dtype, tied=tied).resolved


CASES = {
    "3d fp32 zero0 tp2-pp2": _case("deepspeed-3d", TP2_PP2, "fp32", zero_stage=0),
    "3d fp32 zero1 pp2-dp2": _case("deepspeed-3d", PP2_DP2, "fp32", zero_stage=1),
    "3d bf16 tp2-pp2": _case("deepspeed-3d", TP2_PP2, "bf16"),
    "3d bf16 pp2-dp2": _case("deepspeed-3d", PP2_DP2, "bf16"),
    "3d bf16 pp2-dp2 untied by parameters": _case("deepspeed-3d", PP2_DP2, "bf16", tied=False, partition="parameters"),
    "fsdp fp32 dp4 untied": _case("fsdp", DP4, "fp32", tied=False),
    "zero fp32 stage 1 dp4": _case("deepspeed-zero", DP4, "fp32", zero_stage=1),
    "zero bf16 stage 2 dp4": _case("deepspeed-zero", DP4, "bf16", zero_stage=2),
    "zero bf16 stage 3 dp4": _case("deepspeed-zero", DP4, "bf16", zero_stage=3),
    "zero fp32 stage 3 tp2-dp2": _case("deepspeed-zero", TP2_DP2, "fp32", zero_stage=3),
    "fsdp fp32 dp4": _case("fsdp", DP4, "fp32"),
    "fsdp bf16 tp2-dp2": _case("fsdp", TP2_DP2, "bf16"),
    "ddp fp32": _case("ddp", DP4, "fp32"),
    "ddp bf16": _case("ddp", DP4, "bf16"),
    "ddp bf16 sharded": _case("ddp", DP4, "bf16", sharded_optimizer=True),
}


# Each engine once, split in every axis that it has, in every run of the tests.
SHORT = (
    "3d bf16 tp2-pp2",
    "zero fp32 stage 3 tp2-dp2",
    "fsdp bf16 tp2-dp2",
    "ddp bf16 sharded",
)
LONG = pytest.mark.long(launch="plan equality")


def measure(folder: Path, resolved: Resolved) -> list[dict[str, Any]]:
    """What each rank holds of the engine after one step."""
    engine = build(resolved)
    engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 0)))
    parameters = list(engine.module.parameters())
    model = _storages(_held(parameter) for parameter in parameters)
    optimizer = _storages(chain(_of_optimizer(engine._optimizer), _masters(engine)))
    own = {
        "at": (engine.tp_rank, engine.pp_rank, engine.dp_rank),
        "parameters": sum(_count(parameter, resolved.layout.dp) for parameter in parameters),
        "model_bytes": sum(model.values()),
        "optimizer_bytes": sum(size for place, size in optimizer.items() if place not in model),
    }
    return everyone(own)


def _held(parameter: Any) -> Tensor:
    """What of a parameter is this rank's own: of ZeRO-3 and FSDP its share."""
    share = getattr(parameter, "ds_tensor", parameter)
    return share.to_local() if hasattr(share, "to_local") else share


def _count(parameter: Any, dp: int) -> int:
    """Of the parameter, before it is dealt out over dp."""
    if hasattr(parameter, "to_local"):
        return int(_held(parameter).numel()) * dp
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _masters(engine: Any) -> Iterator[Tensor]:
    """fp32 weights that the optimizer is only lent: ZeRO-3's between steps, those of other ranks' shares under ddp."""
    yield from getattr(getattr(getattr(engine, "_engine", None), "optimizer", None), "fp32_partitioned_groups_flat", ())
    masters = getattr(engine, "_masters", None)
    yield from masters.masters if masters is not None else ()


def _of_optimizer(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """What it updates, and its moments; the count of steps is no state of a parameter's size."""
    for group in optimizer.param_groups:
        yield from (_held(parameter) for parameter in group["params"])
    for state in optimizer.state.values():
        yield from (_held(value) for value in state.values() if isinstance(value, Tensor) and value.ndim)


def _storages(tensors: Iterator[Tensor]) -> dict[int, int]:
    """Bytes of every piece of memory by its address, each once however many tensors look at it."""
    found = (tensor.detach().untyped_storage() for tensor in tensors)
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.fixture(scope="module")
def states(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What every rank held of the cases that are looked at, by their names: one launch."""
    tasks = [Task(name, WORLD, measure, (CASES[name],)) for name in asked(request, "name")]
    launch = Launch(WORLD, tasks, tmp_path_factory.mktemp("states"))
    return {task.name: launch.figures(task) for task in tasks}


@pytest.mark.parametrize("name", [*SHORT, *(pytest.param(name, marks=LONG) for name in CASES if name not in SHORT)])
def test_an_engine_holds_the_parameters_and_bytes_of_the_plan(name, states):
    """Parameters of each stage; bytes of model and optimizer."""
    training = training_of(CASES[name])
    for stage, predicted in enumerate(predict_memory(training).stages):
        ranks = [rank for rank in states[name] if rank["at"][1] == stage]
        assert [rank["parameters"] for rank in ranks] == [stage_params(training, stage)] * len(ranks)
        model = [rank["model_bytes"] for rank in ranks]
        optimizer = [rank["optimizer_bytes"] for rank in ranks]
        assert model == [pytest.approx(predicted.parameters * 2**30, abs=1e-3)] * len(ranks)
        if "sharded" in name:  # whole parameters at a time: the plan has the fullest rank
            optimizer = [max(optimizer)] * len(ranks)
        assert optimizer == [pytest.approx(predicted.optimizer * 2**30, abs=1e-3)] * len(ranks)


def _counted(shape: ModelShape, batch: int = 1) -> int:
    """FLOPs of a forward and backward pass, as torch counts them: no numbers, only shapes; attention written out."""
    model = Gpt(shape, 1, TensorParallel(empty=partial(torch.empty, device="meta"))).to("meta")
    tokens = torch.zeros(batch, shape.seq, dtype=torch.int64, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(tokens, tokens).backward()
    return int(counter.get_total_flops())


SHAPES = {
    "tiny": ModelShape(hidden=32, layers=3, heads=4, vocab=61, seq=16),
    "untied": ModelShape(hidden=64, layers=2, heads=2, vocab=100, seq=48, tied=False),
    "gpt2": preset("gpt2"),
}


def figure_of(formula: Callable[..., float], shape: ModelShape, batch: int, **more: Any) -> float:
    """FLOPs of a step of so many sequences, by a formula."""
    sizes = {"layers": shape.layers, "hidden": shape.hidden, "seq": shape.seq}
    return 1e12 * formula(**sizes, **more, global_batch=batch, gpus=1, step_s=1.0)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_hardware_flops_are_those_that_torch_counts(shape: ModelShape) -> None:
    figure = figure_of(tflops_hardware, shape, 2, vocab=shape.padded_vocab, recompute="none")
    assert round(figure) == pytest.approx(_counted(shape, batch=2), rel=1e-12)


def test_model_flops_are_those_that_torch_counts_to_a_percent() -> None:
    shape = SHAPES["gpt2"]
    assert figure_of(tflops_model, shape, 1, params=shape.params) == pytest.approx(_counted(shape), rel=0.01)
