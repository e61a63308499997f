"""Bytes that the optimizer's update reads and writes."""

from __future__ import annotations

from hpc_gpt.engines import engine_of
from hpc_gpt.engines.base.training import Training
from hpc_gpt.engines.ddp import sums_in_half


def moved_bytes(training: Training) -> float:
    """Bytes read and written a parameter in a step, counted by hand, with norm and clipping.

    fused: reads fp32 master weight, two moments and gradient, writes three of them and 2 for the 16-bit weight; then
    reads and writes the gradient for its norm and scale. foreach and for-loop, instead of fused's 28: weight decay 8,
    first moment 12, second 8 + 12, root, quotient and sum with epsilon 8 each, weight 16; further launches are not
    counted. compiled: one pass reads the gradient for the norm; the next reads master weight, moments and gradient and
    writes master weight, moments and 16-bit weight.
    """
    if training.optimizer_mode in ("foreach", "for-loop"):
        return 80 + 2 + 2 * 4
    if training.optimizer_mode == "compiled" and engine_of(training).compiles_update and training.dtype != "fp32":
        gradient = 2 if sums_in_half(training) else 4
        return (4 + 8 + gradient) + (4 + 8 + 2) + gradient
    return 4 * 4 + 3 * 4 + 2 + 2 * 4
