"""Parameters found again in flat, split-up states, at any tensor-parallel size; what is missing is told, not made up.

The files are written here as DeepSpeed lays them out; that it does is tests/distributed's to show.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hpc_gpt.trainer.checkpoints import universal
from hpc_gpt.trainer.checkpoints.universal import SavedStates, places_of
from hpc_gpt.trainer.model.tensor_parallel import Split, Tile, name_parameter

QKV, NORM = torch.arange(24.0).reshape(12, 2), torch.tensor([100.0, 101.0, 102.0, 103.0])
FUSED = Split(0, 3)
# The first data-parallel rank's part of 16 numbers; the second's is padded.
CUT = 9


def saved_states(folder: Path) -> Path:
    """A checkpoint of tp 2 and dp 3 under ZeRO: a fused weight of 24 numbers, and a norm that both tp ranks hold. The
    third data-parallel rank has nothing but padding."""
    for tp in (0, 1):
        numbers = torch.cat([FUSED.shard(QKV, tp, 2).flatten(), NORM, torch.full((2,), 999.0)])
        for dp, flat in enumerate((numbers[:CUT], numbers[CUT:], numbers[-2:])):
            state = {"exp_avg": -flat, "exp_avg_sq": flat * flat, "step": torch.tensor(17.0)}
            optimizer = {"fp32_flat_groups": [flat], "optimizer_state_dict": {"state": {0: state}}, "loss_scaler": 8}
            name, rank = f"zero-{tp}-{dp}.pt", 3 * tp + dp
            torch.save({"optimizer_state_dict": optimizer}, folder / name)
            whole = [["qkv", [6, 2], [0, 3], 0, 0, 0, 9]]
            rest = [["qkv", [6, 2], [0, 3], 0, 0, 9, 3], ["norm", [4], None, 0, 3, 0, 4]]
            listed = {"schema": 1, "at": [tp, 0, dp], "file": name, "swapped": False, "weights": None}
            (folder / f"states-{rank:05d}.json").write_text(json.dumps({**listed, "pieces": (whole, rest, [])[dp]}))
    return folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(universal, "import_deepspeed", lambda device: None)
    return saved_states(tmp_path)


def test_every_parameter_and_state_is_whole_again(folder: Path) -> None:
    saved = SavedStates(folder)
    assert (saved.tp, saved.names(), saved.kinds(), saved.updates()) == (
        2, ["qkv", "norm"], ["exp_avg", "exp_avg_sq"], 17.0
    )  # fmt: skip
    assert saved.loss_scaler() == 8
    assert torch.equal(saved.whole("qkv"), QKV)
    assert torch.equal(saved.whole("norm"), NORM)
    assert torch.equal(saved.whole("qkv", "exp_avg"), -QKV)
    assert torch.equal(saved.whole("norm", "exp_avg_sq"), NORM * NORM)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_rank_of_any_size_gets_its_share(folder: Path, tp: int) -> None:
    saved = SavedStates(folder)
    for rank in range(tp):
        assert torch.equal(saved.share("qkv", "exp_avg", rank, tp), -FUSED.shard(QKV, rank, tp))
        assert torch.equal(saved.share("norm", "weights", rank, tp), NORM)


def test_tiles_follow_each_other_whatever_the_models_order() -> None:
    def tile(number: int, rows: int) -> nn.Parameter:
        return name_parameter(nn.Parameter(torch.zeros(rows, 5)), "up", Split(0), Tile(number, 3))

    parts = {"c": tile(2, 2), "a": tile(0, 4), "norm": name_parameter(nn.Parameter(torch.zeros(7)), "norm"),
             "b": tile(1, 4)}  # fmt: skip
    places = places_of(nn.ParameterList(parts.values()))
    assert {name: (places[parts[name]].start, places[parts[name]].count) for name in parts} == {
        "a": (0, 20), "b": (20, 20), "c": (40, 10), "norm": (0, 7)
    }  # fmt: skip
    assert (places[parts["b"]].shape, places[parts["b"]].split) == ((10, 5), (0, 1))
    assert (places[parts["norm"]].shape, places[parts["norm"]].split) == ((7,), None)
    piece = places[parts["b"]].piece(group=3, offset=6, start=5, count=2)
    assert (piece.group, piece.offset, piece.start, piece.count) == (3, 6, 25, 2)


def test_a_parameter_that_stage_3_gave_away_has_its_shape() -> None:
    away: Any = name_parameter(nn.Parameter(torch.zeros(0)), "embedding", Split(0))
    away.ds_shape = torch.Size((6, 4))
    place = places_of(nn.ParameterList([away]))[away]
    assert (place.shape, place.start, place.count) == ((6, 4), 0, 24)


class Sharded:
    """A parameter of which every rank keeps `size` numbers."""

    ds_process_group = None

    def __init__(self, numel: int, size: int) -> None:
        self.ds_numel = numel
        self.partition_numel = lambda: size


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, [("a", 0, 0, 4), ("b", 4, 0, 2), ("c", 6, 0, 1)]),
        (1, [("a", 0, 4, 4), ("b", 4, 2, 1), ("c", 6, 1, 1)]),
        (2, [("a", 0, 8, 2), ("c", 6, 2, 1)]),
    ],
)
def test_the_shares_of_stage_3_are_equal_but_for_what_is_padded(monkeypatch, rank, expected) -> None:
    """10, 3 and 3 numbers over 3 ranks: the last shares short, or of nothing."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda group: rank)
    places: dict[Any, Any] = {}
    parameters = []
    for name, numel, size in (("a", 10, 4), ("b", 3, 2), ("c", 3, 1)):
        parameter = Sharded(numel, size)
        places[parameter] = universal.WeightPlace(name, (numel,), None, 0, numel)
        parameters.append(parameter)
    found = universal._shares(0, parameters, places)
    assert [(piece.name, piece.offset, piece.start, piece.count) for piece in found] == expected
