"""Submit a run: make missing data, write the run folder, call the scheduler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.engines import engine_named
from hpc_gpt.errors import JobRefused, SlurmUnreachable, UserError
from hpc_gpt.launch.prepare_sweep import faults_of_rows
from hpc_gpt.launch.prepared import PreparedRun
from hpc_gpt.preflight.verdict import preflight_limit_s
from hpc_gpt.program.work_folder import WORK_KEY, snapshot_of
from hpc_gpt.runs.lineage import Parent
from hpc_gpt.runs.provenance import collect, weights_of
from hpc_gpt.runs.run_folder import DATA_BESIDE, EXPERIMENT_FILE, RunFolder, check_writable, create_run
from hpc_gpt.runs.snapshot import check_path, take_snapshot
from hpc_gpt.runs.unpack import CODE_KEY
from hpc_gpt.settings.requirements import check_requirements
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.slurm.clients import check_output_path, check_reachable, has_sbatch
from hpc_gpt.slurm.requeue import way_of
from hpc_gpt.slurm.start_check import ExpectedStart, NeverStarts, ask_start
from hpc_gpt.tokens.run_data import ensure_data
from hpc_gpt.weights.folder import check_weights, read_folder
from hpc_gpt.words import counted


@dataclass(frozen=True)
class SubmittedRun:
    """A run and the id of its job; `jobs` are those of its job chain, if several were submitted at once. `waits`: why
    Slurm cannot start it now, empty if it can."""

    run: RunFolder
    scheduler: str
    job_id: str
    jobs: tuple[str, ...] = ()
    waits: str = ""


def submit_run(prepared: PreparedRun, logs: Path, parent: Parent | None = None) -> SubmittedRun:
    """Checks that the scheduler answers, makes missing data, writes the run folder, submits. The folder names the
    `parent` from which it resumes.

    Everything but sbatch itself refuses before the folder exists. Raises SlurmUnreachable, ConfigError, DataError,
    RunFolderError, JobRefused.
    """
    provenance = check_submission([prepared], logs, begins=parent is None)
    waits = check_start(prepared.resolved, prepared.script)
    words = prepared.job_script.words if prepared.job_script is not None else ()
    run = write_run(prepared, logs, provenance, parent=parent)
    return replace(start_run(run, prepared.resolved, prepared.jobs, words), waits=waits)


def check_submission(rows: Sequence[PreparedRun], logs: Path, dry: bool = False, begins: bool = True) -> dict[str, Any]:
    """Checks every run before a folder is written, makes missing data, and returns the provenance.

    All runs are for one cluster. Raises as submit_run; for the rows of a sweep RowFaults with all faults. `dry`:
    nothing is made, and an unreachable Slurm is no fault. `begins`: a run that resumes needs train.init no
    more.
    """
    check_path(logs)
    cluster = rows[0].resolved.cluster
    if cluster.scheduler == "slurm":
        check_output_path(logs)
        for row in rows:
            way_of(row.resolved.cluster).check(row.resolved)
        if not dry:
            check_reachable()
    for folder in {logs / row.resolved.slug for row in rows}:
        check_writable(folder)
    provenance = {**collect(), CODE_KEY: take_snapshot().sha256}
    faults: dict[str, UserError] = {}
    for row in rows:
        try:
            check_inputs(row.resolved, row.data_beside, bool(provenance["gpus"]), not dry, begins)
        except UserError as fault:
            if len(rows) == 1:
                raise
            faults[str(row.resolved.row)] = fault
    if faults:
        raise faults_of_rows(faults)
    return provenance


def check_inputs(
    resolved: Resolved, beside: Path | None, has_gpu: bool, make: bool = False, begins: bool = True
) -> Path | None:
    """Checks a run's packages if it runs here, its Megatron-LM checkout, the weights that it `begins` from, and its
    data; returns the path of the data, None for random tokens. `make`: build the standard library's data. Raises
    ConfigError, DataError."""
    if resolved.cluster.scheduler == "local":
        check_requirements(resolved, has_gpu)
    if resolved.cluster.scheduler == "slurm" and resolved.job.preflight:
        preflight_limit_s()
    engine_named(resolved.engine.name).check_program(resolved, os.environ)
    snapshot_of(resolved)
    if begins and resolved.train.init is not None:
        check_weights(read_folder(Path(resolved.train.init)), resolved.model)
    return ensure_data(resolved, make, beside)


def write_run(
    prepared: PreparedRun,
    logs: Path,
    provenance: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    parent: Parent | None = None,
) -> RunFolder:
    """Writes the run folder, with all that is known before the job starts. Raises RunFolderError."""
    resolved = prepared.resolved
    if prepared.file is not None:
        provenance = {**provenance, EXPERIMENT_FILE: os.path.abspath(prepared.file)}
    beside: dict[str, Any] = {DATA_BESIDE: str(prepared.data_beside)} if prepared.data_beside is not None else {}
    if parent is None:
        beside |= weights_of(resolved)
    if prepared.job_script is not None:
        beside |= prepared.job_script.provenance
    if (work := snapshot_of(resolved)) is not None:
        beside[WORK_KEY] = work.sha256
    return create_run(
        logs,
        resolved,
        prepared.script,
        prepared.text,
        engine_named(resolved.engine.name).config_files(resolved),
        {**provenance, **beside},
        resumed_from=asdict(parent) if parent is not None else None,
        sweep=sweep,
        predicted=prepared.prediction.tables if prepared.prediction else None,
        archives=[archive for archive in (take_snapshot(), work) if archive is not None],
    )


def start_run(run: RunFolder, resolved: Resolved, jobs: int = 1, words: Sequence[str] = ()) -> SubmittedRun:
    """Submits a run's job.sh to the scheduler of its profile, as a chain of so many jobs that wait for each other; a
    script of the user's own with `words` on sbatch's command line.

    Raises JobRefused, SlurmUnreachable, RunFolderError.
    """
    if resolved.cluster.scheduler == "slurm":
        from hpc_gpt.slurm.executor import submit_to_slurm

        ids = submit_to_slurm(run, resolved, jobs, words)
        return SubmittedRun(run, "slurm", ids[0], tuple(ids))
    from hpc_gpt.launch.local.controller import start_here

    return SubmittedRun(run, "local", start_here(run, resolved))


def check_start(resolved: Resolved, script: str) -> str:
    """Why Slurm cannot start a job now, empty if it can. Raises NeverStarts, SlurmUnreachable.

    What sbatch itself refuses is left to it: the run's folder notes its words.
    """
    if resolved.cluster.scheduler != "slurm":
        return ""
    try:
        return ask_start(resolved, script).waits
    except NeverStarts:
        raise
    except JobRefused:
        return ""


def dry_run(resolved: Resolved, script: str) -> ExpectedStart:
    """The scheduler's answer to a script that is not submitted, or why it cannot be asked. Writes nothing. Raises
    JobRefused, also for a job that would never start."""
    if resolved.cluster.scheduler != "slurm":
        return ExpectedStart(f"would start {counted(resolved.tasks, 'rank')} on this machine")
    if not has_sbatch():
        return ExpectedStart("no sbatch here to ask; the script is as it would be submitted")
    try:
        check_reachable()  # sbatch itself would retry for 18 s
        return ask_start(resolved, script)
    except SlurmUnreachable as fault:
        return ExpectedStart(f"{fault}: it was not asked; the script is as it would be submitted")
