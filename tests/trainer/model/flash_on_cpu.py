"""Kernels of a CPU for the operators that torch's flash attention of documents in a row calls, in plain PyTorch: with
them `torch.nn.attention.varlen` itself runs here, its checks, its gradients and its tracing."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """A context in which a CPU has these kernels."""
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("_flash_attention_forward", _forward, "CPU")
        library.impl("_flash_attention_backward", _backward, "CPU")
        yield
    finally:
        library._destroy()


def _documents(offsets: Tensor, longest: int) -> list[tuple[int, int]]:
    found = [*pairwise(offsets.tolist())]
    assert max(last - first for first, last in found) <= longest
    return found


def _weights(query: Tensor, key: Tensor, before: int) -> Tensor:
    hidden = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).triu(1)
    if before >= 0:
        hidden |= torch.ones_like(hidden).tril(-before - 1)
    return (query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf).softmax(-1)


def _parts(first: int, last: int, query: Tensor, *keys: Tensor) -> list[Tensor]:
    """[tokens, heads, width] of all -> [heads, tokens, width] of a document, keys as often as queries use them."""
    groups = query.shape[1] // keys[0].shape[1]
    own = [part[first:last].transpose(0, 1) for part in keys]
    return [query[first:last].transpose(0, 1), *(part.repeat_interleave(groups, 0) for part in own)]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: Tensor,
    again: Tensor,
    longest: int,
    *others: Any,
    **options: Any,
) -> tuple[Tensor, ...]:
    before = _check(offsets, again, others[2], options)
    out = torch.empty_like(query)
    for first, last in _documents(offsets, longest):
        own, keys, values = _parts(first, last, query, key, value)
        out[first:last] = (_weights(own, keys, before) @ values).transpose(0, 1)
    seeds = [torch.zeros(size, dtype=torch.uint64) for size in ((2,), ())]
    return out, torch.zeros(query.shape[1], len(query)), *seeds, torch.empty(0)


def _backward(
    slope: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, *others: Any, **options: Any
) -> tuple[Tensor, ...]:
    _, offsets, again, longest, _, _, is_causal, *_ = others
    before = _check(offsets, again, is_causal, options)
    of_query, of_key, of_value = (torch.empty_like(part) for part in (query, key, value))
    for first, last in _documents(offsets, longest):
        own, keys, values = _parts(first, last, query, key, value)
        wanted = slope[first:last].transpose(0, 1)
        weights = _weights(own, keys, before)
        of_weights = wanted @ values.transpose(-1, -2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) / query.shape[-1] ** 0.5
        of_query[first:last] = (of_scores @ keys).transpose(0, 1)
        for target, left, right in ((of_key, of_scores, own), (of_value, weights, wanted)):
            by_group = (left.transpose(-1, -2) @ right).unflatten(0, (key.shape[1], -1)).sum(1)
            target[first:last] = by_group.transpose(0, 1)
    return of_query, of_key, of_value


def _check(offsets: Tensor, again: Tensor, is_causal: bool, options: dict[str, Any]) -> int:
    """The keys before its own that a query sees; -1: all."""
    assert torch.equal(offsets, again)
    assert offsets.dtype == torch.int32
    # Causal, in the words of the version: until torch 2.10 without a window.
    before, after = (options.get(f"window_size_{side}") for side in ("left", "right"))
    assert is_causal == (before in (None, -1))
    assert not after
    return -1 if before is None else int(before)
