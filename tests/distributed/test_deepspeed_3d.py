"""Engine deepspeed-3d does what its switches say, and not only the right sums: stages, code, memory, kernels."""

import json
from typing import Any

import pytest

from tests import marked
from tests.distributed.deepspeed_3d_worker import HOWS, SHORT_HOWS
from tests.distributed.equality_cases import GLOBAL_BATCH, SEQ
from tests.distributed.ranks import launch_ranks

pytestmark = pytest.mark.xdist_group("deepspeed-3d")

Stage = dict[str, Any]
ROWS = GLOBAL_BATCH // 2  # of a micro-batch


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Stage]:
    """What the first and the second rank saw: the two stages, or tensor-parallel ranks."""
    folder = tmp_path_factory.mktemp("deepspeed-3d")
    output = launch_ranks("tests.distributed.deepspeed_3d_worker", 2, folder)
    assert output == ""
    first, last = json.loads((folder / "results.json").read_text())
    return first, last


def test_the_partition_deals_out_the_blocks(looks: tuple[Stage, Stage]) -> None:
    # Evenly; by parameters, the first stage having the positions too; as the user says.
    assert list(zip(looks[0]["stages"], looks[1]["stages"], strict=True)) == [(2, 1), (1, 2), (1, 2), (2, 1)]


@pytest.mark.parametrize("how", marked(HOWS, [how for how in HOWS if how not in SHORT_HOWS]))
def test_a_stage_is_compiled_once(looks: tuple[Stage, Stage], how: str) -> None:
    first, last = {"none": (0, 0), "block": (1, 2), "whole": (1, 2)}.get(how, (2, 2))
    # The last stage has its loss beside the blocks, or the forward pass. No break, and nothing new in later steps.
    assert looks[0]["compiled"][how] == [first, first, 0]
    assert looks[1]["compiled"][how] == [last, last, 0]


def test_the_last_stage_never_has_a_micro_batchs_whole_logits(looks: tuple[Stage, Stage]) -> None:
    whole = ROWS * SEQ * 64
    assert looks[1]["logits"]["1"] == whole
    assert looks[1]["logits"]["3"] <= whole / 3 * 1.02
    assert looks[0]["logits"] == {"1": 0, "3": 0}


@pytest.mark.parametrize("rank", [0, 1])
def test_sequence_parallelism_halves_what_lies_between_blocks(looks: tuple[Stage, Stage], rank: int) -> None:
    assert looks[rank]["between_blocks"] == {"False": [ROWS, SEQ, 32], "True": [ROWS, SEQ // 2, 32]}


@pytest.mark.parametrize(("stage", "blocks"), [(0, 2), (1, 1)])
def test_activations_go_to_the_host_as_recomputation_leaves_them(looks, stage, blocks):
    found = looks[stage]["offloaded"]
    assert found["full"] == 2 * blocks * ROWS * SEQ * 32  # a block's input, of two micro-batches
    assert found["full"] < found["selective"] < found["none"]


def test_the_optimizer_runs_the_kernels_asked_for(looks: tuple[Stage, Stage]) -> None:
    assert looks[0]["modes"] == {"fused": [True, False], "foreach": [False, True], "for-loop": [False, False]}
