"""Resuming a run in another layout, on another cluster or under other switches: as a new run of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_gpt.cluster import ClusterProfile, load_profile
from hpc_gpt.errors import RunFolderError, UserError
from hpc_gpt.experiment_text import experiment_text
from hpc_gpt.foresight import foresee
from hpc_gpt.lineage import Parent, check_resumable, descend, parent_of
from hpc_gpt.render import render_script
from hpc_gpt.run_folder import RunFolder, create_run
from hpc_gpt.submission import Prepared, Submitted, check_submission, start_run


def prepare_resumption(
    run: RunFolder,
    changes: Mapping[str, Any],
    profile: ClusterProfile | None,
    template: Path | None,
    force: bool = False,
) -> tuple[Prepared, Parent]:
    """The new run that goes on where `run` is, with `changes` laid over its settings; its own profile for None.

    What is predicted not to fit is refused, unless `force`.
    Raises RunFolderError while a job of the run is still there, LayoutError or ConfigError for what cannot go on.
    """
    from hpc_gpt.status import LIVE, read_own_status

    state = read_own_status(run).state
    if state in LIVE:
        raise RunFolderError(f"run {run.run_id} is {state}", f"hpc-gpt cancel {run.run_id} first, or wait for its end")
    settings = run.resolved()
    parent = parent_of(run)
    resolved = descend(settings, changes, profile or settings.cluster, parent.step)
    check_resumable(resolved)
    text = experiment_text(resolved, f"Goes on from run {run.run_id} after step {parent.step}.")
    seen = foresee(resolved, profile or _as_it_is_now(settings.cluster), refuse=not force)
    return Prepared(resolved, render_script(resolved, template), text, foresight=seen), parent


def _as_it_is_now(stored: ClusterProfile) -> ClusterProfile:
    """The profile of that name with what the planner reads, which no run's settings hold; else the stored one."""
    try:
        return load_profile(stored.name)
    except UserError:
        return stored


def resume_elsewhere(prepared: Prepared, parent: Parent, logs: Path) -> Submitted:
    """Submits the new run; its folder says where it comes from before the job is there. Raises as submit_run."""
    from hpc_gpt.ds_config import ENGINES, deepspeed_config

    resolved = prepared.resolved
    provenance = check_submission([resolved], logs)
    ds_config = deepspeed_config(resolved) if resolved.engine.name in ENGINES else None
    run = create_run(
        logs,
        resolved,
        prepared.script,
        prepared.text,
        ds_config,
        provenance,
        resumed_from=asdict(parent),
        predicted=prepared.foresight.tables if prepared.foresight else None,
    )
    return start_run(run, resolved)
