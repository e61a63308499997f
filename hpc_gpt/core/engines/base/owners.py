"""The owners of parameters: of the ranks that hold the same ones, each updates some, and sends these to the others.

The trainer deals parameters by these functions; a plan of memory, time and sends asks the same ones.
"""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from hpc_gpt.core.optimizers import OptimizerFacts, optimizer_named
from hpc_gpt.core.settings.model_shape import ModelShape

T = TypeVar("T")


class Owned(NamedTuple):
    """A parameter of `size` numbers, and the hidden matrices in it: (number of them, rows, columns) of each part."""

    name: str
    size: int
    matrices: tuple[tuple[int, int, int], ...] = ()


class Deal(NamedTuple):
    """The parameters that each of some ranks, `stride` apart, updates for all of them."""

    owned: tuple[tuple[Owned, ...], ...]
    stride: int = 1

    def fullest(self, figure_of: Callable[[Owned], float]) -> float:
        """The largest sum of a figure over the parameters of a rank."""
        return max(sum(map(figure_of, own)) for own in self.owned)

    @property
    def stacks(self) -> list[tuple[int, int, int]]:
        """`stacks_of` all ranks."""
        return [stack for own in self.owned for stack in stacks_of(own)]


def deal(parameters: Iterable[Owned], optimizer: OptimizerFacts, ranks: int) -> dict[str, int]:
    """The rank that updates each parameter, by its name. The ranks take about equally long."""
    ordered = sorted(parameters)  # so that all who ask in any order have one answer
    costs = [optimizer.update_cost(one.size, one.matrices) for one in ordered]
    return dict(zip((one.name for one in ordered), spread(costs, ranks), strict=True))


def spread(costs: Sequence[float], ranks: int) -> list[int]:
    """A rank for each cost: the dearest first, each to the rank that has the least so far."""
    loads = [(0.0, rank) for rank in range(ranks)]
    found = [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda number: -costs[number]):
        load, found[number] = loads[0]
        heapq.heapreplace(loads, (load + costs[number], found[number]))
    return found


def rounds_of(units: Sequence[T], costs: Sequence[float], ranks: int) -> list[tuple[T | None, ...]]:
    """The units that the ranks compute at once, each at most one: the dearest first."""
    by_rank: list[list[T]] = [[] for _ in range(ranks)]
    owners = spread(costs, ranks)
    for number in sorted(range(len(units)), key=lambda number: -costs[number]):
        by_rank[owners[number]].append(units[number])
    return [*zip_longest(*by_rank)]


@lru_cache(maxsize=4096)
def rounds_s(units: tuple[tuple[float, float, int], ...], ranks: int) -> float:
    """Seconds of the rounds in which ranks compute units at once; of each kind of units (cost, seconds, number)."""
    each = [(cost, seconds) for cost, seconds, count in units for _ in range(count)]
    rounds = rounds_of([seconds for _, seconds in each], [cost for cost, _ in each], ranks)
    return sum(max(seconds or 0.0 for seconds in one) for one in rounds)


def stack_size(rows: int, columns: int) -> int:
    """The number of equal matrices that are computed together: those of 64 MiB in bf16, at least one."""
    return max(1, 2**25 // (rows * columns))


def stacks_of(parameters: Iterable[Owned]) -> list[tuple[int, int, int]]:
    """(number of matrices, rows, columns) of each stack in which a rank updates the matrices of its parameters."""
    counts: dict[tuple[int, int], int] = {}
    for count, *size in (matrix for one in parameters for matrix in one.matrices):
        counts[(size[0], size[1])] = counts.get((size[0], size[1]), 0) + count
    stacks = []
    for (rows, columns), count in counts.items():
        most = stack_size(rows, columns)
        stacks += [(min(most, count - first), rows, columns) for first in range(0, count, most)]
    return stacks


@lru_cache(maxsize=64)
def parameters_of(shape: ModelShape, ep: int = 1) -> tuple[Owned, ...]:
    """The parameters of our model on a rank that has all, but of `ep` ranks its experts, in the order of the model."""
    from hpc_gpt.core.weights.names import size_of  # few commands deal parameters

    padded, found = replace(shape, vocab=shape.padded_vocab), []
    for name in shape.parameter_names:
        first, *others = size_of(padded, name)
        size, matrices = first, []
        for length in others:
            size *= length
        prefix, _, kind = name.rpartition(".")
        if name.startswith("blocks.") and kind == "weight":
            _, number, layer = prefix.split(".", 2)
            parts = [one for one in shape.kind_of(int(number)).products.get(layer, ()) if one.split != "none"]
            matrices = [(one.copies // (ep if one.is_routed else 1), one.rows, one.columns) for one in parts]
            size //= ep if any(one.is_routed for one in parts) else 1
        found.append(Owned(name, size, tuple(matrices)))
    return tuple(found)


@lru_cache(maxsize=256)
def owned_by_rank(
    shape: ModelShape, optimizer: str, ranks: int, ep: int = 1, is_routed: bool | None = None, hidden_only: bool = False
) -> tuple[tuple[Owned, ...], ...]:
    """The parameters of each of the ranks that hold all of them: those of routed experts, all but these, or all
    (`is_routed` None); with `hidden_only` those with hidden matrices."""
    parameters = [
        one
        for one in parameters_of(shape, ep)
        if is_routed in (None, ".experts." in one.name) and (one.matrices or not hidden_only)
    ]
    owners = deal(parameters, optimizer_named(optimizer), ranks)
    return tuple(tuple(one for one in parameters if owners[one.name] == rank) for rank in range(ranks))
