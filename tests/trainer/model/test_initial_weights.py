"""Initial weights in blocks of rows: the same bits for any part of a weight, by any threads, and none in vain."""

import hashlib
import math
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from hpc_gpt.trainer.model import initial_weights
from hpc_gpt.trainer.model.initial_weights import SeededWeights

NAME, SIZE = "blocks.0.x.weight", (37, 24)


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads, and blocks of four rows."""
    monkeypatch.setattr(initial_weights, "_BLOCK", 4 * SIZE[1])
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def seeds(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that seed the blocks that are drawn."""
    texts: list[str] = []

    def noted(text: bytes) -> object:
        texts.append(text.decode())
        return hashlib.sha256(text)

    monkeypatch.setattr(initial_weights, "hashlib", SimpleNamespace(sha256=noted))
    return texts


def whole_of(size: tuple[int, ...], **how: int) -> torch.Tensor:
    """The whole weight; experts as one matrix."""
    later(size, **how).read(NAME, whole := torch.empty(math.prod(size[:-1]), size[-1]))
    return whole


def later(size: tuple[int, ...], **how: int) -> SeededWeights:
    drawn = SeededWeights(1, layers=2)
    assert drawn.normal(NAME, size, **how).is_meta
    return drawn


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(("row", "rows", "column", "columns"), [(0, 37, 0, 24), (5, 30, 7, 9), (35, 2, 0, 24)])
def test_any_part_of_a_weight_has_its_bits(workers: int, row: int, rows: int, column: int, columns: int) -> None:
    whole = whole_of(SIZE)
    torch.set_num_threads(workers)
    part = torch.empty(rows, columns, requires_grad=True).detach()
    later(SIZE).read(NAME, part, row, column)
    assert torch.equal(part, whole[row : row + rows, column : column + columns])
    assert len(set(whole.flatten().tolist())) > 0.99 * whole.numel(), "no block is like another"


def test_a_block_is_drawn_from_seed_name_and_first_row() -> None:
    seed = int.from_bytes(hashlib.sha256(f"1:{NAME}:4".encode()).digest()[:8], "little") >> 1
    block = torch.empty(4, 24).normal_(0.0, 0.02, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(whole_of(SIZE)[4:8], block)


def test_a_rank_draws_only_the_blocks_of_its_rows(seeds: list[str]) -> None:
    later(SIZE).read(NAME, torch.empty(6, 24), 9)
    assert sorted(seeds) == [f"1:{NAME}:12", f"1:{NAME}:8"]


def test_the_weights_of_an_expert_do_not_depend_on_the_others(seeds: list[str]) -> None:
    few, many = (whole_of((count, 6, 24)) for count in (2, 5))
    assert torch.equal(few, many[: 2 * 6])
    del seeds[:]
    later((5, 6, 24)).read(NAME, part := torch.empty(6, 24), 3 * 6)
    assert torch.equal(part, many[3 * 6 : 4 * 6])
    assert sorted(seeds) == [f"1:{NAME}.3:0", f"1:{NAME}.3:4"]


def test_a_row_of_zeros_is_in_its_block(seeds: list[str]) -> None:
    whole = whole_of(SIZE, zero_row=6)
    plain = whole_of(SIZE)
    assert not whole[6].any()
    assert torch.equal(whole[:6], plain[:6])
    assert torch.equal(whole[7:], plain[7:])
    later(SIZE, zero_row=6).read(NAME, part := torch.empty(3, 24), 5)
    assert torch.equal(part, whole[5:8])
