"""Engine fsdp: like the reference, in 1-D and 2-D; its collectives; checkpoints that other layouts read."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.train.checkpoints import sharded
from hpc_gpt.train.engines.fsdp import read_weights
from tests.distributed.sharded_runs import BROKEN, MOVED, RESUMED, TRAININGS, cases, reference
from tests.distributed.sharded_tests import (
    check_broken,
    check_moved,
    check_near,
    check_resumed,
    check_weights,
    found_by,
    shared_folder,
)

pytestmark = pytest.mark.xdist_group("sharded")

Found = dict[int, dict[str, Any]]
BLOCKS, GROUPS = 2, 3  # two blocks, and the root with what is in none


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return found_by(folder)


@pytest.mark.parametrize(("world", "name"), cases("train", TRAININGS, "fsdp"))
def test_it_trains_like_one_plain_process(found: Found, folder: Path, world: int, name: str) -> None:
    check_near(found[world][f"train {name}"], TRAININGS[world][name].train.dtype)
    check_weights(read_weights, folder, world, name)


# Over tp; what is not here is whole on every tp rank. Of that all ranks of dp hold their rows.
SPLIT = {
    "embedding.weight": 0,
    "attention.qkv.weight": 0,
    "attention.qkv.bias": 0,
    "attention.projection.weight": 1,
    "feed_forward.up.weight": 0,
    "feed_forward.up.bias": 0,
    "feed_forward.down.weight": 1,
}


def test_parameters_and_gradients_are_dtensors_on_tp_x_dp_placed_as_they_are_split(found: Found) -> None:
    described = found[4]["placements"]
    assert described.keys() == reference().weights.keys()
    for name, one in described.items():
        dim = SPLIT.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name)
        placements = ["R" if dim is None else f"S({dim})", "S(0)"]
        assert one == {
            "mesh": [["tp", "dp"], [[0, 2], [1, 3]]],
            "placements": placements,
            "gradient": placements,
            "as drawn": True,
        }, name


def test_one_placement_mixed_up_is_another_model(found: Found, folder: Path) -> None:
    check_near(found[4]["mixed"], "fp32")  # the layers are given what they were
    with pytest.raises(AssertionError, match=r"up\.weight"):
        check_weights(read_weights, folder / "mixed", 4, "fsdp tp")


def test_a_checkpoints_metadata_are_read_once_for_all_weights(
    found: Found, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, times = sharded.load_metadata, []

    def counted(path: Path) -> Any:
        times.append(path)
        return read(path)

    monkeypatch.setattr(sharded, "load_metadata", counted)
    weights = dict(read_weights(folder / "checkpoints" / "trained 4 fsdp tp", TRAININGS[4]["fsdp tp"]))
    assert weights.keys() == reference().weights.keys()
    assert len(times) == 1


@pytest.mark.parametrize("count", [1, 4])
def test_every_micro_batch_gathers_twice_and_reduces_at_once(found: Found, count: int) -> None:
    calls = Counter(found[2][f"calls fsdp m{count}"])
    assert calls == {
        "_allgather_base_ float32": count * (GROUPS + BLOCKS),
        "_reduce_scatter_base_ float32": count * GROUPS,
        "allreduce_ float32": 1,  # the loss
        "allreduce_ float64": 1,  # the norm
    }


@pytest.mark.parametrize("count", [1, 4])
def test_kept_weights_are_gathered_once_a_step_and_the_gradient_reduced_once(found: Found, count: int) -> None:
    calls = Counter(found[2][f"calls fsdp kept m{count}"])
    assert calls["_allgather_base_ float32"] == GROUPS
    assert calls["_reduce_scatter_base_ float32"] == GROUPS


@pytest.mark.parametrize(("name", "half"), [("fsdp bf16", "bfloat16"), ("fsdp fp16", "float16")])
def test_halves_are_gathered_and_fp32_is_reduced(found: Found, name: str, half: str) -> None:
    calls = Counter(found[2][f"calls {name}"])
    gathered = {call: count for call, count in calls.items() if "gather" in call}
    # Bytes, as a group of parameters may hold several types.
    assert set(gathered) <= {f"_allgather_base_ {half}", "_allgather_base_ uint8"}, calls
    assert {call for call in calls if "reduce_scatter" in call} == {"_reduce_scatter_base_ float32"}
    assert not any("scalar" in call for call in calls)


def test_prefetch_gathers_the_next_block_before_this_ones_gradient_is_reduced(found: Found) -> None:
    def backward(name: str) -> str:
        letters = {"_allgather_base_": "g", "_reduce_scatter_base_": "r"}
        calls = [letters.get(call.split()[0], "") for call in found[2][f"calls {name}"]]
        return "".join(calls)[GROUPS:]

    assert backward("fsdp m1") == "ggrrr"
    assert backward("fsdp without prefetch") == "grgrr"


@pytest.mark.parametrize(("world", "name"), cases("resume", RESUMED, "fsdp"))
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(found: Found, world: int, name: str) -> None:
    check_resumed(found[world][f"resume {name}"])


@pytest.mark.parametrize(("world", "name"), cases("move", MOVED, "fsdp"))
def test_another_layout_goes_on_from_the_checkpoint(found: Found, world: int, name: str) -> None:
    check_moved(found[world][f"move {name}"])


@pytest.mark.parametrize(("world", "name"), cases("break", BROKEN, "fsdp"))
def test_one_rank_whose_gradient_is_not_finite_stops_them_all(found: Found, world: int, name: str) -> None:
    check_broken(found[world][f"break {name}"], fp16="fp16" in name)


def test_checkpoints_of_others_are_refused(found: Found) -> None:
    said = found[1]["refuse"]
    assert said["same"] == ""
    assert "another model: model.hidden is 30 there and 64 here" in said["model"]
    assert "train.dtype is fp32 there and bf16 here" in said["dtype"]
    assert "holds no weights" in said["lost"]
