"""The constants of one cluster from a few of its published or recorded steps.

Damped Gauss-Newton on log(predicted / measured), with Cauchy's weights so that a row that noise doubled does not carry
the rest, and every constant held to its start by `SPREAD`: a row tells only of what it is made of.
Source: Holland and Welsch 1977, "Robust regression using iteratively reweighted least-squares"; Levenberg 1944.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from hpc_gpt.plan.constants import DEFAULT, SPREAD, Constants
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.step_time import StepModel
from hpc_gpt.plan.training import Training

# Steps hardly tell what is hidden from how fast it goes: the part that is not hidden stays.
NAMES = tuple(field.name for field in fields(Constants) if field.name != "exposed")
# What a good prediction of one row misses by, as a logarithm: the rows' weight against the constants' spread.
_NOISE = 0.05
_TAIL = 2.0  # a residual of so many times the noise weighs half, of more ever less
_SHARES = {"gemm": 0.98, "memory": 1.0, "attention": 1.5, "node": 1.2, "network": 1.2, "reduction": 1.2}
_ROUNDS = 12
_DIFFERENCE = 1e-3


@dataclass(frozen=True)
class Fitted:
    """`residuals` are log(predicted / measured), one a sample, in the order given, under `constants`."""

    constants: Constants
    residuals: tuple[float, ...]


def fit(samples: Sequence[tuple[Training, Machine, float]], start: Constants = DEFAULT) -> Fitted:
    """Constants under which the samples' steps (training, machine, measured seconds) are predicted best.

    Deterministic. ValueError where a measured time is not above 0. Without samples `start` comes back.
    """
    for _, _, measured in samples:
        if not (measured > 0 and math.isfinite(measured)):
            raise ValueError(f"a measured step of {measured} s: must be above 0")
    if not samples:
        return Fitted(start, ())
    spread = np.array([getattr(SPREAD, name) for name in NAMES])
    prior = np.log([getattr(start, name) for name in NAMES])
    at = prior.copy()
    residuals = _residuals(samples, at, start)
    cost = _cost(residuals, at, prior, spread)
    damping = 1e-3
    for _ in range(_ROUNDS):
        slopes = np.empty((len(samples), len(NAMES)))
        for column in range(len(NAMES)):
            moved = at.copy()
            moved[column] += _DIFFERENCE
            slopes[:, column] = (_residuals(samples, moved, start) - residuals) / _DIFFERENCE
        weights = _weights(residuals)
        normal = slopes.T @ (slopes * weights[:, None]) + np.diag(1 / spread**2)
        downhill = slopes.T @ (weights * residuals) + (at - prior) / spread**2
        while damping < 1e6:
            tried = _clipped(at - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), downhill))
            tried_residuals = _residuals(samples, tried, start)
            tried_cost = _cost(tried_residuals, tried, prior, spread)
            if tried_cost < cost:
                break
            damping *= 10
        else:
            break
        gained = cost - tried_cost
        at, residuals, cost, damping = tried, tried_residuals, tried_cost, max(damping / 10, 1e-6)
        if gained < 1e-6 * cost:
            break
    return Fitted(_constants(at, start), tuple(float(residual) for residual in residuals))


def _constants(at: np.ndarray, start: Constants) -> Constants:
    return replace(start, **{name: float(math.exp(value)) for name, value in zip(NAMES, at, strict=True)})


def _clipped(at: np.ndarray) -> np.ndarray:
    ceilings = np.log([_SHARES.get(name, 1e3) for name in NAMES])
    return np.asarray(np.minimum(at, ceilings))


def _residuals(samples: Sequence[tuple[Training, Machine, float]], at: np.ndarray, start: Constants) -> np.ndarray:
    constants = _constants(at, start)
    models: dict[int, StepModel] = {}
    out = np.empty(len(samples))
    for index, (training, machine, measured) in enumerate(samples):
        model = models.get(id(machine))
        if model is None:
            model = models[id(machine)] = StepModel(machine, constants)
        out[index] = math.log(model.predict(training).step_s / measured)
    return out


def _weights(residuals: np.ndarray) -> np.ndarray:
    off = np.abs(residuals) / _NOISE
    return np.asarray(1 / (1 + (off / _TAIL) ** 2) / _NOISE**2)


def _cost(residuals: np.ndarray, at: np.ndarray, prior: np.ndarray, spread: np.ndarray) -> float:
    off = np.abs(residuals) / _NOISE
    carried = _TAIL**2 / 2 * np.log1p((off / _TAIL) ** 2)
    return float(carried.sum() + (((at - prior) / spread) ** 2).sum() / 2)
