"""Hidden matrices that ranks have whole: one of the ranks that hold a parameter computes its update, and sends it.

Equal matrices of a rank are computed together. The ranks that hold a parameter may be of two kinds, on which equal
products differ by rounding: if each computed the update by itself, their weights would part.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.engines.base.owners import stack_size
from hpc_gpt.trainer.model.tensor_parallel import split_of
from hpc_gpt.trainer.optimizers.newton_schulz import matrices_in, orthogonal, rate_of


class _Place(NamedTuple):
    """Matrices that follow each other in the `part` of a parameter (`matrices_in`)."""

    parameter: nn.Parameter
    part: int
    first: int
    matrices: int

    def view(self, whole: Tensor) -> Tensor:
        """The matrices in the parameter or in its gradient, [matrices, rows, columns]."""
        part = matrices_in(whole, split_of(self.parameter))[self.part]
        return part.unsqueeze(0) if part.ndim == 2 else part[self.first : self.first + self.matrices]


class _Stack(NamedTuple):
    """Equal matrices that are computed together."""

    places: list[_Place]
    size: tuple[int, int, int]  # matrices, rows, columns


class MatrixStacks:
    """The updates of `parameters` that each rank of `group` has whole (None: this rank alone has them).

    `owners`: the rank in the group that computes each parameter's. `dtype`: that of the products, and of the updates on
    their way. Beside a stack of its own a rank has two that arrive.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        dtype: torch.dtype,
        group: dist.ProcessGroup | None = None,
        owners: Mapping[nn.Parameter, int] | None = None,
    ) -> None:
        self.parameters, self._dtype, self._group = parameters, dtype, group
        self._rank = 0 if group is None else dist.get_rank(group)
        parameters_by_rank: list[list[nn.Parameter]] = [
            [] for _ in range(1 if group is None else dist.get_world_size(group))
        ]
        for one in parameters:
            parameters_by_rank[owners[one] if owners else 0].append(one)
        self._rounds = [*zip_longest(*map(_stack_matrices, parameters_by_rank))]

    def update(self, lr: float, steps: int) -> None:
        """Updates each matrix by `steps` of Newton-Schulz from its owner's `grad`, at AdamW's rate `lr`. Collective."""
        for stacks in self._rounds:
            self._update_round(stacks, lr, steps)

    def _update_round(self, stacks: Sequence[_Stack | None], lr: float, steps: int) -> None:
        for stack, results in self._results(stacks, steps):
            rate, first = rate_of(lr, *stack.size[1:]), 0
            for place in stack.places:
                place.view(place.parameter).add_(results[first : first + place.matrices], alpha=-rate)
                first += place.matrices

    def _results(self, stacks: Sequence[_Stack | None], steps: int) -> Iterator[tuple[_Stack, Tensor]]:
        """Computes this rank's stack of a round; yields each rank's with its result. One is used while the next
        arrives."""
        own = stacks[self._rank]
        result = None if own is None else self._compute_stack(own, steps)
        before: tuple[_Stack, Tensor, dist.Work | None] | None = None
        for rank, stack in enumerate(stacks):
            if stack is None:
                continue
            coming = (stack, *self._send(stack, result, rank))
            if before is not None:
                yield _wait_for(*before)
            before = coming
        if before is not None:
            yield _wait_for(*before)

    def _compute_stack(self, stack: _Stack, steps: int) -> Tensor:
        result = orthogonal(self._stack_gradients(stack), steps, self._dtype)
        if self._group is not None:
            result = result.contiguous()
        return result if result.ndim == 3 else result.unsqueeze(0)

    def _stack_gradients(self, stack: _Stack) -> Tensor:
        """The gradients of a stack, [matrices, rows, columns], or of one matrix."""
        gradients, first = torch.empty(stack.size, dtype=self._dtype, device=self.parameters[0].device), 0
        for place in stack.places:
            assert place.parameter.grad is not None
            gradients[first : first + place.matrices].copy_(place.view(place.parameter.grad))
            first += place.matrices
        return gradients if len(gradients) > 1 else gradients[0]

    def _send(self, stack: _Stack, own: Tensor | None, owner: int) -> tuple[Tensor, dist.Work | None]:
        """Begins to send a result from its owner to the others."""
        if self._group is None:
            assert own is not None
            return own, None
        if owner != self._rank or own is None:
            own = torch.empty(stack.size, dtype=self._dtype, device=self.parameters[0].device)
        source = dist.get_global_rank(self._group, owner)
        return own, dist.broadcast(own, source, self._group, async_op=True)


def _wait_for(stack: _Stack, result: Tensor, work: dist.Work | None) -> tuple[_Stack, Tensor]:
    if work is not None:
        work.wait()
    return stack, result


def _stack_matrices(parameters: Sequence[nn.Parameter]) -> list[_Stack]:
    """The stacks of a rank that computes the updates of these parameters, as `owners.stacks_of` has them."""
    by_size: dict[tuple[int, int], list[_Stack]] = {}
    for one in parameters:
        for part, matrix in enumerate(matrices_in(one, split_of(one))):
            rows, columns = matrix.shape[-2:]
            stacks, count, first = by_size.setdefault((rows, columns), []), len(matrix) if matrix.ndim == 3 else 1, 0
            while first < count:
                if not stacks or stacks[-1].size[0] == stack_size(rows, columns):
                    stacks.append(_Stack([], (0, rows, columns)))
                places, (filled, *_) = stacks[-1]
                added = min(stack_size(rows, columns) - filled, count - first)
                stacks[-1] = _Stack([*places, _Place(one, part, first, added)], (filled + added, rows, columns))
                first += added
    return [stack for stacks in by_size.values() for stack in stacks]
