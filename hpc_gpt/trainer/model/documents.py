"""Attention within documents: several documents follow each other in a sample, and none sees another.

A document ends with its end token, and the next one begins at position 0; so does each sample. The host finds their
beginnings from the tokens of a micro-batch and sends them along: nothing waits for the device. The model gets them as
an argument. So each micro-batch keeps its own, even if several are in flight or a layer is computed again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.model.sight import Sight


@dataclass(frozen=True, eq=False)
class Boundaries:
    """The beginnings of the documents of a micro-batch.

    `starts`, int64 [batch, seq], is the first position of each token's document in its sample. `offsets`, int32
    [documents + 1], are the first places of the documents in the joined samples, and the number of tokens. `longest` is
    the length of the longest document.
    """

    starts: Tensor
    offsets: Tensor
    longest: int

    @staticmethod
    def of(tokens: Tensor, end: int) -> Boundaries:
        """The boundaries in tokens [batch, seq] on the host, pinned if the tokens are; a document ends with token
        `end`."""
        begins = torch.zeros_like(tokens, dtype=torch.bool)
        begins[:, 0] = True
        begins[:, 1:] = tokens[:, :-1] == end
        starts = torch.where(begins, torch.arange(tokens.shape[1]), 0).cummax(1).values
        places = begins.flatten().nonzero().flatten()
        offsets = torch.cat([places, torch.tensor([tokens.numel()])]).to(torch.int32)
        longest = int(offsets.diff().max())
        if tokens.is_pinned():
            starts, offsets = starts.pin_memory(), offsets.pin_memory()
        return Boundaries(starts, offsets, longest)

    def to(self, device: torch.device) -> Boundaries:
        """The boundaries on a device. The host does not wait for the copy."""
        starts, offsets = (part.to(device, non_blocking=True) for part in (self.starts, self.offsets))
        return Boundaries(starts, offsets, self.longest)


# Tokens and targets, int64 [batch, seq], and the beginnings of the tokens' documents, if the run masks them.
MicroBatch = tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Boundaries]


@dataclass(frozen=True, eq=False)
class Documents:
    """The documents of a micro-batch, as the layers need them. (Not a tuple: FSDP2 would cast its tensors to 16 bits.)

    `positions`, int64 [batch, seq / cp]: the positions of the rank's tokens in their documents. `rotation`: the
    `attention.Rotation` of these positions, for all layers that rotate, or None. `sight`: the keys that queries see;
    `in_window`: the same in layers with a window; None if there are no such layers. (Attention has whole samples.)
    """

    positions: Tensor
    rotation: Any
    sight: Sight | None
    in_window: Sight | None = None

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that all layers read and autograd keeps."""
        rotation: tuple[Tensor, ...] = () if self.rotation is None else (self.rotation.cosines, self.rotation.sines)
        return [*rotation, *(tensor for one in (self.sight, self.in_window) if one for tensor in one.tensors)]

    @staticmethod
    def of(
        boundaries: Boundaries,
        rotation: Any,
        sight: Sight | None,
        in_window: Sight | None = None,
        part: SequencePart = WHOLE,
    ) -> Documents:
        """The documents with these boundaries. `rotation` is the model's, or None; `part` are the rank's positions."""
        starts = boundaries.starts
        positions = part.of(torch.arange(starts.shape[1], device=starts.device) - starts, 1)
        return Documents(positions, rotation and rotation.at(positions), sight, in_window)
