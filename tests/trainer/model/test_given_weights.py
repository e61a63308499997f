"""Weights of a folder: what each rank reads of them, and the memory that this takes."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.model.folder_tensors import write_hf
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.initial_weights import FolderWeights, SeededWeights
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, split_of
from tests.distributed.host_memory import Most
from tests.distributed.test_given_weights import LARGE
from tests.trainer.test_hf_folders import FAMILIES, write

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file


@pytest.mark.parametrize("name", FAMILIES)
def test_each_rank_reads_its_own_share(name: str, tmp_path: Path) -> None:
    shape = FAMILIES[name]
    weights = write(shape, tmp_path / "out")
    folder = read_folder(tmp_path / "out")
    whole = Gpt(shape, 1, TensorParallel(given=FolderWeights(folder, shape)))
    for parameter, (own, expected) in zip(whole.parameters(), weights.items(), strict=True):
        assert torch.equal(parameter[: len(expected)], expected), own
        assert not parameter[len(expected) :].any(), "rows that pad the vocabulary are zero"
    for size in (2, 4):
        for rank in range(size):
            for techniques in (Techniques(), Techniques(tiles=2)):
                given = FolderWeights(folder, shape)
                model = Gpt(shape, 1, TensorParallel(rank, size, given=given), techniques)
                assert given.taken == set(shape.parameter_names)
            shares = Gpt(shape, 1, TensorParallel(rank, size, given=FolderWeights(folder, shape)))
            for parameter, full in zip(shares.parameters(), whole.parameters(), strict=True):
                split = split_of(parameter)
                assert torch.equal(parameter, full if split is None else split.shard(full, rank, size))
            tiled = torch.cat([tile.weight for tile in model.blocks[0].feed_forward.up.tiles])
            assert torch.equal(tiled, shares.blocks[0].feed_forward.up.weight)


@pytest.mark.parametrize(
    ("value", "words"),
    [(torch.nan, "NaN or infinity"), (-torch.inf, "NaN or infinity"), (-1e39, r"-1e\+39, more than float32 holds")],
)
def test_what_is_not_finite_is_refused_by_the_name_of_its_weight(value: float, words: str, tmp_path: Path) -> None:
    shape = replace(FAMILIES["qwen2"], layers=1)
    write(shape, tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.v_proj.weight"
    weights[name] = weights[name].double()
    weights[name][-1, -1] = value
    save_file(weights, tmp_path / "out" / "model.safetensors")
    with pytest.raises(ConfigError, match=rf"model\.layers\.0\.self_attn\.v_proj\.weight has {words}"):
        Gpt(shape, 1, TensorParallel(given=FolderWeights(read_folder(tmp_path / "out"), shape)))


def test_a_model_on_another_device_is_drawn_by_blocks() -> None:
    most = Most()
    tp = TensorParallel(
        given=SeededWeights(1, LARGE.layers), device=torch.device("meta")
    )  # takes no memory of the host
    model = Gpt(LARGE, 1, tp)
    assert most.stop() < 2 * 4 * LARGE.vocab * LARGE.hidden
    assert all(parameter.is_meta for parameter in model.parameters())


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_memory_beside_the_share_is_below_two_largest_parameters(tmp_path: Path, dtype: str) -> None:
    write_hf(LARGE, Gpt(LARGE, 1).named_parameters(), tmp_path / "out", dtype=dtype)
    read_folder(tmp_path / "out")  # what the libraries import and keep is not the weights'
    for tp in (1, 2):
        most = Most()
        model = Gpt(LARGE, 1, TensorParallel(0, tp, given=FolderWeights(read_folder(tmp_path / "out"), LARGE)))
        own = sum(parameter.nbytes for parameter in model.parameters())
        assert own > 200e6 / tp
        assert most.stop() - own < 2 * 4 * LARGE.vocab * LARGE.hidden / tp
        del model
