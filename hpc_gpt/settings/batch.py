"""The batch equation: global_batch = micro_batch x micro_batches x dp."""

from __future__ import annotations

from dataclasses import dataclass

from hpc_gpt.errors import LayoutError, check_sizes


@dataclass(frozen=True)
class Batch:
    """`micro_batch` samples in a pass, `micro_batches` passes in a step, `global_batch` samples in a step."""

    micro_batch: int
    micro_batches: int
    global_batch: int


# The batch that is not given: another program's.
NO_BATCH = Batch(0, 0, 0)


def solve_batch(
    dp: int, micro_batch: int | None = None, micro_batches: int | None = None, global_batch: int | None = None
) -> Batch:
    """The batch from any two of its sizes; one that is not given is 1 or follows. LayoutError if they contradict."""
    check_sizes({"micro_batch": micro_batch, "micro_batches": micro_batches, "global_batch": global_batch})
    if global_batch is None:
        micro_batch, micro_batches = micro_batch or 1, micro_batches or 1
        return Batch(micro_batch, micro_batches, micro_batch * micro_batches * dp)
    if micro_batch is None and micro_batches is None:
        micro_batch = 1
    if micro_batch is None:
        assert micro_batches is not None
        micro_batch = _divide("micro_batches", micro_batches, dp, global_batch)
    elif micro_batches is None:
        micro_batches = _divide("micro_batch", micro_batch, dp, global_batch)
    assert micro_batches is not None
    if micro_batch * micro_batches * dp != global_batch:
        raise LayoutError(
            f"global_batch {global_batch} is not micro_batch x micro_batches x dp = "
            f"{micro_batch} x {micro_batches} x {dp} = {micro_batch * micro_batches * dp}",
            "give two of the three; the third follows",
        )
    return Batch(micro_batch, micro_batches, global_batch)


def _divide(name: str, size: int, dp: int, global_batch: int) -> int:
    """The size that follows from `size`; LayoutError with the product if it is not whole."""
    quotient, rest = divmod(global_batch, size * dp)
    if rest or quotient == 0:
        lower = max(1, quotient) * size * dp
        raise LayoutError(
            f"global_batch {global_batch} is not a multiple of {name} x dp = {size} x {dp} = {size * dp}",
            f"use --global-batch-size {lower}" + (f" or {lower + size * dp}" if quotient else ""),
        )
    return quotient
