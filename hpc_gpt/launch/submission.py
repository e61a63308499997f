"""Submitting a run: its data, its folder, then the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import SlurmUnreachable, UserError
from hpc_gpt.launch.prepare import Prepared, faults_of_rows
from hpc_gpt.launch.slurm.scheduler import (
    check_dependency,
    check_output_path,
    check_reachable,
    has_sbatch,
    submission_environment,
    test_only,
)
from hpc_gpt.runs.provenance import collect
from hpc_gpt.runs.run_folder import DATA_BESIDE, EXPERIMENT_FILE, RunFolder, check_writable, create_run
from hpc_gpt.runs.snapshot import KEY, check_path, take_snapshot
from hpc_gpt.settings.ds_config import ENGINES, deepspeed_config
from hpc_gpt.settings.megatron_lm import NAME as MEGATRON_LM
from hpc_gpt.settings.requirements import check_checkout, check_requirements
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.tokens.run_data import ensure_data, located


@dataclass(frozen=True)
class Submitted:
    """A run and the job it has just become; `links` are all jobs of its chain, if several were sent at once."""

    run: RunFolder
    scheduler: str
    job_id: str
    links: tuple[str, ...] = ()


def submit_run(prepared: Prepared, logs: Path) -> Submitted:
    """Checks that the scheduler answers, makes missing data, writes the run folder, submits.

    Whatever can be refused is refused before the folder exists; only sbatch's own refusal leaves a run behind.
    Raises SlurmUnreachable, ConfigError, DataError, RunFolderError, JobRefused.
    """
    provenance = check_submission([prepared], logs)
    return start_run(write_run(prepared, logs, provenance), prepared.resolved, prepared.links)


def check_submission(rows: Sequence[Prepared], logs: Path, dry: bool = False) -> dict[str, Any]:
    """All that can be asked before a folder is written, of every run; makes missing data and gives the provenance.

    The runs are of one cluster. Raises as submit_run; RowFaults, all at once, if they are a sweep's. `dry`: nothing
    is made, and a Slurm that is away is no fault.
    """
    check_path(logs)
    cluster = rows[0].resolved.cluster
    if cluster.scheduler == "slurm":
        check_output_path(logs)
        for row in rows:
            check_dependency(row.resolved)
        if not dry:
            check_reachable()
    if dry:
        check_writable(logs)
    provenance = {**collect(), KEY: take_snapshot().sha256}
    faults: dict[str, UserError] = {}
    for row in rows:
        try:
            check_inputs(row.resolved, row.data_beside, bool(provenance["gpus"]), make=not dry)
        except UserError as fault:
            if len(rows) == 1:
                raise
            faults[str(row.resolved.row)] = fault
    if faults:
        raise faults_of_rows(faults)
    return provenance


def check_inputs(resolved: Resolved, beside: Path | None, has_gpu: bool, make: bool = False) -> Path | None:
    """What a run needs to be here: packages, if it runs here; Megatron-LM's checkout; its data, whose path it gives,
    None for random tokens. To `make` is to build the standard library's. Raises ConfigError, DataError."""
    if resolved.cluster.scheduler == "local":
        check_requirements(resolved, has_gpu)
    if resolved.engine.name == MEGATRON_LM:
        check_checkout(resolved, os.environ)
    return ensure_data(located(resolved, beside), make)


def write_run(
    prepared: Prepared,
    logs: Path,
    provenance: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    resumed_from: Mapping[str, Any] | None = None,
) -> RunFolder:
    """The run folder, with all that is known before the job starts. Raises RunFolderError."""
    resolved = prepared.resolved
    if prepared.file is not None:
        provenance = {**provenance, EXPERIMENT_FILE: os.path.abspath(prepared.file)}
    beside = {DATA_BESIDE: str(prepared.data_beside)} if prepared.data_beside is not None else {}
    return create_run(
        logs,
        resolved,
        prepared.script,
        prepared.text,
        deepspeed_config(resolved) if resolved.engine.name in ENGINES else None,
        {**provenance, **beside},
        resumed_from=resumed_from,
        sweep=sweep,
        predicted=prepared.foresight.tables if prepared.foresight else None,
        code=take_snapshot(),
    )


def start_run(run: RunFolder, resolved: Resolved, links: int = 1) -> Submitted:
    """Hands a run's job.sh to the scheduler of its profile, `links` times in a chain that waits for itself.

    Raises JobRefused, SlurmUnreachable, RunFolderError.
    """
    if resolved.cluster.scheduler == "slurm":
        from hpc_gpt.launch.slurm.executor import submit as submit_to_slurm

        jobs = submit_to_slurm(run, resolved, links)
        return Submitted(run, "slurm", jobs[0], tuple(jobs))
    from hpc_gpt.launch.local.executor import submit as start_here

    return Submitted(run, "local", start_here(run, resolved).job_id)


def dry_run(resolved: Resolved, script: str) -> str:
    """What the scheduler says of a script without taking it, or why it cannot be asked; writes nothing. Raises
    JobRefused."""
    if resolved.cluster.scheduler != "slurm":
        return f"would start {resolved.gpus} ranks on this machine"
    if not has_sbatch():
        return "no sbatch here to ask; the script is as it would be submitted"
    try:
        check_reachable()  # sbatch itself would try for 18 s
        return test_only(script, submission_environment(os.environ, {}))
    except SlurmUnreachable as fault:
        return f"{fault}: it was not asked; the script is as it would be submitted"
