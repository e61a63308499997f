"""Trainings that begin from published weights, in every engine and layout, against transformers trained alike."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.config import config_of
from hpc_gpt.core.weights.folder import POSITIONS
from hpc_gpt.core.weights.names import parts_of, size_of
from hpc_gpt.core.weights.tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from tests import marked
from tests.distributed import given_memory_worker as memory
from tests.distributed.equality_cases import EVALUATION, MODELS, whole_batch
from tests.distributed.given_worker import ALL_CASES, CASES, HOW, SHORT, STEPS, settings
from tests.distributed.plain_gpt import PlainRun, train_plainly
from tests.distributed.ranks import launch_ranks

pytestmark = pytest.mark.xdist_group("given-weights")
transformers = pytest.importorskip("transformers")
LONG = [case for case in ALL_CASES if case not in SHORT]
IDS = [" ".join(case) for case in ALL_CASES]


def made_by_transformers(shape: ModelShape, folder: Path, **how: Any) -> Any:
    """A model of transformers' class with weights that matter, saved by its own method."""
    config = config_of(shape)
    kind = getattr(transformers, config.pop("architectures")[0])
    config.pop("model_type")
    torch.manual_seed(11)
    model = kind(kind.config_class(**config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.08).add_(float("norm" in name or "ln_" in name) * (weight.ndim == 1))
    model.save_pretrained(folder, **how)
    return model.eval()


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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders of weights, in one file or several, and what the launches found."""
    made = tmp_path_factory.mktemp("given")
    for model in MODELS:
        sizes = {"max_shard_size": "20KB"} if model in ("qwen3", "gpt2") else {}
        shape = settings(model, "tp1", made).model
        # GPT-2's folder has more learned positions than are trained.
        longer = shape if shape.positions == "rope" else replace(shape, seq=2 * shape.seq)
        made_by_transformers(longer, made / model, **sizes)
    assert (made / "qwen3" / "model.safetensors.index.json").exists()
    for world in sorted({HOW[how][0].gpus for _, how in CASES}):
        launch_ranks("tests.distributed.given_worker", world, made / f"of {world}")
    return made


@cache
def stored_in(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: weight for file in folder.glob("*.safetensors") for name, weight in load_file(file).items()}


@cache
def reference(model: str, folder: Path) -> PlainRun:
    resolved = settings(model, "tp1", folder)
    initial = by_our_names(resolved.model, stored_in(folder / model))
    batches = [whole_batch(step) for step in range(STEPS)]
    return train_plainly(resolved.model, resolved.train, initial, batches, whole_batch(EVALUATION))


@pytest.mark.parametrize(("model", "how"), marked(ALL_CASES, LONG), ids=IDS)
def test_three_steps_are_those_of_transformers(model: str, how: str, folder: Path, tmp_path: Path) -> None:
    of_launch = folder / f"of {HOW[how][0].gpus}"
    losses = json.loads((of_launch / "found.json").read_text())[f"{model} {how}"]["losses"]
    begun, ended = torch.load(of_launch / f"{model} {how}.pt")
    shape, plain = settings(model, how, folder).model, reference(model, folder)
    assert losses == pytest.approx(plain.losses, abs=2e-6)
    assert ended.keys() == plain.weights.keys()
    for name, weight in ended.items():
        # In exact arithmetic the gradient of a key's bias is zero, so Adam's first steps take the sign of a rounding.
        limit = 2e-3 if name.endswith("qkv.bias") else 1e-5
        torch.testing.assert_close(weight, plain.weights[name], rtol=0, atol=limit, msg=f"{name} after three steps")
    # Without a step the folder is the one that it began from, bit for bit.
    cut = ((name, one[: shape.vocab] if name in ("embedding.weight", "head.weight") else one)
           for name, one in begun.items())  # fmt: skip
    write_hf(shape, cut, tmp_path / "out")
    theirs, ours = stored_in(folder / model), stored_in(tmp_path / "out")
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        assert torch.equal(ours[name], weight[: shape.seq] if name == POSITIONS else weight), name


@pytest.mark.long
def test_a_rank_of_sharded_weights_holds_little_beside_its_share(tmp_path: Path) -> None:
    for size, shape in memory.SHAPES.items():
        write_hf(shape, Gpt(shape, 1).named_parameters(), tmp_path / size)
    launch_ranks("tests.distributed.given_memory_worker", 2, tmp_path / "found")
    ranks = [json.loads((tmp_path / "found" / f"{rank}.json").read_text()) for rank in range(2)]
    numbers, largest = memory.LARGE.params, 4 * memory.LARGE.vocab * memory.LARGE.hidden
    for engine in memory.ENGINES:
        for rank, found in enumerate(one[engine] for one in ranks):
            print(f"{engine} rank {rank}: {found['beside'] / 1e6:.0f} MB beside {found['own'] / 1e6:.0f}")
            # Each rank reads its part; a part that begins within a row, the whole row. ZeRO-1's are half and whole.
            assert found["own"] == pytest.approx(4 * numbers / 2, rel=1e-3)
            assert found["beside"] < 2 * largest
            assert found["read"] == pytest.approx(numbers if engine == "zero1 bf16" else numbers / 2, rel=1e-3)
