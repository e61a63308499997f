"""What counts and rates without a unit are of: steps, samples or tokens, by the batch and the times.

MLPerf's submissions count in one of these three under the same names. What does not follow is left out.
"""

from collections.abc import Mapping

import numpy as np

from hpc_gpt.readers.steps import StepColumn

_TWICE = 2.0  # two statements of a step's time that differ by this factor are not of the same unit


def counted_in(columns: Mapping[str, StepColumn], batch: int | None, seq: int | None) -> StepColumn | None:
    """The step of each row by `consumed`; None if nothing shows what it counts.

    A count of tokens is a multiple of batch x sequence in every row, a count of samples of the batch. The steps between
    two rows must then take about the time that the program prints for them.
    """
    consumed = columns["consumed"]
    known = consumed[np.isfinite(consumed) & (consumed > 0)]
    if not len(known) or not batch:
        return None
    each = [batch * seq] if seq else []
    for size in (*each, batch):
        if (known % size == 0).all() and _fits(columns, consumed / size):
            return consumed / size
    return None


def _fits(columns: Mapping[str, StepColumn], steps: StepColumn) -> bool:
    """Whether the printed step time, if any, is about that by the times of day."""
    printed, clock = _median(columns["step_s"]), clock_s(columns["at"], steps)
    return printed is None or clock is None or 1 / _TWICE < clock / printed < _TWICE


def clock_s(at: StepColumn, steps: StepColumn) -> float | None:
    """The median seconds of a step by the times of day of neighbouring rows; None without any."""
    known = np.isfinite(at) & np.isfinite(steps)
    apart, took = np.diff(steps[known]), np.diff(at[known])
    forward = (apart > 0) & (took > 0)
    return float(np.median(took[forward] / apart[forward])) if forward.any() else None


def rate_in(
    columns: Mapping[str, StepColumn], steps: StepColumn, batch: int, seq: int | None
) -> tuple[str, StepColumn] | None:
    """The field that `throughput` is and its values, samples_per_s or tokens_per_s; None if nothing shows it."""
    rate, clock = _median(columns["throughput"]), clock_s(columns["at"], steps)
    if not rate or clock is None:
        return None
    for name, size in (("samples_per_s", batch), ("tokens_per_s", batch * (seq or 0))):
        if size and 1 / _TWICE < size / rate / clock < _TWICE:
            return name, columns["throughput"]
    return None


def _median(column: StepColumn) -> float | None:
    known = column[np.isfinite(column) & (column > 0)]
    return float(np.median(known)) if len(known) else None
