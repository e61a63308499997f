"""Resuming a run in another layout, on another cluster or under other switches: as a new run of its own."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.launch.chain_ahead import short_of_time, wants_outlook, with_outlook
from hpc_gpt.launch.foresight import Foresight, foresee
from hpc_gpt.launch.render import render_script
from hpc_gpt.launch.submission import Prepared, Submitted, check_submission, start_run, write_run
from hpc_gpt.runs.lineage import Parent, check_resumable, check_unfinished, descend, newest_step, parent_of
from hpc_gpt.runs.run_folder import PREDICTED, RunFolder
from hpc_gpt.runs.state import LIVE
from hpc_gpt.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.settings.experiment_text import experiment_text
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.settings.until import Until, check_against
from hpc_gpt.small_files import read_json

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier


def prepare_resumption(
    run: RunFolder,
    changes: Mapping[str, Any],
    profile: ClusterProfile | None,
    template: Path | None,
    force: bool = False,
    until: Until | None = None,
    earlier: Earlier | None = None,
) -> tuple[Prepared, Parent]:
    """The new run that goes on where `run` is, with `changes` laid over its settings; its own profile for None.

    `until` says how far it is to train, `earlier` how long things took. What is predicted not to fit is refused, unless
    `force`.
    Raises RunFolderError while a job of the run is still there, LayoutError or ConfigError for what cannot go on.
    """
    from hpc_gpt.launch.status import read_own_status

    state = read_own_status(run).state
    if state in LIVE:
        raise RunFolderError(f"run {run.run_id} is {state}", f"hpc-gpt cancel {run.run_id} first, or wait for its end")
    settings = run.resolved()
    parent = parent_of(run)
    length = settings_of(settings, until, changes)
    resolved = descend(settings, changes, profile or settings.cluster, parent.step, length)
    check_resumable(resolved)
    check_unfinished(run, resolved)
    text = experiment_text(resolved, f"Goes on from run {run.run_id} after step {parent.step}.")
    seen = foresee(resolved, profile or _as_it_is_now(settings.cluster), refuse=not force)
    outlook = None
    if earlier is not None and wants_outlook(resolved, until):
        given = "job.signal_lead_s" in changes
        resolved, outlook = with_outlook(resolved, seen, earlier, given, run, parent.step)
    notes = _notes(settings, resolved, until, parent.step)
    script = render_script(resolved, template)
    if earlier is not None:
        notes = (*notes, *short_of_time(resolved, lambda: earlier))
    return Prepared(resolved, script, text, notes, seen, outlook, data_beside=run.data_beside), parent


def settings_of(settings: Resolved, until: Until | None, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of [train] by which a run that goes on ends, where they are not as they were. Raises ConfigError."""
    if until is None:
        return {}
    length = until.settings(settings.batch, settings.model.seq)
    check_against(until, length, changes)
    return {key: value for key, value in length.items() if value != getattr(settings.train, key)}


def outlook_of_same(run: RunFolder, until: Until | None, earlier: Earlier) -> Forecast | None:
    """The outlook of a run that goes on as it is, with its own job.sh; None where nobody asks. Raises ConfigError, also
    where the run is done."""
    check_unfinished(run)
    resolved = run.resolved()
    if not wants_outlook(resolved, until):
        return None
    from hpc_gpt.chain.history import gpu_hours, gpus_of, read_history

    seen = Foresight("", tables=read_json(run.path / PREDICTED) or None)
    spent = gpu_hours(read_history(run, gpus_of(resolved), time.time()))
    return with_outlook(resolved, seen, earlier, True, run, newest_step(run) or 0, spent)[1]


def _notes(before: Resolved, resolved: Resolved, until: Until | None, step: int) -> tuple[str, ...]:
    notes = []
    if until is not None and (words := until.words(resolved.batch, resolved.model.seq)):
        notes.append(f"until: {words}")
    steps, old = resolved.train.steps, before.train.steps
    if steps != old and resolved.train.decay == "cosine":
        notes.append(
            f"note: the learning rate's cosine was laid over {old} steps and is over {steps} from step {step} on: "
            "another rate than an unbroken run of either length has"
        )
    return tuple(notes)


def _as_it_is_now(stored: ClusterProfile) -> ClusterProfile:
    """The profile of that name with what the planner reads, which no run's settings hold; else the stored one."""
    try:
        return load_profile(stored.name, of_a_run=True)
    except UserError:
        return stored


def resume_elsewhere(prepared: Prepared, parent: Parent, logs: Path) -> Submitted:
    """Submits the new run; its folder says where it comes from before the job is there. Raises as submit_run."""
    resolved = prepared.resolved
    provenance = check_submission([prepared], logs)
    run = write_run(prepared, logs, provenance, resumed_from=asdict(parent))
    return start_run(run, resolved, prepared.links)
