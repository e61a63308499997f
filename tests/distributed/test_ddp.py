"""Engine ddp: like the reference, silent between the last micro-batches, resumed to the last digit."""

from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.train.engines.ddp import read_weights
from tests import marked
from tests.distributed.sharded_runs import BROKEN, LISTED, RESUMED, SHORT, TRAININGS, cases
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory)


@pytest.fixture(scope="module")
def found(folder: Path) -> Found:
    return found_by(folder)


@pytest.mark.parametrize(("world", "name"), cases("train", TRAININGS, "ddp"))
def test_it_trains_like_one_plain_process(found: Found, folder: Path, world: int, name: str) -> None:
    check_near(found[world][f"train {name}"], TRAININGS[world][name].train.dtype)
    check_weights(read_weights, folder, world, name)


@pytest.mark.parametrize("name", marked(LISTED[1], set(LISTED[1]) - set(SHORT["calls"][1])))
def test_one_rank_calls_no_collective_and_never_waits(found: Found, name: str) -> None:
    assert found[1][f"calls {name}"] == []


@pytest.mark.parametrize("name", ["ddp", "ddp bf16"])
def test_ranks_meet_once_a_step_in_fp32_whatever_the_micro_batches(found: Found, name: str) -> None:
    # The gradient, in one bucket as it is small, and the loss. No number is read from the device.
    assert found[2][f"calls {name} m1"] == ["allreduce_ float32"] * 2
    assert found[2][f"calls {name} m4"] == ["allreduce_ float32"] * 2


@pytest.mark.long
@pytest.mark.parametrize("count", [1, 4])
def test_flat_gradients_are_averaged_where_they_lie(found: Found, count: int) -> None:
    calls = found[2][f"calls ddp bf16 compiled m{count}"]
    assert calls == ["allreduce_coalesced_ float32", "allreduce_ float32"]


@pytest.mark.parametrize(("world", "name"), cases("resume", RESUMED, "ddp"))
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(found: Found, world: int, name: str) -> None:
    check_resumed(found[world][f"resume {name}"])


def test_a_sharded_optimizer_resumes_on_one_rank(found: Found) -> None:
    check_moved(found[1]["move ddp dp2 sharded to dp1"])


@pytest.mark.long
@pytest.mark.parametrize("name", ["dp2 compiled to dp1 fused", "dp2 fused to dp1 compiled"])
def test_either_update_goes_on_from_the_others_checkpoint(found: Found, name: str) -> None:
    check_moved(found[1][f"move ddp fp16 {name}"], "fp16")


@pytest.mark.parametrize(("world", "name"), cases("break", BROKEN, "ddp"))
def test_a_gradient_that_is_not_finite_changes_nothing(found: Found, world: int, name: str) -> None:
    check_broken(found[world][f"break {name}"], fp16="fp16" in name)


def test_nothing_is_printed(found: Found) -> None:
    assert [found[world]["output"] for world in TRAININGS] == ["", "", ""]
