"""The keys that a query sees, where these are not simply all before it: those of a window, of its document, or both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

# Bytes of a mask; queries are taken in blocks if one for all of them would be larger.
LARGEST_MASK = 2**30
_BLOCK = 128  # queries and keys in a block of FlexAttention


@dataclass(frozen=True, eq=False)
class Sight:
    """The keys that queries see, in one of three forms. (Not a tuple: FSDP2 would cast its tensors to 16 bits.)

    `masks`, for SDPA: one for each block of queries, in their order; each is added to the scores, [batch or 1, 1,
    queries, keys] in their dtype, 0 if a query (row) sees a key, else -inf. The block's last query is at the place of
    its last key. With `offsets` (int32, the first places of the samples or documents in the joined samples, and the
    number of tokens) and the length of the `longest`, `kernel` is torch's for documents in a row (`packed_kernel`).
    With `blocks`, a block mask, it is FlexAttention. `expands`: the kernel takes no grouped queries.
    """

    masks: tuple[Tensor, ...] = ()
    kernel: Callable[..., Tensor] | None = None
    offsets: Tensor | None = None
    longest: int = 0
    blocks: Any = None
    expands: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that all layers read and autograd keeps."""
        parts = () if self.blocks is None else self.blocks.as_tuple()
        return [part for part in (*self.masks, self.offsets, *parts) if isinstance(part, Tensor)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention by the kernel: queries [batch, seq, heads, width], keys and values [batch, seq, key heads, width]
        -> the queries' shape."""
        assert self.kernel is not None
        if self.expands:
            key, value = (part.repeat_interleave(query.shape[2] // part.shape[2], 2) for part in (key, value))
        if self.blocks is not None:
            parts = (part.transpose(1, 2) for part in (query, key, value))
            return self.kernel(*parts, block_mask=self.blocks, enable_gqa=True).transpose(1, 2)
        flat = (part.flatten(0, 1) for part in (query, key, value))
        return self.kernel(*flat, self.offsets, self.offsets, self.longest, self.longest).view(query.shape)

    def attend_by_masks(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Attention by SDPA, which takes the `options`: [batch, heads, seq, width] -> the queries' shape."""
        mixed, end = [], 0
        for mask in self.masks:
            begin, end = end, end + mask.shape[-2]
            seen = slice(end - mask.shape[-1], end)
            parts = query[:, :, begin:end], key[:, :, seen], value[:, :, seen]
            mixed.append(F.scaled_dot_product_attention(*parts, attn_mask=mask, **options))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed, 2)


def masks_of(
    seq: int, window: int | None, dtype: torch.dtype, device: torch.device, starts: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The masks of a window, None for none; with `starts`, the first positions of each token's document, [batch, seq],
    also of the documents. They are floats: SDPA would convert a boolean mask at each call."""
    step, keys = seq, window or seq
    while window is not None and step > 1 and step * min(seq, step + keys - 1) * dtype.itemsize > LARGEST_MASK:
        step = -(-step // 2)
    # That of the last block, whose lower right corner is that of every other block.
    places = torch.arange(min(seq, step + keys - 1), device=device)
    queries = places[-step:, None]
    hidden = ((places > queries) | (places <= queries - keys))[None, None]

    def added(hidden: Tensor) -> Tensor:
        return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)

    band, masks = added(hidden) if starts is None else hidden, []
    for begin in range(0, seq, step):
        end, first = min(seq, begin + step), max(0, begin - keys + 1)
        mask = band[..., begin - end :, first - end :]
        if starts is not None:
            mask = added(mask | (torch.arange(first, end, device=device) < starts[:, None, begin:end, None]))
        masks.append(mask)
    return tuple(masks)


def blocks_of(seq: int, window: int, device: torch.device, starts: Tensor | None = None) -> Any:
    """FlexAttention's block mask of the same keys: for each block of queries the blocks of keys that they see, in whole
    or in part. They follow from the first key of a block's first and last query, as a later query sees no earlier one.
    (torch's `create_block_mask` makes all seq x seq decisions first, 17 GB at 131,072.)"""
    from torch.nn.attention.flex_attention import BlockMask  # it imports torch's compiler

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        seen = (key <= query) & (key > query - window)
        return seen if starts is None else seen & (key >= starts[batch, query])

    count = -(-seq // _BLOCK)
    first = torch.arange(count, device=device) * _BLOCK
    last = (first + _BLOCK - 1).clamp(max=seq - 1)
    lowest = [queries - window + 1 for queries in (first, last)]  # the first key that a query sees
    if starts is not None:
        lowest = [torch.maximum(low, starts[:, at]) for low, at in zip(lowest, (first, last), strict=True)]
    of_first, of_last = (low.view(-1, 1, count, 1) for low in lowest)
    queries = torch.arange(count, device=device)[:, None]
    keys = queries.T
    whole = (keys < queries) & (first >= of_last) & (last[:, None] - first[:, None] == _BLOCK - 1)
    partly = (keys <= queries) & (last >= of_first) & ~whole
    return BlockMask.from_kv_blocks(
        *_numbers_of(partly), *_numbers_of(whole), BLOCK_SIZE=_BLOCK, mask_mod=sees, seq_lengths=(seq, seq)
    )


def _numbers_of(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns (how many of the last dimension are true, int32 [...]; their numbers first, int32 [..., blocks])."""
    numbers = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32), numbers.to(torch.int32)


def packed_kernel(parameters: Any, window: int | None = None) -> tuple[dict[str, Any], bool]:
    """Returns (arguments for causal attention, whether it takes grouped queries) of
    `torch.nn.attention.varlen.varlen_attn` with these parameters. Until torch 2.10 it had `is_causal`, and no window;
    then `window_size` took its place: the keys before a query's own, and after it."""
    before = -1 if window is None else window - 1
    options: dict[str, Any] = {"is_causal": True} if "is_causal" in parameters else {"window_size": (before, 0)}
    groups = "enable_gqa" in parameters
    return (options | {"enable_gqa": True} if groups else options), groups
