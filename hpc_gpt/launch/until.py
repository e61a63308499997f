"""`--until tokens=30e9`, `steps=N`, `loss=X`: how far a run is to train; and what its chain of jobs will take."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.job_time import limit_s
from hpc_gpt.launch.foresight import Foresight
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.batch import Batch
from hpc_gpt.settings.resolve import Resolved

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier

_FORMS = "--until tokens=30e9, --until steps=5000 or --until loss=2.9"
_MOST = 10**12  # steps that no run takes: what is above is a slip
_FEW_STEPS = 3  # what a job should train at least


@dataclass(frozen=True)
class Until:
    """What was asked for; None for what was not. Of `steps` and `tokens` one at most is given."""

    steps: int | None = None
    tokens: int | None = None
    loss: float | None = None

    def settings(self, batch: Batch, seq: int) -> dict[str, Any]:
        """The keys of [train] that it decides, for a run of this batch and sequence length."""
        steps = self.steps
        if self.tokens is not None:
            steps = -(-self.tokens // (batch.global_batch * seq))
            if steps > _MOST:
                raise ConfigError(f"{self.tokens:g} tokens are {steps:g} steps of {batch.global_batch} x {seq}", _FORMS)
        return ({} if steps is None else {"steps": steps}) | ({} if self.loss is None else {"until_loss": self.loss})

    def words(self, batch: Batch, seq: int) -> str:
        """What the settings mean, for the user."""
        said = []
        each = batch.global_batch * seq
        if self.tokens is not None:
            said.append(
                f"{self.tokens:,} tokens are {-(-self.tokens // each):,} steps of {batch.global_batch} x {seq} = "
                f"{each:,} tokens each"
            )
        elif self.steps is not None:
            said.append(f"{self.steps:,} steps, {self.steps * each:,} tokens")
        if self.loss is not None:
            said.append(f"until the loss is {self.loss:g} or less")
        return ", ".join(said)


def parse_until(texts: Sequence[str]) -> Until:
    """What one command line asks for. Raises ConfigError for a text of another form, or two that contradict."""
    found: dict[str, float] = {}
    for text in texts:
        name, equals, raw = (part.strip() for part in text.partition("="))
        if not equals or name not in ("tokens", "steps", "loss"):
            raise ConfigError(f"--until {text!r} is none of tokens=, steps= and loss=", f"for example {_FORMS}")
        if name in found:
            raise ConfigError(f"--until {name}= is given twice", "leave one out")
        found[name] = _number(name, raw)
    if {"tokens", "steps"} <= set(found):
        raise ConfigError(
            f"--until steps={found['steps']:.0f} and tokens={found['tokens']:g} both say when to end",
            "give one of the two",
        )
    steps, tokens = (None if name not in found else int(found[name]) for name in ("steps", "tokens"))
    return Until(steps, tokens, found.get("loss"))


def _number(name: str, raw: str) -> float:
    """A count above 0, whole for steps and tokens (`30e9` and `30_000` are), or a loss above 0."""
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    whole = name == "loss" or value == math.floor(value) if math.isfinite(value) else False
    if not whole or value <= 0 or (name == "steps" and value > _MOST):
        kind = "a loss above 0" if name == "loss" else f"a whole number of {name} above 0"
        raise ConfigError(f"--until {name}={raw} is not {kind}", f"for example {_FORMS}")
    return value


def length_settings(until: Until, resolved: Resolved, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] that `until` decides for a run.

    ConfigError if they contradict what the command line gives beside it (dotted key -> value).
    """
    settings = until.settings(resolved.batch, resolved.model.seq)
    for key, value in settings.items():
        other = given.get(f"train.{key}")
        if other is not None and other != value:
            asked = "tokens" if key == "steps" and until.tokens is not None else {"until_loss": "loss"}.get(key, key)
            raise ConfigError(
                f"--until {asked}={getattr(until, asked):g} means train.{key} = {value:g}, but the command line also "
                f"gives train.{key} = {other}",
                "leave one out",
            )
    return settings


# --- the chain of jobs


@dataclass(frozen=True)
class Ahead:
    """What a forecast of a run's chain goes by, beside its settings.

    `parent` is the run that it resumes from, after step `done`; `spent` GPU-hours of its budget are gone already.
    `lead_is_given`: the signal's lead is the user's own, and stays.
    """

    until: Until
    earlier: Callable[[], Earlier]
    lead_is_given: bool
    parent: RunFolder | None = None
    done: int = 0
    spent: float = 0.0


def wants_forecast(resolved: Resolved, until: Until) -> bool:
    """Whether the user asks how long it will take, or the jobs of the chain are to be submitted all at once."""
    singleton = resolved.cluster.scheduler == "slurm" and resolved.cluster.chain == "singleton"
    return until != Until() or resolved.job.max_gpu_hours is not None or singleton


def forecast_chain(resolved: Resolved, foresight: Foresight, ahead: Ahead) -> tuple[Resolved, Forecast]:
    """The settings with the lead of the signal that the save's time asks for, and the forecast.

    Raises ConfigError for what cannot come to its end.
    """
    from hpc_gpt.chain.forecast import Known, make_forecast
    from hpc_gpt.chain.measured import measure_run

    step = foresight.tables["step"] if foresight.tables is not None else None
    before = None
    if ahead.parent is not None:
        try:
            before = measure_run(ahead.parent)
        except UserError:  # a damaged folder has measured nothing
            before = None
    known = Known(
        done=ahead.done,
        alike=ahead.earlier().newest_alike(resolved),
        parent=before,
        predicted=step,
        spent=ahead.spent,
        no_prediction=foresight.line if step is None else "",
    )
    forecast = make_forecast(resolved, known, ahead.lead_is_given)
    if forecast.lead_s is not None:
        resolved = replace(resolved, job=replace(resolved.job, signal_lead_s=forecast.lead_s))
    return resolved, forecast


def short_of_time(resolved: Resolved, earlier: Callable[[], Earlier]) -> tuple[str, ...]:
    """A line if the signal comes so early that a job has less than half of its time to train, or less than a start
    and a few steps took in a run of the same settings."""
    limit, lead = limit_s(resolved.job.time), resolved.job.signal_lead_s or 0
    if limit is None or lead >= limit:
        return ()
    left = limit - lead
    alike = earlier().newest_alike(resolved)
    needed = (alike.start_s or 0.0) + _FEW_STEPS * alike.step_s if alike else 0.0
    if 2 * left >= limit and left >= needed:
        return ()
    words = f"warning: job.signal_lead_s = {lead} leaves a job {left} s of its {limit} s until it is to save"
    if alike and left < needed:
        words += f", and a start and {_FEW_STEPS} steps took {needed:.3g} s in run {alike.run}"
    return (f"{words}; give more --time, or a smaller job.signal_lead_s",)
