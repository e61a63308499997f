"""Attention of sequences whose parts are on several ranks: its bits, and what each rank keeps."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.trainer.model.attention import mix
from hpc_gpt.trainer.train.engines.torch_private import flash_of_last
from tests.distributed.ranks import launch_ranks
from tests.model.context_worker import EXCHANGES, HEADS, RECOMPUTES, SHAPES, name_of

pytestmark = pytest.mark.xdist_group("context-parallel")  # one launch serves all


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("context")
    launch_ranks("tests.model.context_worker", 4, folder)
    figures: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return figures


@pytest.mark.parametrize(("heads", "key_heads", "cp"), HEADS)
def test_attention_with_some_heads_has_the_bits_of_one_process(found, heads, key_heads, cp):
    far = found[name_of("heads", heads, key_heads, cp)]
    assert far["output"] == far["query"] == 0
    # The gradients of a repeated head are summed in another order.
    limit = 3e-6 if key_heads < cp else 0
    assert far["key"] <= limit
    assert far["value"] <= limit


@pytest.mark.parametrize(("heads", "key_heads", "cp"), HEADS)
def test_attention_of_two_chunks_is_that_of_one_process(
    found: dict[str, Any], heads: int, key_heads: int, cp: int
) -> None:
    # The kernel sums over as many keys as a chunk sees.
    assert max(found[name_of("keys", heads, key_heads, cp)].values()) <= 3e-6


@pytest.mark.parametrize("expands", [False, True])
def test_a_kernel_for_the_last_queries_does_what_the_mask_does(expands: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, *size, 8, generator=generator) for size in ((3, 4), (7, 2), (7, 2)))

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / 8**0.5
        sees = torch.arange(7) <= torch.arange(4, 7)[:, None]
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value

    masked = mix(query, key, value, expands)
    torch.testing.assert_close(mix(query, key, value, expands, last=by_hand), masked, atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [64, 12])
def test_the_flash_kernel_for_the_last_queries_gives_their_shape(width: int) -> None:
    # Without a GPU its shapes alone: its numbers are not tested here.
    query, key = (torch.empty(2, *size, width, dtype=torch.bfloat16, device="meta") for size in ((4, 3), (2, 7)))
    assert flash_of_last(query, key, key).shape == query.shape


@pytest.mark.parametrize("recompute", RECOMPUTES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_keeps_its_part_of_the_activations(found, exchange, shape, recompute):
    for cp, share in found[f"{exchange} {shape} {recompute}"].items():
        assert share * int(cp) == pytest.approx(1, rel=0.02)
