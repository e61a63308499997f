"""Layers whose weights are split over the ranks of a tensor-parallel group.

Shoeybi et al. 2019 (Megatron-LM), section 3: a column-parallel layer followed by a row-parallel one needs one
all-reduce forward (after the row-parallel layer) and one backward (before the column-parallel one). Embedding and head
split the vocabulary, as the loss in `vocab_loss` does. With a group of one every layer here is the plain layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.trainer.model.collectives import all_gather, apply, reduce_scatter
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.initial_weights import InitialWeights, SeededWeights


@dataclass(frozen=True)
class Split:
    """The split of a parameter over a tensor-parallel group: along `dim`, each of its parts separately.

    `parts` is the number of equal parts, or the rows of each. The fused QKV weight has parts = 3, or, with
    grouped queries, the rows of Q, K and V: every rank holds its share of each.
    """

    dim: int
    parts: int | tuple[int, ...] = 1

    def shard(self, full: Tensor, rank: int, size: int) -> Tensor:
        """The piece of `full` that `rank` of `size` holds; a copy that keeps nothing of `full` alive."""
        pieces = [part.chunk(size, self.dim)[rank] for part in self._parts(full, 1)]
        return torch.cat(pieces, self.dim)

    def ranges(self, length: int, rank: int, size: int) -> list[tuple[int, int]]:
        """Returns (begin, length) of each piece that `shard` joins, in a full tensor that has `length` along `dim`."""
        parts = [length // self.parts] * self.parts if isinstance(self.parts, int) else list(self.parts)
        begins = [sum(parts[:number]) for number in range(len(parts))]
        return [(begin + rank * (rows // size), rows // size) for begin, rows in zip(begins, parts, strict=True)]

    def merge(self, shards: list[Tensor]) -> Tensor:
        """The full tensor from the shards of all ranks, in rank order; undoes `shard`."""
        parts = zip(*(self._parts(shard, len(shards)) for shard in shards), strict=True)
        return torch.cat([torch.cat(list(part), self.dim) for part in parts], self.dim)

    def _parts(self, tensor: Tensor, size: int) -> tuple[Tensor, ...]:
        """The parts of the full tensor (`size` 1), or of the shard that one of `size` ranks has."""
        if isinstance(self.parts, int):
            return tensor.chunk(self.parts, self.dim)
        parts: tuple[Tensor, ...] = torch.split(tensor, [rows // size for rows in self.parts], self.dim)
        return parts

    def stored(self) -> list[Any]:
        """The split as a list for JSON, which `of_stored` reads."""
        return [self.dim, self.parts if isinstance(self.parts, int) else list(self.parts)]

    @staticmethod
    def of_stored(stored: Sequence[Any]) -> Split:
        """The split that `stored` wrote."""
        dim, parts = stored
        return Split(dim, parts if isinstance(parts, int) else tuple(parts))


@dataclass(frozen=True)
class Tile:
    """The piece of a rank's share that one parameter holds: the `number`-th of `count` along dimension 0."""

    number: int
    count: int


def name_parameter(
    parameter: nn.Parameter, name: str, split: Split | None = None, tile: Tile | None = None
) -> nn.Parameter:
    """Sets attributes of the parameter: its full name, how it is split, and which tile of the rank's share it is.

    DeepSpeed counts a parameter in the gradient norm once for each tensor-parallel group, unless it is marked
    `model_parallel`. Without the mark the norm of a split parameter is wrong, without an error.
    """
    parameter.full_name = name  # type: ignore[attr-defined]
    parameter.tp_split = split  # type: ignore[attr-defined]
    parameter.tp_tile = tile  # type: ignore[attr-defined]
    parameter.model_parallel = split is not None  # type: ignore[attr-defined]
    parameter.tensor_model_parallel = split is not None  # type: ignore[attr-defined]
    return parameter


def full_name(parameter: nn.Parameter) -> str:
    """The parameter's name in the whole model: the same on every rank, in every layout, and for all tiles of a
    weight."""
    name = parameter.full_name  # type: ignore[attr-defined]
    assert isinstance(name, str)
    return name


def split_of(parameter: nn.Parameter) -> Split | None:
    """The parameter's split over the tensor-parallel group; None if every rank holds the whole parameter."""
    split = parameter.tp_split  # type: ignore[attr-defined]
    assert split is None or isinstance(split, Split)
    return split


def tile_of(parameter: nn.Parameter) -> Tile | None:
    """The parameter's tile of the rank's share; None if the parameter is the whole share."""
    tile = parameter.tp_tile  # type: ignore[attr-defined]
    assert tile is None or isinstance(tile, Tile)
    return tile


def is_of_experts(parameter: Tensor) -> bool:
    """Whether a parameter has the weights of routed experts, [experts, outputs, inputs]."""
    return parameter.ndim == 3


class TensorParallel:
    """A rank's place in its tensor-parallel group, and the collectives of that group.

    Here the activations between two blocks are the same on every rank; `SequenceParallel` splits them by position.
    Layers call `enter` and `leave` at the part of the model whose weights are split. Every parameter is made here, on
    `device`, from its size, and then filled from the `given` source, by default weights that are drawn. An engine that
    keeps the values elsewhere, as master weights or shards, passes `empty`, which makes a parameter's memory, and puts
    the values into their place by `fill`.

    The group computes its `context`'s part of each sequence, and has its part of the `experts`.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        group: dist.ProcessGroup | None = None,
        given: InitialWeights | None = None,
        device: torch.device | None = None,
        empty: Callable[[Sequence[int]], Tensor] | None = None,
        context: ContextParallel | None = None,
        experts: ExpertParallel | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self.group = group
        self.given = self.source = given
        self.device = device
        self.empty = empty
        self.context = context or ContextParallel()
        self.experts = experts or ExpertParallel()

    def initial(self, seed: int, layers: int) -> InitialWeights:
        """The source of the initial weights, which draws or reads them."""
        self.source = self.given or SeededWeights(seed, layers)
        return self.source

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        """Reduces `tensor` over the group, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, op, group=self.group)
        return tensor

    @property
    def parts(self) -> int:
        """How many ranks share the positions between blocks: tp with sequence parallelism, else 1."""
        return 1

    def sum_forward(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' `partial` (overwritten); the gradient passes through unchanged."""
        if self.size == 1:
            return partial
        return apply(_SumForward, partial, self) if torch.is_grad_enabled() else self.all_reduce(partial)

    def sum_backward(self, replicated: Tensor) -> Tensor:
        """`replicated` unchanged; its gradient is the sum of all ranks' gradients."""
        return apply(_SumBackward, replicated, self) if self.size > 1 else replicated

    def enter(self, hidden: Tensor) -> Tensor:
        """Activations between blocks -> the input of a column-parallel layer."""
        return self.sum_backward(hidden)

    def leave(self, partial: Tensor) -> Tensor:
        """A row-parallel layer's product on this rank (overwritten) -> its sum over the ranks, between blocks."""
        return self.sum_forward(partial)

    def column_linear(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor] = F.linear
    ) -> Tensor:
        """`enter`, then the column-parallel layer's product, by `multiply`."""
        return multiply(self.enter(hidden), weight, bias)

    def shared(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        """The given parameters, which every rank holds whole, for use between blocks."""
        return parameters

    def positions(self, count: int) -> slice:
        """The places of this rank's `count` positions among the group's."""
        return slice(0, count)

    def gather(self, local: Tensor) -> Tensor:
        """This rank's positions between blocks, [batch, seq / parts, ...] -> those of the group."""
        return local

    def gather_rows(self, local: Tensor) -> Tensor:
        """[rows, ...] of each rank -> [tp x rows, ...] on all, in rank order."""
        gathered = local.new_empty(self.size * local.shape[0], *local.shape[1:])
        all_gather(gathered, local.contiguous(), group=self.group)
        return gathered

    def scatter_rows(self, partial: Tensor) -> Tensor:
        """[tp x rows, ...] of each rank -> this rank's rows of their sum; undoes `gather_rows` in a backward pass."""
        local = partial.new_empty(partial.shape[0] // self.size, *partial.shape[1:])
        reduce_scatter(local, partial.contiguous(), group=self.group)
        return local

    def parameter(self, name: str, full: Tensor, split: Split | None = None) -> nn.Parameter:
        """This rank's share of the `full` tensor as a parameter."""
        return name_parameter(nn.Parameter(self.share(name, full, split)), name, split)

    def whole(self, name: str, initial: Tensor) -> Tensor:
        """The value of a buffer, whole on every rank, which is `initial` if weights are drawn."""
        assert self.source is not None
        self.source.set_constant(name, initial)
        self.fill(name, values := initial.clone(), None, initial.shape)
        return values.to(self.device)

    def share(self, name: str, full: Tensor, split: Split | None) -> Tensor:
        """This rank's share of the parameter of the size of `full`: a value that is not drawn, or a size alone."""
        assert self.source is not None
        if not full.is_meta:
            self.source.set_constant(name, full)
        size = list(full.shape)
        if split is not None:
            size[split.dim] //= self.size
        if self.empty is None:
            share = torch.empty(size, device=self.device)
            self.fill(name, share, split, full.shape)
            return share
        return self.empty(size)

    def fill(
        self, name: str, rows: Tensor, split: Split | None, size: Sequence[int], first: int = 0, column: int = 0
    ) -> None:
        """Fills `rows`, which begin at row `first` of this rank's share of a parameter of `size`, with their values.

        `column` is the first column of `rows` in a share that is not split by columns. Weights of experts are read as
        one matrix, in which the rows of an expert follow those of the one before; their `first` and `size` are of this
        rank's experts alone.
        """
        assert self.source is not None
        self.source.taken.add(name)
        if rows.ndim == 3:
            first = (first + self.experts.first(size[0])) * rows.shape[1]
            experts, height, width = size[0] * self.experts.size, *size[1:]
            rows, size = rows.view(len(rows) * rows.shape[1], rows.shape[2]), (experts * height, width)
            if split is not None:
                assert isinstance(split.parts, int)
                split = Split(0, split.parts * experts) if split.dim == 1 else Split(1)
        split, rank, ranks = (Split(0), 0, 1) if split is None else (split, self.rank, self.size)
        at = 0  # the place in the share, along `split.dim`
        for begin, length in split.ranges(size[split.dim], rank, ranks):
            if split.dim == 1:
                self.source.read(name, rows.narrow(1, at, length), first, begin)
            else:
                low, high = max(first, at), min(first + len(rows), at + length)
                if low < high:
                    self.source.read(name, rows[low - first : high - first], begin + low - at, column)
            at += length


class _SumForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial: Tensor, tp: TensorParallel) -> Tensor:
        # In place: the input is the output of a matmul, which no backward pass reads.
        ctx.mark_dirty(partial)
        return tp.all_reduce(partial)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _SumBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, replicated: Tensor, tp: TensorParallel) -> Tensor:
        ctx.tp = tp
        return replicated.view_as(replicated)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        # In place: a linear layer's backward pass has just made this gradient, and nothing else uses it.
        return ctx.tp.all_reduce(gradients[0].contiguous()), None


class VocabParallelEmbedding(nn.Module):
    """An embedding whose rows are split. As a head it computes the logits of this rank's rows.

    The row of the `pad` token begins as zeros and gets no gradient as an embedding, as with torch's `padding_idx`.
    """

    def __init__(
        self, name: str, rows: int, hidden: int, tp: TensorParallel, initial: InitialWeights, pad: int | None = None
    ) -> None:
        super().__init__()
        self.tp = tp
        self.rows = rows // tp.size
        drawn = initial.normal(f"{name}.weight", (rows, hidden), zero_row=pad)
        self.weight = tp.parameter(f"{name}.weight", drawn, Split(0))
        self.pad = None if pad is None or pad // self.rows != tp.rank else pad % self.rows  # in this rank's share

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] token numbers -> [batch, seq, hidden], or this rank's positions of it."""
        if self.tp.size == 1:
            return F.embedding(tokens, self.weight, self.pad)
        index, is_local = local_index(tokens, self.tp.rank * self.rows, self.rows)
        embedded = F.embedding(index, self.weight, self.pad).masked_fill(~is_local.unsqueeze(-1), 0.0)
        return self.tp.leave(embedded)

    def logits(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, rows / tp]."""
        return self.scores(self.enter(hidden))

    def enter(self, hidden: Tensor) -> Tensor:
        """The first half of `logits`: [batch, seq, hidden], all positions on every rank."""
        return self.tp.enter(hidden)

    def scores(self, entered: Tensor) -> Tensor:
        """The second half, without communication, for any tokens: [..., hidden] -> [..., rows / tp]."""
        return F.linear(entered, self.weight)


class VocabParallelHead(VocabParallelEmbedding):
    """An untied output layer: it has the embedding's shape and split, and only computes logits."""

    def forward(self, hidden: Tensor) -> Tensor:
        return self.logits(hidden)


def local_index(tokens: Tensor, start: int, rows: int) -> tuple[Tensor, Tensor]:
    """Returns (row in this rank's share, 0 for a token in another share; whether the token is in this share)."""
    index = tokens - start
    is_local = (index >= 0) & (index < rows)
    return index.masked_fill(~is_local, 0), is_local
