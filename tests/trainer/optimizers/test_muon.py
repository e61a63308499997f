"""Muon's arithmetic beside torch.optim.Muon's, the matrices that it updates, and the pieces that ranks have of them."""

import math
import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.engines.base.owners import spread
from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.weights.names import parts_of, stored_sizes
from hpc_gpt.trainer.checkpoints.states import Share
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel, full_name, name_parameter, split_of
from hpc_gpt.trainer.optimizers.matrix_exchange import MatrixExchange, piece_of, units_of
from hpc_gpt.trainer.optimizers.muon import Muon
from hpc_gpt.trainer.optimizers.newton_schulz import is_hidden, matrices_in, orthogonal
from tests.allocated import peak, profiled
from tests.distributed.equality_cases import MODELS, SEQ, VOCAB
from tests.distributed.mixtures import FAMILIES

SHAPES = [(64, 64), (128, 64), (64, 256), (96, 32), (33, 99), (1, 64), (64, 1), (30, 7), (256, 256), (512, 128),
          (128, 640), (384, 128)]  # fmt: skip


def parameter(name: str, *size: int, split: Split | None = None) -> nn.Parameter:
    return name_parameter(nn.Parameter(torch.randn(size)), name, split or Split(0))


def steps(optimizer: torch.optim.Optimizer, parameters: list[nn.Parameter]) -> list[Tensor]:
    """The parameters after four steps with the same gradients, at rates that change."""
    generator = torch.Generator().manual_seed(3)
    for step in range(4):
        for one in parameters:
            one.grad = torch.randn(one.shape, generator=generator)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        optimizer.step()
    return [one.detach() for one in parameters]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_update_has_the_bits_of_torchs_muon(shape: tuple[int, int]) -> None:
    ours = [parameter("blocks.0.attention.projection.weight", *shape)]
    theirs = [nn.Parameter(ours[0].detach().clone())]
    train = Train(optimizer="muon", weight_decay=0.1)
    torchs = torch.optim.Muon(theirs, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    updated = steps(Muon([{"params": ours, "weight_decay": 0.1}, {"params": []}], train), ours)
    assert torch.equal(*updated, *steps(torchs, theirs))


@pytest.mark.parametrize("size", [(8, 24, 16), (8, 16, 24), (3, 1, 5)], ids=str)
def test_experts_are_updated_one_by_one(size: tuple[int, int, int]) -> None:
    """Together they are products of a stack; each has what it has alone."""
    stack = torch.randn(size)
    alone = [orthogonal(one.clone(), 5, torch.float32) for one in stack]
    assert torch.allclose(orthogonal(stack.clone(), 5, torch.float32), torch.stack(alone), atol=1e-6)


def test_experts_beyond_a_stack_are_computed_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, parts = (parameter("blocks.0.experts.up.weight", 5, 8, 4, split=Split(1, 2)) for _ in range(2))
    parts.data.copy_(whole.detach())
    train = Train(optimizer="muon", muon_dtype="fp32")
    steps(Muon([{"params": [whole], "weight_decay": 0.0}, {"params": []}], train), [whole])
    monkeypatch.setattr("hpc_gpt.trainer.optimizers.matrix_stacks.stack_size", lambda *_: 3)
    steps(Muon([{"params": [parts], "weight_decay": 0.0}, {"params": []}], train), [parts])
    assert torch.allclose(whole, parts, atol=1e-6)


def shape_of(sizes: dict[str, Any]) -> ModelShape:
    return ModelShape(**{"layers": 2, "heads": 4, "vocab": VOCAB, "seq": SEQ, "tied": False} | sizes)


@pytest.mark.parametrize("sizes", [*MODELS.values(), *FAMILIES.values()], ids=[*MODELS, *FAMILIES])
def test_hidden_matrices_are_those_of_the_models_class(sizes: dict[str, Any]) -> None:
    shape = shape_of(sizes)
    stored, left = stored_sizes(shape), set()
    model = Gpt(shape, 1, TensorParallel(empty=partial(torch.empty, device="meta")))
    for one in model.parameters():
        if not is_hidden(one):
            left.add(re.sub(r"^blocks\.\d+\.", "", full_name(one)) if one.ndim > 1 else "")
            continue
        of_class = [stored[part.name] for part in parts_of(shape, full_name(one))]
        if of_class == [(shape.hidden, 3 * shape.hidden)]:  # GPT-2's class has Q, K and V in one
            of_class = 3 * [(shape.hidden, shape.hidden)]
        ours = [each for matrix in matrices_in(one, split_of(one)) for each in matrix.view(-1, *matrix.shape[-2:])]
        assert [sorted(each.shape) for each in ours] == [sorted(size) for size in of_class], full_name(one)
    assert left <= {"", "embedding.weight", "position.weight", "head.weight", "router.weight", "shared_gate.weight"}


LAID = [
    (Split(0, 3), (30, 7), 1, 4),
    (Split(0, (12, 4, 4)), (20, 6), 2, 3),
    (Split(0, (12, 4, 4)), (20, 6), 4, 1),
    (Split(1), (10, 8), 2, 4),
    (Split(0), (3, 5), 1, 8),  # ranks without a row
    (Split(1, 2), (6, 8, 4), 2, 1),
    (Split(2), (6, 8, 4), 2, 1),
]


@pytest.mark.parametrize(("split", "size", "tp", "shards"), LAID, ids=str)
def test_pieces_of_all_ranks_are_the_matrices(split: Split, size: tuple[int, ...], tp: int, shards: int) -> None:
    """Cut as FSDP2 and tp cut a parameter, and put together by the pieces."""
    whole = torch.arange(math.prod(size)).view(size)
    held = [
        part
        for tp_shares in zip(*((list(split.shard(whole, rank, tp).chunk(shards)) + [whole[:0]] * shards)[:shards]
                               for rank in range(tp)), strict=True)
        for part in tp_shares
    ]  # fmt: skip
    count = math.prod(size) // (tp if len(size) == 3 else tp * shards)
    share = Share("blocks.0.up.weight", size, split, 0, tp, 0, count, size[0])
    matrices = matrices_in(whole, split)
    units = [*units_of(0, share)]
    for unit in units:
        found = torch.full(unit.shape, -1)
        for rank, own in enumerate(held):
            piece = piece_of(share, unit, shards, rank)
            if piece.size:
                part = (own if own.ndim == 3 else own.unsqueeze(0))[unit.experts, piece.own_rows]
                assert part.numel() == piece.size
                found[:, piece.rows, piece.columns] = part
        wanted = matrices[unit.part] if whole.ndim == 2 else matrices[0].view(size[0], -1, *unit.shape[1:])
        assert torch.equal(found, wanted.unsqueeze(0) if whole.ndim == 2 else wanted[unit.experts, unit.part])
    assert sum(math.prod(unit.shape) for unit in units) == whole.numel()


def test_dear_updates_are_spread_first() -> None:
    assert spread([1, 5, 2, 2], 2) == [1, 0, 1, 1]


class Alone:
    """A group of four ranks of which this is the first; from the others come zeros."""

    get_rank, get_world_size = staticmethod(lambda _: 0), staticmethod(lambda _: 4)

    @staticmethod
    def all_to_all_single(arrived: Tensor, numbers: Tensor, received: list[int], sent: list[int], group: Any) -> None:
        arrived.zero_()


@pytest.mark.parametrize("split", [Split(0, 3), Split(1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_rank_has_two_matrices_beside_its_share(
    split: Split, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it sends and receives, before and after Newton-Schulz; a rank whose rows are of Q sends some more of Qs."""
    tp, size, count = 2, (768, 256), len(split.ranges(768, 0, 1))
    held = []
    for number in range(4):
        one = parameter(f"blocks.{number}.weight", *[384, 256] if split.dim == 0 else [768, 128], split=split)
        one.grad = torch.randn(one.shape)
        held.append((one, Share(full_name(one), size, split, 0, tp, 0, one.numel() // 2, 768)))
        one.data, one.grad = one.data[: len(one) // 2], one.grad[: len(one) // 2]
    monkeypatch.setattr("hpc_gpt.trainer.optimizers.matrix_exchange.dist", Alone)
    exchange = MatrixExchange(held, 2, None, dtype)
    matrix = dtype.itemsize * math.prod(size) / count
    update = torch.no_grad()(lambda: exchange.update(1e-3, 5))
    monkeypatch.setattr("hpc_gpt.trainer.optimizers.matrix_exchange.orthogonal", lambda update, *_: update)
    assert 1.9 * matrix <= peak(profiled(update)) <= 2.3 * matrix
