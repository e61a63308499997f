"""Fit the planner's table of constants to published rows, with each source left out in turn: what `--fit` prints.

Gauss-Newton on log(predicted / published) as planner/calibration.py has it; every source weighs the same, but for two
whose times are noisy (BigScience's head) or were read off a chart (nanotron). The values found are for constants.toml.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from bench.published.rows import PublishedRow
from bench.published.scores import fastest
from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.step_time import predict_step

# {constant: what it is held to}: published figures, or a plain guess. Of a pair (forward, backward) the ratio is kept.
# Those of machine.* are fitted by planner/calibration.py.
FITTED = {
    "products.hopper.none": 0.85, "products.hopper.fp8-tensor": 0.85,
    "products.blackwell.fp8-tensor": 0.85, "products.blackwell.mxfp8": 0.85, "products.blackwell.nvfp4": 0.85,
    "kernels.triton.ampere": 0.36, "kernels.triton.hopper": 0.25, "kernels.fa2.hopper": 0.265,
    "kernels.cudnn.hopper": 0.545, "kernels.cudnn.blackwell": 0.65, "kernels.ultra.faster": 1.5,
    "power.exponent": 0.6, "casts.fp8-tensor": 4.0, "overlap.tp": 0.33, "overlap.p2p": 0.5,
}  # fmt: skip
# The same of mixtures of experts; the constants above stay as they are, and so does experts.worst_load, on which the
# sources do not agree: any from 1 to 2, by how far a run's router is balanced.
FITTED_MIXTURES = {
    "experts.largest_load": 4.5, "experts.router_bytes": 30.0, "experts.launches": 1.0,
    "experts.each": 0.14, "experts.eight_bits.hopper": 1.0,
}  # fmt: skip
_SPREAD, _NOISE, _TAIL, _ROUNDS, _DIFFERENCE = 0.3, 0.06, 2.0, 8, 1e-3
_LESS = {"nanotron-svg": 0.15, "bigscience-gpt2-head": 0.15}


@contextmanager
def constants_set(logarithms: Mapping[str, float]) -> Iterator[None]:
    """The table with these constants instead."""
    before = {name: VALUES[name] for name in logarithms}
    for name, logarithm in logarithms.items():
        value = math.exp(logarithm)
        old = before[name]
        VALUES[name] = [value * each / old[0] for each in old] if isinstance(old, list) else value
    try:
        yield
    finally:
        VALUES.update(before)


def fit_table(rows: Iterable[PublishedRow], held: Mapping[str, float] = FITTED) -> dict[str, float]:
    """{a constant of `held`: the logarithm that predicts the rows' times best}, held near the value there."""
    counted = fastest(rows)
    of_source = Counter(row.source for row in counted)
    weights = np.array([8 * _LESS.get(row.source, 1.0) / of_source[row.source] for row in counted])
    prior = np.log(list(held.values()))
    at, damping = prior.copy(), 1e-3
    off, cost = _off(counted, held, at, prior, weights)
    for _ in range(_ROUNDS):
        slopes = np.empty((len(counted), len(held)))
        for place in range(len(held)):
            moved = at.copy()
            moved[place] += _DIFFERENCE
            slopes[:, place] = (_off(counted, held, moved, prior, weights)[0] - off) / _DIFFERENCE
        own = weights / (1 + (off / _NOISE / _TAIL) ** 2) / _NOISE**2
        normal = slopes.T @ (slopes * own[:, None]) + np.eye(len(at)) / _SPREAD**2
        downhill = slopes.T @ (own * off) + (at - prior) / _SPREAD**2
        before = cost
        while damping < 1e6:
            tried = at - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill)
            tried_off, tried_cost = _off(counted, held, tried, prior, weights)
            if tried_cost < cost:
                at, off, cost, damping = tried, tried_off, tried_cost, max(damping / 10, 1e-6)
                break
            damping *= 10
        if before - cost < 1e-4 * before:
            break
    return dict(zip(held, at.tolist(), strict=True))


def by_source(row: PublishedRow) -> str:
    return row.source


def by_release(row: PublishedRow) -> str:
    """The program and its release; empty if the row states none."""
    return f"{row.source} {row.release}" if row.release else ""


def fitted_without(
    rows: Sequence[PublishedRow],
    held: Mapping[str, float] = FITTED,
    part: Callable[[PublishedRow], str] = by_source,
) -> dict[str, list[float]]:
    """{part of the rows: absolute errors of its times, by constants fitted to all others}."""
    errors = {}
    for name in filter(None, dict.fromkeys(part(row) for row in fastest(rows))):
        with constants_set(fit_table((row for row in rows if part(row) != name), held)):
            errors[name] = time_errors(rows, part)[name]
    return errors


def time_errors(
    rows: Iterable[PublishedRow], part: Callable[[PublishedRow], str] = by_source
) -> dict[str, list[float]]:
    """{part of the rows: absolute errors of its times}."""
    found = defaultdict(list)
    for row in fastest(rows):
        found[part(row)].append(abs(predict_step(row.training, row.machine).step_s / _seconds(row) - 1))
    return dict(found)


def _off(
    rows: Sequence[PublishedRow], held: Mapping[str, float], at: np.ndarray, prior: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, float]:
    """(log(predicted / published) of each row, what all of them cost)."""
    with constants_set(dict(zip(held, at.tolist(), strict=True))):
        off = np.array([math.log(predict_step(row.training, row.machine).step_s / _seconds(row)) for row in rows])
    carried = _TAIL**2 / 2 * np.log1p((off / _NOISE / _TAIL) ** 2)
    return off, float((weights * carried).sum() + (((at - prior) / _SPREAD) ** 2).sum() / 2)


def _seconds(row: PublishedRow) -> float:
    assert row.step_s is not None
    return row.step_s
