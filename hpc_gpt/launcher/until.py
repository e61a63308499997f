"""`--until tokens=30e9`, `steps=N`, `loss=X`: the goal of a run, and the forecast of its job chain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.format import counted
from hpc_gpt.core.formulas import MOST_TOKENS
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.layout import Batch
from hpc_gpt.core.settings.sized import Sized, runs_program
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.typed_tables import read_count
from hpc_gpt.planner.prediction import Prediction

if TYPE_CHECKING:
    from hpc_gpt.launcher.forecast import Forecast
    from hpc_gpt.launcher.past_timings import PastTimings

_FORMS = "--until tokens=30e9, --until steps=5000 or --until loss=2.9"
_MOST = 10**12  # steps; a larger number is a mistake
_FEW_STEPS = 3  # the least number of steps that a job should train


@dataclass(frozen=True)
class Until:
    """The goal of a training, with None for values that are not given. At most one of `steps` and `tokens` is given."""

    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None

    def settings(self, batch: Batch, seq: int) -> dict[str, Any]:
        """The keys of [train] that it sets for a run with this batch and sequence length. Raises ConfigError."""
        steps = self.steps
        if self.tokens is not None:
            steps = -(-self.tokens // (batch.global_batch * seq))
            if steps > _MOST:
                raise ConfigError(f"{self.tokens:g} tokens are {steps:g} steps of {batch.global_batch} x {seq}", _FORMS)
        return ({} if steps is None else {"steps": steps}) | ({} if self.loss is None else {"until_loss": self.loss})

    def notes(self, batch: Batch, seq: int) -> list[str]:
        """The line that explains the goal; none without a goal."""
        parts = []
        of_step = batch.global_batch * seq
        if self.tokens is not None:
            parts.append(
                f"{self.tokens:,} tokens are {-(-self.tokens // of_step):,} steps of {batch.global_batch} x {seq} = "
                f"{of_step:,} tokens each"
            )
        elif self.steps is not None:
            parts.append(f"{counted(self.steps, 'step')}, {self.steps * of_step:,} tokens")
        if self.loss is not None:
            parts.append(f"until the loss is {self.loss:g} or less")
        return [f"until: {', '.join(parts)}"] if parts else []


def parse_until(texts: Sequence[str]) -> Until:
    """The `Until` of the --until options. Raises ConfigError for a text of another form, or two that contradict."""
    goals: dict[str, Any] = {}
    for text in texts:
        name, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or name not in ("tokens", "steps", "loss"):
            raise ConfigError(f"--until {text!r} is none of tokens=, steps= and loss=", f"for example {_FORMS}")
        if name in goals:
            raise ConfigError(f"--until {name}= is given twice", "leave one out")
        goals[name] = _number(name, raw)
    if {"tokens", "steps"} <= set(goals):
        raise ConfigError(
            f"--until steps={goals['steps']:.0f} and tokens={goals['tokens']:g} both say when to end",
            "give one of the two",
        )
    return Until(goals.get("steps"), goals.get("tokens"), goals.get("loss"))


def _number(name: str, raw: str) -> int | float:
    """A value above 0; a whole number for steps and tokens, such as `30B`, `30e9` or `30_000`. Raises ConfigError."""
    most: float = {"steps": _MOST, "tokens": MOST_TOKENS}.get(name, math.inf)
    value = math.nan
    try:
        value = float(raw) if name == "loss" else read_count(raw)
    except OverflowError:
        value = math.inf
    except ValueError:
        pass
    if not 0 < value <= most or value == math.inf:
        kind = "a loss above 0" if name == "loss" else f"a whole number of {name} above 0"
        kind += f" and at most {most:,}" if value > most else ""
        raise ConfigError(f"--until {name}={raw} is not {kind}", f"for example {_FORMS}")
    return value


def length_settings(until: Until, resolved: Sized, on_line: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] that `until` sets for a run.

    Raises ConfigError if the command line (`on_line`, {dotted key: value}) also gives another value for one of them.
    """
    settings = until.settings(resolved.batch, resolved.model.seq)
    for key, value in settings.items():
        other = on_line.get(f"train.{key}")
        if other is not None and other != value:
            name = "tokens" if key == "steps" and until.tokens is not None else {"until_loss": "loss"}.get(key, key)
            raise ConfigError(
                f"--until {name}={getattr(until, name):g} means train.{key} = {value:g}, but the command line also "
                f"gives train.{key} = {other}",
                "leave one out",
            )
    return settings


# --- the chain of jobs


@dataclass(frozen=True)
class ForecastInputs:
    """The inputs of the forecast of a run's job chain, besides the run's settings.

    It resumes after step `done`; `spent` GPU-hours of its budget are used. `lead_is_given`: the user has set the
    signal's lead, which stays. `data_from`: the step of a branch to other data.
    """

    until: Until
    past: PastTimings
    lead_is_given: bool
    done: int = 0
    spent: float = 0.0
    data_from: int = 0


def wants_forecast(resolved: Sized, until: Until) -> bool:
    """Whether the user wants a forecast, or all jobs of the chain are submitted at once and must be counted."""
    if runs_program(resolved):
        return False  # neither its steps nor their time is known
    counted = resolved.cluster.scheduler == "slurm" and requeue_of(resolved.cluster).at_once
    return until != Until() or resolved.job.max_gpu_hours is not None or counted


def forecast_chain(resolved: Sized, prediction: Prediction, inputs: ForecastInputs) -> Forecast:
    """The forecast of a run's job chain. Raises ConfigError if the training cannot reach its end."""
    from hpc_gpt.launcher.forecast import ForecastFacts, make_forecast

    step = prediction.tables["step"] if prediction.tables is not None else None
    facts = ForecastFacts(
        done=inputs.done,
        alike=inputs.past.newest_alike(resolved),
        predicted=step,
        spent=inputs.spent,
        no_prediction=str(prediction.line) if step is None and prediction.text else "",
    )
    return make_forecast(resolved, facts, inputs.lead_is_given)


def short_of_time(resolved: Sized, past: PastTimings) -> tuple[str, ...]:
    """The warning about a signal that leaves a job less than half of its time, or less time than a start and a few
    steps took in a run with the same settings; empty without one."""
    limit, lead = limit_s(resolved.job.time), resolved.job.signal_lead_s or 0
    if limit is None or lead >= limit:
        return ()
    left = limit - lead
    alike = past.newest_alike(resolved)
    needed = (alike.start_s or 0.0) + _FEW_STEPS * alike.step_s if alike else 0.0
    if 2 * left >= limit and left >= needed:
        return ()
    warning = f"warning: job.signal_lead_s = {lead} leaves a job {left} s of its {limit} s before it must save"
    if alike and left < needed:
        warning += f", and a start and {_FEW_STEPS} steps took {needed:.3g} s in run {alike.run}"
    return (f"{warning}; give more --time, or a smaller job.signal_lead_s",)
