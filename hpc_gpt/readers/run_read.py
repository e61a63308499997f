"""A run as it was read: its record, its curve, what went wrong, and the files it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.readers.causes.first_cause import Cause
from hpc_gpt.readers.part import Column, Failure
from hpc_gpt.runs.record import Record


def _none() -> Column:
    return np.zeros(0)


@dataclass(frozen=True)
class Curve:
    """The steps of a run in the order they were trained; what a later attempt trained again is still there.

    All arrays are as long as `step`, NaN where the log has no figure. `steady`: the steps that step_s rests on.
    `counts`: the step led to the run's last state (False: a later attempt trained it again). `attempt` counts from 1.
    `at`: epoch seconds. `eval_step` and `loss_eval` are a pair of their own. `stride`: one of so many lines was kept.
    """

    step: Column = field(default_factory=_none)
    step_s: Column = field(default_factory=_none)
    loss: Column = field(default_factory=_none)
    grad_norm: Column = field(default_factory=_none)
    lr: Column = field(default_factory=_none)
    tokens_per_s: Column = field(default_factory=_none)
    at: Column = field(default_factory=_none)
    attempt: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    steady: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    counts: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    skipped: NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, np.bool_))
    eval_step: Column = field(default_factory=_none)
    loss_eval: Column = field(default_factory=_none)
    stride: int = 1


@dataclass(frozen=True)
class RunRead:
    """One run. `failures`: the first cause first, then what else went wrong; echoes last. `files`: all it was read
    from. `folder`: the run folder where it is one of ours, else None. `causes`: of each attempt, of others' logs.
    `rounds`: of a bench's row its tokens/s round by round."""

    record: Record
    curve: Curve = field(default_factory=Curve)
    failures: Sequence[Failure] = ()
    files: Sequence[Path] = ()
    folder: Path | None = None
    causes: Sequence[Cause] = ()
    rounds: Sequence[float] = ()
