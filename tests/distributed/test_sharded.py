"""Engines ddp and fsdp: like the reference, in 1-D and 2-D; their collectives; resumed to the last digit; checkpoints
that other layouts read."""

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hpc_gpt.trainer.train.checkpoints import sharded
from hpc_gpt.trainer.train.engines.protocol import module_of
from tests import marked
from tests.distributed.equality_cases import CLIP, STEPS
from tests.distributed.reference import reference
from tests.distributed.sharded_runs import BROKEN, LISTED, MOVED, RESUMED, SHORT, TRAININGS, cases, launched
from tests.distributed.trainings import SAVED

pytestmark = pytest.mark.xdist_group("sharded")

Found = dict[int, dict[str, Any]]
BLOCKS, GROUPS = 2, 3  # two blocks, and the root with what is in none
plain = partial(reference, TRAININGS[1]["ddp"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharded")


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return launched(folder)


def check_near(found: dict[str, Any], dtype: str) -> None:
    """Losses, norms and the evaluation are the reference's, whose clipping acts on every step."""
    assert min(plain().norms) > CLIP
    losses, norms, skipped = zip(*found["figures"], strict=True)
    exact = dtype == "fp32"
    assert losses == pytest.approx(plain().losses, abs=2e-6 if exact else 1e-2, rel=0)
    assert norms == pytest.approx(plain().norms, rel=1e-5 if exact else 5e-2)
    assert found["loss_eval"] == pytest.approx(plain().loss_eval, abs=2e-6 if exact else 1e-2, rel=0)
    assert not any(skipped)
    assert found["step"] == STEPS
    assert found["parameters"] == sum(weight.numel() for weight in plain().weights.values())


def read_weights(folder: Path, world: int, name: str) -> dict[str, Any]:
    resolved = TRAININGS[world][name]
    kept = folder / "checkpoints" / f"trained {world} {name}"
    return dict(module_of(resolved.engine.name).read_weights(kept, resolved))


def check_weights(folder: Path, world: int, name: str) -> None:
    """The weights that one process reads from the checkpoint of that training are the reference's, in fp32."""
    resolved = TRAININGS[world][name]
    weights = dict(
        module_of(resolved.engine.name).read_weights(folder / "checkpoints" / f"trained {world} {name}", resolved)
    )
    assert weights.keys() == plain().weights.keys()
    limit = 1e-5 if resolved.train.dtype == "fp32" else 1e-2
    for key, weight in weights.items():
        assert weight.dtype == torch.float32
        far = (weight - plain().weights[key]).abs()
        # The K bias has a gradient of zero but for rounding, which Adam makes much of.
        third = len(far) // 3
        k_bias = key.endswith("qkv.bias")
        assert float(far.max() if not k_bias else max(far[:third].max(), far[2 * third :].max())) <= limit, key


@pytest.mark.parametrize(("world", "name"), cases("train", TRAININGS))
def test_it_trains_like_one_plain_process(found: Found, folder: Path, world: int, name: str) -> None:
    check_near(found[world][f"train {name}"], TRAININGS[world][name].train.dtype)
    check_weights(folder, world, name)


@pytest.mark.parametrize(("world", "name"), cases("resume", RESUMED))
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(found: Found, world: int, name: str) -> None:
    one = found[world][f"resume {name}"]
    assert (one["step"], one["resumed"]) == (SAVED, one["unbroken"])
    assert one["same_weights"]
    assert one["same_scale"]
    assert one["same_random"]


@pytest.mark.parametrize(("world", "name"), cases("move", MOVED))
def test_another_layout_or_update_goes_on_from_the_checkpoint(found: Found, world: int, name: str) -> None:
    """The steps after the move are the reference's."""
    one, exact = found[world][f"move {name}"], "fp16" not in name
    losses, norms, _ = zip(*one["figures"], strict=True)
    assert one["step"] == SAVED
    assert losses == pytest.approx(plain().losses[SAVED:], abs=2e-6 if exact else 1e-2, rel=0)
    assert norms == pytest.approx(plain().norms[SAVED:], rel=1e-5 if exact else 5e-2)


@pytest.mark.parametrize(("world", "name"), cases("break", BROKEN))
def test_one_rank_whose_gradient_is_not_finite_stops_them_all(found: Found, world: int, name: str) -> None:
    """The step is skipped on every rank, changes nothing, and halves fp16's scale; training goes on."""
    one = found[world][f"break {name}"]
    for ((_, norm, skipped),) in one["bad"]:
        assert skipped
        assert not math.isfinite(norm)
    assert one["weights_kept"]
    assert one["moments_kept"]
    assert set(one["scales"]) == ({32768.0} if "fp16" in name else {None})
    assert one["step"] == 5
    for _, norm, skipped in one["good"] + one["then"]:
        assert math.isfinite(norm)
        assert not skipped


@pytest.mark.parametrize("name", marked(LISTED[1], set(LISTED[1]) - set(SHORT["calls"][1])))
def test_one_rank_calls_no_collective_and_never_waits(found: Found, name: str) -> None:
    assert found[1][f"calls {name}"] == []


@pytest.mark.parametrize("name", ["ddp", "ddp bf16"])
def test_ranks_meet_once_a_step_in_fp32_at_any_micro_batches(found: Found, name: str) -> None:
    # The gradient, in one bucket as it is small, and the loss. No number is read from the device.
    assert found[2][f"calls {name} m1"] == ["allreduce_ float32"] * 2
    assert found[2][f"calls {name} m4"] == ["allreduce_ float32"] * 2


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
def test_flat_gradients_are_averaged_where_they_lie(found: Found, count: int) -> None:
    calls = found[2][f"calls ddp bf16 compiled m{count}"]
    assert calls == ["allreduce_coalesced_ float32", "allreduce_ float32"]


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


def test_parameters_and_gradients_are_dtensors_placed_as_split(found: Found) -> None:
    described = found[4]["placements"]
    assert described.keys() == plain().weights.keys()
    for name, one in described.items():
        dim = SPLIT.get(name.split(".", 2)[-1] if name.startswith("blocks.") else name)
        placements = ["R" if dim is None else f"S({dim})", "S(0)"]
        assert one == {
            "mesh": [["tp", "dp"], [[0, 2], [1, 3]]],
            "placements": placements,
            "gradient": placements,
            "as drawn": True,
        }, name


def test_a_checkpoints_metadata_are_read_once_for_all_weights(found, folder, monkeypatch):
    read, times = sharded.load_metadata, []

    def counted(path: Path) -> Any:
        times.append(path)
        return read(path)

    monkeypatch.setattr(sharded, "load_metadata", counted)
    weights = dict(
        module_of("fsdp").read_weights(folder / "checkpoints" / "trained 4 fsdp tp", TRAININGS[4]["fsdp tp"])
    )
    assert weights.keys() == plain().weights.keys()
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
def test_kept_weights_are_gathered_and_gradients_reduced_once(found: Found, count: int) -> None:
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


def test_prefetch_gathers_the_next_block_before_a_gradient_goes(found: Found) -> None:
    def backward(name: str) -> str:
        letters = {"_allgather_base_": "g", "_reduce_scatter_base_": "r"}
        calls = [letters.get(call.split()[0], "") for call in found[2][f"calls {name}"]]
        return "".join(calls)[GROUPS:]

    assert (backward("fsdp m1"), backward("fsdp without prefetch")) == ("ggrrr", "grgrr")


def test_checkpoints_of_others_are_refused(found: Found) -> None:
    said = found[1]["refuse"]
    assert said["same"] == ""
    assert "another model: model.hidden is 30 there and 64 here" in said["model"]
    assert "train.dtype is fp32 there and bf16 here" in said["dtype"]
    assert "holds no weights" in said["lost"]


def test_nothing_is_printed(found: Found) -> None:
    assert [found[world]["output"] for world in TRAININGS] == ["", "", ""]
