"""Resuming a run: once more in its own folder, or with other settings, or on another cluster, as a new run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.chain.decisions import gpus_of, read_history
from hpc_gpt.chain.judge import gpu_hours
from hpc_gpt.errors import ConfigError, RunFolderError, UserError
from hpc_gpt.launch.foresight import Foresight
from hpc_gpt.launch.prepare import Prepared, finish
from hpc_gpt.launch.slurm import check_reachable
from hpc_gpt.launch.status import read_own_status
from hpc_gpt.launch.submission import Submitted, check_inputs, check_submission, start_run, write_run
from hpc_gpt.launch.until import Ahead, Until, forecast_chain, length_settings, wants_forecast
from hpc_gpt.runs.lineage import Parent, check_resumable, check_unfinished, descend, newest_step, parent_of
from hpc_gpt.runs.provenance import list_gpus
from hpc_gpt.runs.run_folder import PREDICTED, RunFolder
from hpc_gpt.runs.state import LIVE
from hpc_gpt.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.settings.resolve import Resolved, experiment_text
from hpc_gpt.small_files import read_json

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier


def check_not_live(run: RunFolder) -> None:
    """RunFolderError if a job of the run is queued or running, or may be on another machine."""
    state = read_own_status(run).state
    if state in LIVE:
        raise RunFolderError(f"run {run.run_id} is {state}", f"hpc-gpt cancel {run.run_id} first, or wait for its end")


def prepare_resumption(
    run: RunFolder,
    changes: Mapping[str, Any],
    profile: ClusterProfile | None,
    template: Path | None,
    force: bool,
    until: Until,
    earlier: Earlier,
) -> tuple[Prepared, Parent]:
    """A new run that resumes from `run`, with `changes` laid over its settings; `profile` None keeps its profile.

    `until` says how far to train; `earlier` has the measurements of earlier runs. `force` accepts a layout that is
    predicted not to fit. Raises RunFolderError as `check_not_live`; LayoutError or ConfigError if it cannot resume so.
    """
    check_not_live(run)
    settings = run.resolved()
    parent = parent_of(run)
    length = changed_length(settings, until, changes)
    resolved = descend(settings, changes, profile or settings.cluster, parent.step, length)
    check_resumable(resolved)
    check_unfinished(run, resolved)
    text = experiment_text(resolved, f"Resumes run {run.run_id} after step {parent.step}.")
    notes = _resumption_notes(settings, resolved, until, parent.step)
    ahead = Ahead(until, lambda: earlier, "job.signal_lead_s" in changes, run, parent.step)
    here = profile or _as_it_is_now(settings.cluster)
    prepared = finish(resolved, here, text, notes, not force, template, ahead)
    return replace(prepared, data_beside=run.data_beside), parent


def changed_length(settings: Resolved, until: Until, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] that `until` changes in a run that resumes. Raises ConfigError."""
    length = length_settings(until, settings, changes)
    return {key: value for key, value in length.items() if value != getattr(settings.train, key)}


def forecast_same(run: RunFolder, until: Until, earlier: Earlier) -> Forecast | None:
    """The forecast of a run that resumes unchanged, with its own job.sh; None if it is not wanted.

    Raises ConfigError, also if the run is done.
    """
    check_unfinished(run)
    resolved = run.resolved()
    if not wants_forecast(resolved, until):
        return None

    foresight = Foresight("", tables=read_json(run.path / PREDICTED) or None)
    spent = gpu_hours(read_history(run, gpus_of(resolved), time.time()))
    ahead = Ahead(until, lambda: earlier, True, run, newest_step(run) or 0, spent)
    return forecast_chain(resolved, foresight, ahead)[1]


def _resumption_notes(before: Resolved, resolved: Resolved, until: Until, step: int) -> tuple[str, ...]:
    notes = []
    if words := until.words(resolved.batch, resolved.model.seq):
        notes.append(f"until: {words}")
    steps, old = resolved.train.steps, before.train.steps
    if steps != old and resolved.train.decay == "cosine":
        notes.append(
            f"note: the cosine of the learning rate was over {old} steps and is over {steps} from step {step} on: "
            "the rate differs from that of an unbroken run of either length"
        )
    return tuple(notes)


def _as_it_is_now(stored: ClusterProfile) -> ClusterProfile:
    """The profile of that name as it is now, with the planner's keys, which a run does not store; else `stored`."""
    try:
        return load_profile(stored.name, of_a_run=True)
    except UserError:
        return stored


def resume_run(run: RunFolder, jobs: int = 1) -> Submitted:
    """Submit a run again, in its folder and with its own job.sh; the trainer resumes from the newest checkpoint.

    Raises RunFolderError if an earlier job of the run is queued or running, or may be on another machine; ConfigError
    if the run is done, or its engine cannot resume; DataError.
    """
    return start_run(run, check_resumption(run), jobs)


def check_resumption(run: RunFolder, dry: bool = False) -> Resolved:
    """The settings of a run that may be submitted again. Raises as resume_run; `dry` is as for check_submission."""
    check_not_live(run)
    resolved = run.resolved()
    if not run.job_script.is_file():
        raise ConfigError(f"{run.path} has no job.sh", "the run folder is damaged; submit the experiment again")
    check_unfinished(run)
    if newest_step(run) is not None:
        check_resumable(resolved)
    if resolved.cluster.scheduler == "slurm" and not dry:
        check_reachable()
    # A relative path may be another file in another folder.
    check_inputs(resolved, run.data_beside, bool(list_gpus()), make=not dry)
    return resolved


def resume_elsewhere(prepared: Prepared, parent: Parent, logs: Path) -> Submitted:
    """Submit a new run that resumes from `parent`, which its folder names. Raises as submit_run."""
    resolved = prepared.resolved
    provenance = check_submission([prepared], logs)
    run = write_run(prepared, logs, provenance, resumed_from=asdict(parent))
    return start_run(run, resolved, prepared.jobs)
