"""Attention within documents: several documents follow each other in a sample, and none sees another.

A document ends with its end token, and the next one begins at position 0; so does each sample. The host finds their
beginnings from the tokens of a micro-batch and sends them along: nothing waits for the device. The model gets them as
an argument. So each micro-batch keeps its own, even if several are in flight or a layer is computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart


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
    `attention.Rotation` of these positions, for all layers that rotate, or None. Attention, which has whole samples,
    gets either `mask`, in its dtype [batch, 1, seq, seq]: 0 if a query (row) sees a key, else -inf; or `kernel`, which
    takes `offsets` and the length of the `longest` document.
    """

    positions: Tensor
    rotation: Any
    mask: Tensor | None = None
    kernel: Callable[..., Tensor] | None = None
    offsets: Tensor | None = None
    longest: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that all layers read and autograd keeps."""
        rotation: tuple[Tensor, ...] = () if self.rotation is None else (self.rotation.cosines, self.rotation.sines)
        return [one for one in (*rotation, self.mask, self.offsets) if one is not None]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by the kernel: queries [batch, seq, heads, width], keys and values [batch, seq, key heads, width]
        -> the queries' shape."""
        assert self.kernel is not None
        flat = (part.flatten(0, 1) for part in (query, key, value))
        mixed = self.kernel(*flat, self.offsets, self.offsets, self.longest, self.longest)
        return mixed.view(query.shape)


def masked(boundaries: Boundaries, rotation: Any, dtype: torch.dtype, part: SequencePart = WHOLE) -> Documents:
    """Documents with a mask for torch's SDPA. `rotation` is the model's, or None; `part` are the rank's positions.
    The mask is a tensor that is added to the scores: SDPA would convert a boolean mask to that at each call."""
    starts = boundaries.starts
    places = torch.arange(starts.shape[1], device=starts.device)
    hidden = (places < starts[:, None, :, None]) | (places > places[:, None])
    mask = torch.zeros(hidden.shape, dtype=dtype, device=starts.device).masked_fill_(hidden, -torch.inf)
    positions = part.of(places - starts, 1)
    return Documents(positions, rotation and rotation.at(positions), mask)


def packed(
    boundaries: Boundaries, rotation: Any, kernel: Callable[..., Tensor], longest: int, part: SequencePart = WHOLE
) -> Documents:
    """Documents for a `kernel` of `packed_kernel`. `longest` may be larger than the longest document."""
    starts = boundaries.starts
    positions = part.of(torch.arange(starts.shape[1], device=starts.device) - starts, 1)
    return Documents(positions, rotation and rotation.at(positions), None, kernel, boundaries.offsets, longest)


def packed_kernel(parameters: Any) -> tuple[dict[str, Any], bool]:
    """Returns (arguments for causal attention, whether it takes grouped queries) of
    `torch.nn.attention.varlen.varlen_attn` with these parameters. Until torch 2.10 it had `is_causal`; then
    `window_size` took its place."""
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (-1, 0)}
    groups = "enable_gqa" in parameters
    return (options | {"enable_gqa": True} if groups else options), groups
