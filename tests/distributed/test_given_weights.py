"""Trainings that begin from given weights, in every engine and layout: against transformers trained alike, with the
weights' every bit, and in little memory."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.folder import POSITIONS
from hpc_gpt.core.weights.names import parts_of, size_of
from hpc_gpt.trainer.engines import deepspeed_engine, deepspeed_zero, fsdp
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights
from tests import marked
from tests.distributed.equality_cases import CLIP, EVALUATION, MODELS, VOCAB, Case, micro_batches, whole_batch, zero
from tests.distributed.host_memory import Most
from tests.distributed.plain_gpt import PlainRun, train_plainly
from tests.distributed.ranks import Task
from tests.distributed.trainings import build, everyone, saved_weights, train

transformers = pytest.importorskip("transformers")

Found = Callable[[Task], Any]
STEPS = 3
UNTIED = ("llama", "gpt2")
DP2, TP2, PP2 = Layout(1, 1, 2), Layout(2, 1, 1), Layout(1, 2, 1)
ZERO, HF = "deepspeed-zero", "hf-deepspeed"
HOW: dict[str, tuple[Layout, Engine]] = {
    "dp2": (DP2, Engine(name="ddp")),
    "tp2": (TP2, Engine(name=ZERO, zero_stage=1)),
    "pp2": (PP2, zero(1)),
    "tp2 x pp2": (Layout(2, 2, 1), zero(1)),
    "zero3": (DP2, Engine(name=ZERO, zero_stage=3)),
    "fsdp": (Layout(2, 1, 2), Engine(name="fsdp")),
    "fsdp tp2": (TP2, Engine(name="fsdp")),
    "fsdp hybrid": (Layout(1, 1, 4, shard=2), Engine(name="fsdp")),
    "hf-deepspeed": (DP2, Engine(name=HF)),
}


def settings(model: str, how: str, folder: Path) -> Resolved:
    """As the command line would resolve them."""
    (layout, engine), (name, *windows) = HOW[how], model.split()
    window: dict[str, Any] = {"window": 5, "window_layers": "SL"} if windows else {}
    resolved = Case(
        layout, engine, clip=CLIP, tied=name not in UNTIED, model=name, pad=name != "gpt2", **window
    ).resolved
    return replace(resolved, train=replace(resolved.train, init=str(folder / model)))


def written_once(folder: Path, write: Callable[[Path], Any]) -> None:
    """Writes a folder of weights if it is not there, on rank 0 alone."""
    if dist.get_rank() == 0 and not folder.exists():
        write(folder)
    dist.barrier()


def made_by_transformers(model: str, folder: Path) -> Any:
    """A model of transformers' class with weights that matter, saved by its own method, in one file or several."""
    shape = settings(model, "dp2", folder.parent).model
    # GPT-2's folder has more learned positions than are trained.
    config = config_of(shape if shape.positions == "rope" else replace(shape, seq=2 * shape.seq))
    kind = getattr(transformers, config.pop("architectures")[0])
    config.pop("model_type")
    torch.manual_seed(11)
    made = kind(kind.config_class(**config))
    with torch.no_grad():
        for name, weight in made.named_parameters():
            weight.normal_(0.0, 0.08).add_(float("norm" in name or "ln_" in name) * (weight.ndim == 1))
    made.save_pretrained(folder, **({"max_shard_size": "20KB"} if model in ("qwen3", "gpt2") else {}))


def train_given(folder: Path, model: str, how: str) -> list[float]:
    """The losses of three steps; the weights before and after them are kept as a checkpoint of the engine has them."""
    written_once(folder / model, lambda own: made_by_transformers(model, own))
    resolved = settings(model, how, folder)
    engine = build(resolved)
    begun = saved_weights(engine, resolved, folder / f"{model} {how} begun")
    losses = [loss for loss, _, _ in train(engine, resolved, range(STEPS))]
    ended = saved_weights(engine, resolved, folder / f"{model} {how} ended")
    if dist.get_rank() == 0:
        torch.save((begun, ended), folder / f"{model} {how}.pt")
    return losses


@cache
def stored_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


def by_our_names(shape: ModelShape, stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our whole parameters, with zeros where the vocabulary is padded."""
    found = {}
    for name in shape.parameter_names:
        parts = [stored[part.name].t() if part.transposed else stored[part.name] for part in parts_of(shape, name)]
        whole = torch.cat(parts)[: shape.seq if name == "position.weight" else None]
        assert whole.shape == size_of(shape, name)
        padding = shape.padded_vocab - len(whole) if name in ("embedding.weight", "head.weight") else 0
        found[name] = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])]) if padding else whole
    return found


@cache
def reference(model: str, folder: Path) -> PlainRun:
    resolved = settings(model, "dp2", folder)
    initial = by_our_names(resolved.model, stored_in(folder / model))
    batches = [whole_batch(step, None, resolved.model.seq) for step in (*range(STEPS), EVALUATION)]
    return train_plainly(resolved.model, resolved.train, initial, batches[:-1], batches[-1])


def unpadded(name: str, weight: Tensor) -> Tensor:
    """What a folder has of a weight: without the rows that pad the vocabulary."""
    return weight[:VOCAB] if name in ("embedding.weight", "head.weight") else weight


def given_tasks(hows: Iterable[str], shift: int) -> list[Task]:
    """A task for each of these ways, each with another model."""
    models = list(MODELS)
    pairs = [(models[(number + shift) % len(models)], how) for number, how in enumerate(HOW) if how in hows]
    return [Task(f"{model} {how}", HOW[how][0].gpus, train_given, (model, how)) for model, how in pairs]


# Each architecture and each engine in every run of the tests; each way with two of them in all of its days.
ENGINES = ("dp2", "pp2", "zero3", "fsdp tp2", "hf-deepspeed")
SHORT = given_tasks(ENGINES, 1)
LONG = given_tasks(HOW.keys() - {*ENGINES}, 1) + given_tasks(HOW, 3)
LONG += [
    Task(f"qwen3 window {how}", HOW[how][0].gpus, train_given, ("qwen3 window", how)) for how in ("fsdp tp2", "pp2")
]


@pytest.mark.parametrize("task", marked([*SHORT, *LONG], LONG), ids=lambda task: task.name)
def test_three_steps_are_those_of_transformers(task: Task, found: Found, launch_of: Any, tmp_path: Path) -> None:
    losses, folder, (model, how) = found(task), launch_of(task).folder, task.given
    begun, ended = torch.load(folder / f"{model} {how}.pt")
    shape, plain = settings(model, how, folder).model, reference(model, folder)
    assert losses == pytest.approx(plain.losses, abs=2e-6)
    assert ended.keys() == plain.weights.keys()
    for name, weight in ended.items():
        # In exact arithmetic the gradient of a key's bias is zero, so Adam's first steps take the sign of a rounding.
        limit = 2e-3 if name.endswith("qkv.bias") else 1e-5
        wanted = plain.weights[name][: len(weight)]  # a checkpoint has no rows past the vocabulary
        torch.testing.assert_close(weight, wanted, rtol=0, atol=limit, msg=f"{name} after three steps")
    # Without a step the folder is the one that it began from, bit for bit.
    write_hf(shape, ((name, unpadded(name, one)) for name, one in begun.items()), tmp_path / "out")
    theirs, ours = stored_in(folder / model), stored_in(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight[: shape.seq] if name == POSITIONS else weight), name
    assert (folder / "qwen3" / "model.safetensors.index.json").exists() or model != "qwen3"


GIVEN_SEED = 7
FIRST_HOW: dict[str, tuple[Layout, Engine]] = {
    "ddp": (DP2, Engine(name="ddp")),
    "fsdp": (DP2, Engine(name="fsdp")),
    "fsdp tp2": (TP2, Engine(name="fsdp")),
    "3d dp2": (DP2, zero(1)),
    "3d pp2": (PP2, zero(1)),
    "zero1 tp2": (TP2, Engine(name=ZERO, zero_stage=1)),
    "zero2 offloaded": (DP2, Engine(name=ZERO, zero_stage=2, offload="optimizer")),
    "zero3": (DP2, Engine(name=ZERO, zero_stage=3)),
    "zero3 tp2": (TP2, Engine(name=ZERO, zero_stage=3)),
    "zero3 tiles offloaded": (DP2, Engine(name=ZERO, zero_stage=3, offload="full", tiles=2)),
    "hf zero1": (DP2, Engine(name=HF, zero_stage=1)),
    "hf zero3": (DP2, Engine(name=HF)),
}


@cache
def expected(model: str, seed: int) -> dict[str, Tensor]:
    """The weights that are drawn from a seed, in fp32."""
    shape = Case(DP2, Engine(name="ddp"), tied=model == "gpt2", model=model).resolved.model
    return {name: weight.detach().clone() for name, weight in Gpt(shape, seed).named_parameters()}


def step_at_no_rate(folder: Path, how: str, dtype: Any, model: str, given: bool) -> list[str]:
    """The weights that have changed after a step at a rate of zero."""
    layout, engine_settings = FIRST_HOW[how]
    resolved = Case(layout, engine_settings, dtype, clip=CLIP, tied=model == "gpt2", model=model).resolved
    weights = folder / f"drawn {model}"
    drawn = expected(model, GIVEN_SEED).items()
    written_once(
        weights, lambda own: write_hf(resolved.model, ((name, unpadded(name, one)) for name, one in drawn), own)
    )
    init = str(weights) if given else None
    resolved = replace(resolved, train=replace(resolved.train, lr=0.0, min_lr=0.0, weight_decay=0.0, init=init))
    engine = build(resolved)
    result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, 0)))
    assert torch.isfinite(result.loss), result
    kept = saved_weights(engine, resolved, folder / f"{how} {dtype} {model} {given}")
    wanted = expected(model, GIVEN_SEED if given else resolved.train.seed)
    if dist.get_rank():
        return []
    assert kept.keys() == wanted.keys()
    return [name for name, own in kept.items() if not torch.equal(unpadded(name, own), unpadded(name, wanted[name]))]


# fp16 and bf16 differ in DeepSpeed's optimizer of ZeRO-1.
_DTYPES = (("bf16", "llama"), ("fp16", "gpt2"))


def first_task(how: str, kind: tuple[str, str], given: bool) -> Task:
    name = " ".join((how, *kind, "given" if given else "drawn"))
    return Task(name, 2, step_at_no_rate, (how, *kind, given))


# Each way given and drawn, in both dtypes.
FIRST = [first_task(how, _DTYPES[number // 2 % 2], number % 2 == 0) for number, how in enumerate(FIRST_HOW)]
FIRST += [first_task(how, _DTYPES[1 - number // 2 % 2], number % 2 == 1) for number, how in enumerate(FIRST_HOW)]
SHORT_FIRST = [FIRST[0], FIRST[8]]
LONG_FIRST = [task for task in FIRST if task not in SHORT_FIRST]


@pytest.mark.parametrize("task", marked(FIRST, LONG_FIRST), ids=lambda task: task.name)
def test_a_step_at_a_rate_of_zero_keeps_every_bit(task: Task, found: Found) -> None:
    assert found(task) == []


LARGE = ModelShape(512, 12, 8, vocab=16384, seq=64, ffn=2048, kv_heads=4, mlp="swiglu", norm="rmsnorm",
                   positions="rope", bias="none", tied=False)  # fmt: skip
SMALL = replace(LARGE, hidden=64, layers=1, vocab=64, ffn=64)
# Each with what is called when the model is built.
MEASURED: dict[str, tuple[Engine, tuple[Any, str]]] = {
    "fsdp": (Engine(name="fsdp"), (fsdp, "build_optimizer")),
    "deepspeed-zero": (Engine(name=ZERO, zero_stage=3), (deepspeed_zero, "compile_model")),
    "hf-deepspeed": (Engine(name=HF), (deepspeed_zero, "compile_model")),
    # No fp32 model, neither of a rank nor of its share.
    "zero1 bf16": (Engine(name=ZERO, zero_stage=1), (deepspeed_zero, "compile_model")),
}


def measure(folder: Path, engine: str) -> list[dict[str, int]]:
    """Of each rank: `own` bytes of its weights, the most bytes `beside` them while they were read, and numbers
    `read`."""
    _measure(folder, engine, SMALL)  # what the libraries import and keep is not the weights'
    return everyone(_measure(folder, engine, LARGE))


def _measure(folder: Path, engine: str, shape: ModelShape) -> dict[str, int]:
    weights = folder / f"hidden {shape.hidden}"
    written_once(weights, lambda own: write_hf(shape, Gpt(shape, 1).named_parameters(), own))
    count, beside, building = 0, [0, 0], Most()
    chosen, (module, name) = MEASURED[engine]
    read, built, put = FolderWeights.read, getattr(module, name), deepspeed_engine.put_weights

    def counted(self: FolderWeights, name: str, target: Tensor, *at: int) -> None:
        nonlocal count
        count += target.numel()
        read(self, name, target, *at)

    def when_built(*arguments: Any, **named: Any) -> Any:
        beside[0] = building.stop()
        return built(*arguments, **named)

    def watched_put(*arguments: Any) -> None:
        # DeepSpeed's states and buffers are there.
        most = Most()
        put(*arguments)
        beside[1] = most.stop()

    dtype: Any = engine.partition(" ")[2] or "fp32"
    resolved = Case(DP2, chosen, dtype, optimizer="sgd", model="llama").resolved
    resolved = replace(resolved, model=shape, train=replace(resolved.train, init=str(weights)))
    with (
        patch.object(FolderWeights, "read", counted),
        patch.object(module, name, when_built),
        patch.object(deepspeed_engine, "put_weights", watched_put),
    ):
        engine_built = build(resolved)
    own = sum(_share(parameter).nbytes for parameter in engine_built.module.parameters())
    return {"own": own, "beside": max(beside[0] - own, beside[1]), "read": count}


def _share(parameter: Any) -> Tensor:
    """This rank's part of a parameter of FSDP2 or of ZeRO-3, or all of it."""
    part: Tensor = getattr(parameter, "ds_tensor", parameter)
    return part.to_local() if isinstance(part, DTensor) else part


@pytest.mark.long
@pytest.mark.parametrize("task", [Task(name, 2, measure, (name,)) for name in MEASURED], ids=list(MEASURED))
def test_a_rank_of_sharded_weights_holds_little_beside_its_share(task: Task, found: Found) -> None:
    numbers, largest = LARGE.params, 4 * LARGE.vocab * LARGE.hidden
    for one in found(task):
        print(f"{task.name}: {one['beside'] / 1e6:.0f} MB beside {one['own'] / 1e6:.0f}")
        # Each rank reads its part; a part that begins within a row, the whole row. ZeRO-1's are half and whole.
        assert one["own"] == pytest.approx(4 * numbers / 2, rel=1e-3)
        assert one["beside"] < 2 * largest
        assert one["read"] == pytest.approx(numbers if task.name == "zero1 bf16" else numbers / 2, rel=1e-3)
