"""Which lines of steps of a part tell the run's story, where several programs print their own."""

from __future__ import annotations

from functools import cache

import numpy as np

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.part import Part, Steps

# What a line of steps tells its time by, the best first.
TIMES = ("step_s", "tokens_per_s", "tokens_per_s_gpu", "samples_per_s", "samples_per_s_gpu", "elapsed_s")

# No run trains as many steps.
LARGEST = 1e15


def main_steps(part: Part) -> tuple[str, Steps] | None:
    """(dialect, its lines of steps) of those that time a step most directly, then of the most lines, then of the most
    fields; None without any. Lines that have neither number, time nor loss tell of the steps of others, and lines that
    were recognised by shape alone tell nothing beside a known program's.
    """
    told = ("step", "loss", "consumed_samples", *TIMES)
    found = [
        (name, steps) for name, steps in part.steps.items() if len(steps) and any(field in steps for field in told)
    ]
    known = [pair for pair in found if pair[0] not in _last_resorts()]
    return min(known or found, key=lambda pair: _worth(*pair), default=None)


@cache
def _last_resorts() -> frozenset[str]:
    return frozenset(dialect.name for dialect in dialects() if dialect.last_resort)


def _worth(name: str, steps: Steps) -> tuple[int, int, int, str]:
    timed = next((place for place, key in enumerate(TIMES) if key in steps), len(TIMES))
    return timed, -steps.count, -len(steps.columns), name


def step_span(part: Part) -> tuple[float, float] | None:
    """(first, last) step of a part: of its lines of steps, else of its bars; None without any."""
    found = main_steps(part)
    if found is not None:
        steps = found[1]["step"]
        known = steps[np.isfinite(steps) & (steps < LARGEST)]
        if len(known):
            return float(known[0]), float(known.max())
    bars = [step for step, _, _ in part.progress if step < LARGEST]
    return (bars[0], max(bars)) if bars else None


def reaches(span: tuple[float, float] | None, planned: float | None) -> bool:
    """Whether the steps of a span run up to the last one planned; counted from 0, that is one less."""
    return bool(span and planned and planned > 0 and span[1] >= planned - (span[0] == 0 and planned > 1))


def has_steps(part: Part) -> bool:
    """Whether a part tells of training: steps, a bar or a total."""
    return bool(part.progress or part.totals or any(len(steps) for steps in part.steps.values()))


def log_interval(steps: Steps) -> int:
    """Steps that one line stands for: the commonest distance between the numbers of neighbouring lines."""
    numbers = steps["step"]
    apart = np.diff(numbers[np.isfinite(numbers)])
    apart = apart[(apart >= 1) & (apart < 1e9)]
    if not len(apart):
        return 1
    values, counts = np.unique(apart, return_counts=True)
    return max(1, int(values[counts.argmax()]) // max(1, steps.stride))
