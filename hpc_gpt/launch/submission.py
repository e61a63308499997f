"""Submit a run or a sweep: make missing data, write the run folders, call the scheduler; and resume a run.

A sweep has a run folder for every row, and one job array for each set of rows with equal requests to Slurm. What
belongs to no single run is in `logs/<sweep>/<sweep id>/`: `<n>/` for the n-th job, with a link `<i>` to the folder of
each of its runs, and the script of an array. Each run's `sweep.json` has the sweep's id.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.chain.decisions import gpus_of, read_history
from hpc_gpt.chain.judge import gpu_hours
from hpc_gpt.errors import ConfigError, JobRefused, RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.files import read_json, write_once
from hpc_gpt.launch.foresight import Foresight
from hpc_gpt.launch.prepare import Prepared, faults_of_rows, finish
from hpc_gpt.launch.render import array_script, directives_but_name
from hpc_gpt.launch.slurm import (
    check_dependency,
    check_output_path,
    check_reachable,
    has_sbatch,
    largest_array,
    submission_environment,
    test_only,
)
from hpc_gpt.launch.status import read_own_status
from hpc_gpt.launch.until import Ahead, Until, forecast_chain, length_settings, wants_forecast
from hpc_gpt.process import start_time
from hpc_gpt.runs.lineage import Parent, check_resumable, check_unfinished, descend, newest_step, parent_of
from hpc_gpt.runs.provenance import collect, list_gpus
from hpc_gpt.runs.run_folder import (
    DATA_BESIDE,
    EXPERIMENT_FILE,
    IN_QUEUE,
    PREDICTED,
    RunFolder,
    check_writable,
    claim_folder,
    create_run,
)
from hpc_gpt.runs.snapshot import KEY, check_path, take_snapshot
from hpc_gpt.runs.state import LIVE
from hpc_gpt.settings.cluster import ClusterProfile, load_profile
from hpc_gpt.settings.ds_config import ENGINES, deepspeed_config
from hpc_gpt.settings.megatron_lm import NAME as MEGATRON_LM
from hpc_gpt.settings.requirements import check_checkout, check_requirements
from hpc_gpt.settings.resolve import Resolved, experiment_text, folder_name
from hpc_gpt.tokens.run_data import ensure_data, located

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.chain.measured import Earlier


@dataclass(frozen=True)
class Submitted:
    """A run and the id of its job; `jobs` are those of its job chain, if several were submitted at once."""

    run: RunFolder
    scheduler: str
    job_id: str
    jobs: tuple[str, ...] = ()


def submit_run(prepared: Prepared, logs: Path) -> Submitted:
    """Check that the scheduler answers, make missing data, write the run folder, submit.

    Everything but sbatch itself refuses before the folder exists. Raises SlurmUnreachable, ConfigError, DataError,
    RunFolderError, JobRefused.
    """
    provenance = check_submission([prepared], logs)
    return start_run(write_run(prepared, logs, provenance), prepared.resolved, prepared.jobs)


def check_submission(rows: Sequence[Prepared], logs: Path, dry: bool = False) -> dict[str, Any]:
    """Check every run before a folder is written, make missing data, and return the provenance.

    All runs are for one cluster. Raises as submit_run; for the rows of a sweep RowFaults with all faults. `dry`:
    nothing is made, and an unreachable Slurm is no fault.
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
    """Check a run's packages if it runs here, its Megatron-LM checkout, and its data; return the path of the data, None
    for random tokens. `make`: build the standard library's data. Raises ConfigError, DataError."""
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
    """Write the run folder, with all that is known before the job starts. Raises RunFolderError."""
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


def start_run(run: RunFolder, resolved: Resolved, jobs: int = 1) -> Submitted:
    """Submit a run's job.sh to the scheduler of its profile, as a chain of so many jobs that wait for each other.

    Raises JobRefused, SlurmUnreachable, RunFolderError.
    """
    if resolved.cluster.scheduler == "slurm":
        from hpc_gpt.launch.slurm_executor import submit as submit_to_slurm

        ids = submit_to_slurm(run, resolved, jobs)
        return Submitted(run, "slurm", ids[0], tuple(ids))
    from hpc_gpt.launch.local.controller import submit as start_here

    return Submitted(run, "local", start_here(run, resolved))


def dry_run(resolved: Resolved, script: str) -> str:
    """The scheduler's answer to a script that is not submitted, or why it cannot be asked. Writes nothing. Raises
    JobRefused."""
    if resolved.cluster.scheduler != "slurm":
        return f"would start {resolved.gpus} ranks on this machine"
    if not has_sbatch():
        return "no sbatch here to ask; the script is as it would be submitted"
    try:
        check_reachable()  # sbatch itself would retry for 18 s
        return test_only(script, submission_environment(os.environ, {}))
    except SlurmUnreachable as fault:
        return f"{fault}: it was not asked; the script is as it would be submitted"


# --- sweeps


@dataclass(frozen=True)
class Job:
    """A submitted job: an array, or the job of one run."""

    id: str
    runs: tuple[RunFolder, ...]


@dataclass
class SubmittedSweep:
    """A sweep with the folders of its runs, its jobs, and what sbatch refused.

    `largest` is the most elements that an array can have on its cluster.
    """

    name: str
    folder: Path
    largest: int = 1
    runs: list[RunFolder] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    refusals: list[JobRefused] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The id that all its runs share."""
        return self.folder.name


def write_sweep(name: str, rows: Sequence[Prepared], logs: Path) -> SubmittedSweep:
    """Check every row, then write the folder of each run.

    Raises as submit_run. If a folder cannot be written, the earlier ones stay, marked as refused.
    """
    provenance = check_submission(rows, logs)
    largest = largest_array() if rows[0].resolved.cluster.scheduler == "slurm" else 1
    sweep = SubmittedSweep(name, claim_folder(logs / folder_name(name)), largest)
    for row in rows:
        try:
            note = {"id": sweep.id, "name": name, "row": row.resolved.row}
            sweep.runs.append(write_run(row, logs, provenance, note))
        except RunFolderError as fault:
            _refuse(sweep.runs, f"the folder of row {row.resolved.row!r} could not be written: {fault}")
            raise
    return sweep


def queue_sweep(sweep: SubmittedSweep, rows: Sequence[Prepared], at_once: int | None = None) -> None:
    """Submit a sweep to Slurm: an array for each set of rows with equal directives, single jobs for the others.

    `at_once`: how many runs of an array may run at a time. What sbatch refuses is added to the refusals, and the other
    jobs are submitted. Raises SlurmUnreachable and RunFolderError; the later rows are then marked as refused.
    """
    groups = group_alike([row.script for row in rows], sweep.largest)
    for number, group in enumerate(groups, 1):
        runs = [sweep.runs[index] for index in group]
        try:
            folder = link_runs(sweep, number, runs)
            sweep.jobs.append(Job(_queue(sweep, folder, [rows[index] for index in group], runs, at_once), tuple(runs)))
        except JobRefused as fault:
            names = ", ".join(repr(rows[index].resolved.row) for index in group)
            sweep.refusals.append(JobRefused(f"row{'s' * (len(group) > 1)} {names}: {fault}", fault.hint))
        except (SlurmUnreachable, RunFolderError, KeyboardInterrupt) as fault:
            _refuse([sweep.runs[index] for later in groups[number:] for index in later], str(fault) or "Ctrl-C")
            raise


def _queue(
    sweep: SubmittedSweep, folder: Path, rows: Sequence[Prepared], runs: Sequence[RunFolder], at_once: int | None
) -> str:
    from hpc_gpt.launch.slurm_executor import ARRAY_SCRIPT, submit_array

    if len(rows) == 1:
        return start_run(runs[0], rows[0].resolved, rows[0].jobs).job_id
    write_once(folder / ARRAY_SCRIPT, array_script(sweep.name, [row.script for row in rows]))
    return submit_array(folder, rows[0].resolved, runs, at_once)


def link_runs(sweep: SubmittedSweep, number: int, runs: Sequence[RunFolder]) -> Path:
    """Make the folder of the sweep's n-th job, with a link to each of its runs. Raises RunFolderError."""
    folder = sweep.folder / str(number)
    try:
        folder.mkdir()
        for index, run in enumerate(runs):
            (folder / str(index)).symlink_to(os.path.relpath(run.path, folder), target_is_directory=True)
    except OSError as fault:
        raise RunFolderError(f"cannot link runs in {folder}: {fault.strerror}", "is the disk full?") from None
    return folder


def hold_here(sweep: SubmittedSweep) -> None:
    """Note in each run that it waits for its turn on this machine, and for which process."""
    pid = os.getpid()
    queue = {"pid": pid, "pid_start": start_time(pid)}
    for run in sweep.runs:
        run.add_submission({"scheduler": "local", "job_id": None, "queue": queue, "host": platform.node()})
    link_runs(sweep, 1, sweep.runs)


def start_held(run: RunFolder, row: Prepared) -> Submitted | None:
    """Start a run whose turn has come; None if it was cancelled while it waited."""
    return None if run.cancelled_mark(IN_QUEUE).exists() else start_run(run, row.resolved)


def _refuse(runs: Sequence[RunFolder], why: str) -> None:
    for run in runs:
        run.add_submission({"scheduler": "slurm", "job_id": None, "refused": why})


def plan_jobs(rows: Sequence[Prepared]) -> list[list[Prepared]]:
    """The rows of each job that queue_sweep would submit, with no limit on the size of arrays."""
    return [[rows[index] for index in group] for group in group_alike([row.script for row in rows], len(rows))]


def group_alike(scripts: Sequence[str], largest: int) -> list[list[int]]:
    """The scripts' numbers in groups with equal directives (the job's name may differ), `largest` at most in each.

    Groups are in the order of their first script.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, script in enumerate(scripts):
        groups.setdefault(tuple(directives_but_name(script)), []).append(number)
    return [group[at : at + largest] for group in groups.values() for at in range(0, len(group), largest)]


# --- resuming: a run again in its own folder, or a new run with other settings or on another cluster


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
    words = until.words(resolved.batch, resolved.model.seq)
    notes = [f"until: {words}"] if words else []
    steps, before = resolved.train.steps, settings.train.steps
    if steps != before and resolved.train.decay == "cosine":
        notes.append(
            f"note: the cosine of the learning rate was over {before} steps and is over {steps} from step "
            f"{parent.step} on: the rate differs from that of an unbroken run of either length"
        )
    ahead = Ahead(until, lambda: earlier, "job.signal_lead_s" in changes, run, parent.step)
    here = profile or _as_it_is_now(settings.cluster)
    prepared = finish(resolved, here, text, tuple(notes), not force, template, ahead)
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
