"""Triton kernels for the one-pass loss.

Imported on a GPU only; Triton's interpreter runs them on a CPU in tests.
"""

import torch
import torch.distributed as dist
import triton
import triton.language as tl
from torch import Tensor

from hpc_gpt.trainer.model.tensor_parallel import TensorParallel

# Below every logit, and finite: a row may have no real column, and -inf minus -inf is NaN.
_LEAST = tl.constexpr(-3.0e38)


@triton.jit
def _read_row(base, REAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """Returns (largest, sum of the exponentials) over a row's first REAL columns."""
    top = tl.full((), _LEAST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for start in tl.range(0, ROWS, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        # The mask ends at the padded size, a multiple of 16 bytes, so that a thread loads 16 bytes at once.
        scores = tl.load(base + columns, mask=columns < ROWS, other=0.0, eviction_policy="evict_last").to(tl.float32)
        scores = tl.where(columns < REAL, scores, _LEAST)
        larger = tl.maximum(top, tl.max(scores, 0))
        exponentials = tl.where(columns < REAL, tl.exp(scores - larger), 0.0)
        total = total * tl.exp(top - larger) + tl.sum(exponentials, 0)
        top = larger
    return top, total


@triton.jit
def _write_row(
    base, index, top, total, slope, REAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr
):
    """Overwrites a row with its gradient; `index` is the target's column, which may be outside the row."""
    factor = slope / total
    # Loads ahead never read a column that is already stored.
    for start in tl.range(0, ROWS, BLOCK, num_stages=STAGES):
        columns = start + tl.arange(0, BLOCK)
        scores = tl.load(base + columns, mask=columns < ROWS, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.where(columns < REAL, tl.exp(scores - top) * factor, 0.0)
        gradient -= tl.where(columns == index, slope, 0.0)
        tl.store(base + columns, gradient.to(base.dtype.element_ty), mask=columns < ROWS)


@triton.jit
def _whole(
    logits,
    targets,
    losses,
    slope,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr = 3,
    WRITES: tl.constexpr = True,
):
    """Losses, and with WRITES gradients, for a vocabulary that is not split: one program per row."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * ROWS
    target = tl.load(targets + row)
    hit = tl.load(base + target).to(tl.float32)
    top, total = _read_row(base, REAL, ROWS, BLOCK, STAGES)
    tl.store(losses + row, tl.log(total) + top - hit)
    if WRITES:
        _write_row(base, target, top, total, slope, REAL, ROWS, BLOCK, STAGES)


@triton.jit
def _statistics(
    logits,
    index,
    tops,
    totals,
    hits,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr = 3,
):
    """Statistics of a rank's part of a split vocabulary: largest, total, and the target's score (0 if it is
    elsewhere)."""
    row = tl.program_id(0).to(tl.int64)
    base = logits + row * ROWS
    target = tl.load(index + row)
    is_local = (target >= 0) & (target < ROWS)
    tl.store(hits + row, tl.load(base + target, mask=is_local, other=0.0).to(tl.float32))
    top, total = _read_row(base, REAL, ROWS, BLOCK, STAGES)
    tl.store(tops + row, top)
    tl.store(totals + row, total)


@triton.jit
def _gradients(
    logits,
    index,
    tops,
    totals,
    slope,
    REAL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr = 3,
):
    row = tl.program_id(0).to(tl.int64)
    target, top, total = tl.load(index + row), tl.load(tops + row), tl.load(totals + row)
    _write_row(logits + row * ROWS, target, top, total, slope, REAL, ROWS, BLOCK, STAGES)


@triton.jit
def _multiply(values, factor, products, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    product = tl.load(values + at, mask=at < COUNT).to(tl.float32) * tl.load(factor)
    tl.store(products + at, product.to(products.dtype.element_ty), mask=at < COUNT)


# The loss's programs, of a row each: the columns held at once, how many such pieces are loaded at once, and the warps.
# Small programs are the fastest, with as many on a multiprocessor as fit: some begin while others write. On an H200
# 32,768 rows of 50,304 columns take 2.48 ms; 8,192 columns and 16 warps, two programs on a multiprocessor and each
# second read from the cache, took 3.14.
_LOSS = {"BLOCK": 2048, "STAGES": 4, "num_warps": 4}


def overwrite_with_gradient(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float) -> Tensor:
    """Does the same as `vocab_loss.plain_overwrite`, for contiguous logits.

    Without tensor parallelism a logit is read and written once in memory: the second read of a row finds it in the
    cache. With it, all-reduces of the largest and the total come between two kernels.
    """
    return _losses(logits, targets, real, tp, slope)


def losses_of(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel) -> Tensor:
    """Does the same as `vocab_loss.plain_losses`, for contiguous logits, which are read once and not changed."""
    return _losses(logits, targets, real, tp, None)


def _losses(logits: Tensor, targets: Tensor, real: int, tp: TensorParallel, slope: float | None) -> Tensor:
    """The losses; with a `slope` the gradients overwrite the logits."""
    count, rows = logits.shape
    how = _LOSS | {"REAL": real, "ROWS": rows, "BLOCK": min(_LOSS["BLOCK"], triton.next_power_of_2(rows))}
    losses = torch.empty(count, dtype=torch.float32, device=logits.device)
    if tp.size == 1:
        _whole[(count,)](logits, targets, losses, slope or 0.0, WRITES=slope is not None, **how)
        return losses
    index = targets - tp.rank * rows
    local_top, total, hit = torch.empty((3, count), dtype=torch.float32, device=logits.device)
    _statistics[(count,)](logits, index, local_top, total, hit, **how)
    top = tp.all_reduce(local_top.clone(), dist.ReduceOp.MAX)
    total, hit = tp.all_reduce(torch.stack([total * (local_top - top).exp(), hit]))
    if slope is not None:
        _gradients[(count,)](logits, index, top, total, slope, **how)
    return total.log() + top - hit


def multiply(values: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """`values` times a scalar tensor of fp32, computed in fp32, in `dtype`."""
    products = torch.empty_like(values, dtype=dtype)
    count, block = values.numel(), 4096
    _multiply[(triton.cdiv(count, block),)](values, factor, products, count, BLOCK=block, num_warps=8)
    return products
