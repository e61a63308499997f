"""Figures that cannot be: a step of no time, a throughput below nothing. They are not taken, and counted."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from hpc_gpt.readers.part import Column

MOST_STEP = 2.0**53  # above it a float no longer counts
MOST_GIB = 1e6
_LONGEST_S = 1e9
# Above nothing.
_POSITIVE = frozenset(("step_s",))
# Not below nothing.
_NOT_NEGATIVE = frozenset(
    (
        "tokens_per_s",
        "tokens_per_s_gpu",
        "samples_per_s",
        "samples_per_s_gpu",
        "tflops",
        "mfu",
        "consumed_samples",
        "consumed_tokens",
        "elapsed_s",
        "skipped",
        "nan",
    )
)
# An infinite one is what a training that diverges prints: it is a NaN in the columns, and no fault of the log.
_MAY_OVERFLOW = frozenset(("loss", "loss_eval", "grad_norm", "lr"))


def sound_columns(columns: Mapping[str, Column], left_out: dict[str, int]) -> dict[str, Column]:
    """The columns with NaN for what cannot be; `left_out` counts those, by field."""
    found = {}
    for name, column in columns.items():
        infinite = np.isinf(column)
        with np.errstate(invalid="ignore"):
            wrong = np.zeros(len(column), np.bool_) if name in _MAY_OVERFLOW else infinite
            if name in _POSITIVE:
                wrong = wrong | (column <= 0) | (column > _LONGEST_S)
            elif name in _NOT_NEGATIVE:
                wrong = wrong | (column < 0)
        count = int(wrong.sum())
        if count:
            words = f"figures of {name} that cannot be"
            left_out[words] = left_out.get(words, 0) + count
        away = wrong | infinite
        found[name] = np.where(away, np.nan, column) if away.any() else column
    return found


def sound_step(step: float) -> bool:
    """Whether a step can have this number.

    >>> sound_step(12.0), sound_step(-1.0), sound_step(1e300), sound_step(1.5)
    (True, False, False, False)
    """
    return 0 <= step <= MOST_STEP and step.is_integer()


def sound_gib(gib: float) -> bool:
    """Whether a GPU's memory can be so full."""
    return 0 <= gib <= MOST_GIB


def whole_rank(value: object) -> int | None:
    """The rank that a figure names; None where it names none."""
    if not isinstance(value, float) or not math.isfinite(value) or not 0 <= value < 1e7:
        return None
    return int(value)
