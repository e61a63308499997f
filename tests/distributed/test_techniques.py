"""Techniques over a tensor-parallel group of two: the whole model's gradients, and what each rank keeps."""

import json
from typing import Any

import pytest
import torch

from tests import marked
from tests.distributed.ranks import launch_ranks
from tests.distributed.techniques_worker import ALL_CASES, BROKEN, TIED, TOO_LONG

pytestmark = pytest.mark.xdist_group("techniques")

Results = dict[str, dict[str, Any]]
COMPILED = [name for name, (_, _, how) in ALL_CASES.items() if how != "none"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("techniques")
    output = launch_ranks("tests.distributed.techniques_worker", 2, folder)
    found: Results = json.loads((folder / "results.json").read_text())
    return found | {"": {"output": output}}


@pytest.mark.parametrize("name", marked(ALL_CASES, TOO_LONG))
def test_split_over_two_ranks_it_is_the_whole_model(results: Results, name: str) -> None:
    if name in COMPILED and "sequence" in name and torch.__version__ < "2.13":
        pytest.skip("torch before 2.13 compiles it to wrong gradients: train.engines.kernels refuses it")
    found = results[name]
    assert found["loss"] <= 1e-6
    assert found["loss_eval"] <= 1e-6
    assert found["gradient"] <= 1e-6, found["worst"]
    # What every rank holds whole must stay so, to the last digit.
    assert found["apart"] == 0.0


@pytest.mark.parametrize("name", BROKEN)
def test_a_missing_sum_of_sequence_parallelism_shows(results: Results, name: str) -> None:
    assert results[f"without {name}"]["gradient"] > 1e-3


def test_sequence_parallelism_keeps_a_share_of_the_positions_alone(results: Results) -> None:
    rows, seq, hidden = results["tp"]["between blocks"]
    assert results["sequence"]["between blocks"] == [rows, seq // 2, hidden]
    # A block keeps four tensors of what lies between: the input and the output of either norm.
    spared = TIED.layers * 4 * rows * (seq // 2) * hidden
    assert results["tp"]["kept"] - results["sequence"]["kept"] >= spared


@pytest.mark.parametrize("name", marked(COMPILED, TOO_LONG))
def test_collectives_do_not_break_the_compiled_code(results: Results, name: str) -> None:
    assert results[name]["graph_breaks"] == 0
    assert results[name]["graphs"] == (2 if "block" in name else 1)


def test_nothing_is_printed(results: Results) -> None:
    assert results[""]["output"] == ""
