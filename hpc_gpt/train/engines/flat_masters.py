"""Masters, halves and gradients end to end in flat buffers, so that one pass over each of them is a whole update.

A gradient's buffer begins to exist with the first gradient of a step and ends with the step: no forward pass has it
beside its activations. It holds halves where a step has one gradient a parameter, and fp32 sums where it has more, of
micro-batches or of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from hpc_gpt.train.engines.master_weights import MasterWeights
from hpc_gpt.train.engines.optimizer import by_decay

# Numbers between which a parameter begins: 128 bytes of halves, which every kernel takes as aligned.
_ALIGNED = 64
# Numbers whose squares add up in fp32 before these sums do in float64; a CPU would lose digits over more. A buffer is a
# multiple of it.
_SUMMED = 1024


class FlatGroup:
    """Parameters that decay alike: fp32 `masters`, their `halves`, and within a step their `gradients`, each flat."""

    def __init__(self, weights: Sequence[nn.Parameter], decays: bool, dtype: torch.dtype, sums: torch.dtype) -> None:
        self.decays = decays
        self._device, self._sums = weights[0].device, sums
        self._shapes = [weight.shape for weight in weights]
        self._starts = [0]  # and behind the last the end of all
        for shape in self._shapes:
            self._starts.append(self._starts[-1] + _rounded(shape.numel(), _ALIGNED))
        self._starts[-1] = _rounded(self._starts[-1], _SUMMED)
        self.masters = self._empty(torch.float32)
        self.halves = self._empty(dtype)
        self.gradients: Tensor | None = None

    def view(self, flat: Tensor, number: int) -> Tensor:
        """The place of parameter `number` in one of the buffers, or in another that is as long."""
        shape, start = self._shapes[number], self._starts[number]
        return flat[start : start + shape.numel()].view(shape)

    def views(self, flat: Tensor) -> list[Tensor]:
        """The places of all parameters, in order."""
        return [self.view(flat, number) for number in range(len(self._shapes))]

    def begin_gradients(self) -> Tensor:
        """The buffer, new where there is none; what it holds is to be written."""
        if self.gradients is None:
            self.gradients = self._empty(self._sums)
        return self.gradients

    def _empty(self, dtype: torch.dtype) -> Tensor:
        """A buffer whose gaps between parameters are zero, as they are read with the rest."""
        flat = torch.empty(self._starts[-1], dtype=dtype, device=self._device)
        for shape, start, following in zip(self._shapes, self._starts, self._starts[1:], strict=False):
            if start + shape.numel() < following:
                flat[start + shape.numel() : following].zero_()
        return flat


class FlatMasters(MasterWeights):
    """`MasterWeights` whose masters and halves are views of a FlatGroup's buffers; `groups` are as `by_decay` has them.

    A gradient is copied or added to its place as soon as it is there, and dropped. `sums` is the buffer's type: the
    halves' own for one gradient a step, else fp32.
    """

    @torch.no_grad()
    def __init__(self, weights: Iterable[nn.Parameter], dtype: torch.dtype, sums: torch.dtype) -> None:
        weights = list(weights)
        self.groups: list[FlatGroup] = []
        self._places: dict[int, tuple[FlatGroup, int]] = {}
        for part, decays in zip(by_decay(weights), (True, False), strict=True):
            if part:
                group = FlatGroup(part, decays, dtype, sums)
                self.groups.append(group)
                self._places |= {id(weight): (group, number) for number, weight in enumerate(part)}
        for weight in weights:
            group, number = self._places[id(weight)]
            weight.data = group.view(group.masters, number).copy_(weight)
        super().__init__(weights, dtype)
        for weight in self.weights:
            group, number = self._places[id(weight)]
            weight.data = group.view(group.halves, number).copy_(weight)
        self._arrived: set[int] = set()

    def masters_of(self, group: FlatGroup) -> list[nn.Parameter]:
        """A group's masters, in its order."""
        return [self.master_of(weight) for weight in self.weights if self._places[id(weight)][0] is group]

    def add(self, weight: Tensor, gradient: Tensor) -> None:
        """See `MasterWeights`; the first of a step is copied."""
        place = self.gradient_of(weight)
        if id(weight) not in self._arrived:
            self._arrived.add(id(weight))
            place.copy_(gradient)
        else:
            assert place.dtype == torch.float32, "a second gradient in a step that was to have one"
            place.add_(gradient)

    def gradient_of(self, weight: Tensor) -> Tensor:
        """A view of the place of the weight's gradient."""
        group, number = self._places[id(weight)]
        return group.view(group.begin_gradients(), number)

    def norms(self) -> Tensor:
        """Of the gradients by pieces, half or not, read once; AssertionError unless all have come."""
        assert len(self._arrived) == len(self.weights), f"{len(self._arrived)} gradients of {len(self.weights)} came"
        pieces = [group.begin_gradients().view(-1, _SUMMED) for group in self.groups]
        return torch.cat([torch.linalg.vector_norm(one, dim=1, dtype=torch.float32) for one in pieces])

    def finish_step(self) -> None:
        """The update has written the halves; the gradients go."""
        self._arrived.clear()
        for group in self.groups:
            group.gradients = None


def _rounded(numbers: int, multiple: int) -> int:
    return -(-numbers // multiple) * multiple
