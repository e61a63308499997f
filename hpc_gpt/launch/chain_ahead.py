"""Before a run is submitted: how far it is to train, and the outlook of its chain of jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import ConfigError, UserError
from hpc_gpt.job_time import limit_s
from hpc_gpt.launch.foresight import Foresight
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.experiment import Experiment
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.settings.until import Until, check_against

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier

# What a job should train at least.
_FEW_STEPS = 3


def settle_until(
    experiment: Experiment, resolved: Resolved, until: Until | None, given: Mapping[str, Any]
) -> tuple[Experiment, tuple[str, ...]]:
    """The experiment that trains as far as was asked for, and a line that says how far; as it is where nothing was.

    `resolved` is that experiment, `given` what the command line says beside. Raises ConfigError.
    """
    if until is None or until == Until():
        return experiment, ()
    settings = until.settings(resolved.batch, resolved.model.seq)
    check_against(until, settings, given)
    words = until.words(resolved.batch, resolved.model.seq)
    return replace(experiment, train=replace(experiment.train, **settings)), (f"until: {words}",)


def refuse_with_smoke(until: Until | None) -> None:
    """ConfigError where a run that is to train far is to be a tiny one too."""
    if until is not None and until != Until():
        raise ConfigError("--until says how far to train, and --smoke trains 5 steps", "give one of the two")


def wants_outlook(resolved: Resolved, until: Until | None) -> bool:
    """Whether the user asks how long it will take, or the jobs of the chain are to be submitted all at once."""
    if until is None:
        return False
    singleton = resolved.cluster.scheduler == "slurm" and resolved.cluster.chain == "singleton"
    return until != Until() or resolved.job.max_gpu_hours is not None or singleton


def short_of_time(resolved: Resolved, earlier: Callable[[], Earlier]) -> tuple[str, ...]:
    """A line where the signal comes so early that a job has less than half of its time to train, or less than a start
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


def with_outlook(
    resolved: Resolved,
    foresight: Foresight | None,
    earlier: Earlier,
    lead_is_given: bool,
    parent: RunFolder | None = None,
    done: int = 0,
    spent: float = 0.0,
) -> tuple[Resolved, Forecast]:
    """The settings with the lead of the signal that the save's time asks for, and the outlook.

    `parent` is the run that this one goes on from, after step `done`; `spent` GPU-hours of its budget are gone. Raises
    ConfigError for what cannot come to its end.
    """
    from hpc_gpt.chain.forecast import Known, make_forecast
    from hpc_gpt.chain.measured import measure_run

    tables = foresight.tables if foresight is not None else None
    step = tables["step"] if tables is not None else None
    before = None
    if parent is not None:
        try:
            before = measure_run(parent)
        except UserError:  # a damaged folder tells nothing
            before = None
    known = Known(
        done=done,
        alike=earlier.newest_alike(resolved),
        parent=before,
        predicted=step,
        spent=spent,
        no_prediction=foresight.line if foresight is not None and step is None else "",
    )
    outlook = make_forecast(resolved, known, lead_is_given)
    if outlook.lead_s is not None:
        resolved = replace(resolved, job=replace(resolved.job, signal_lead_s=outlook.lead_s))
    return resolved, outlook
