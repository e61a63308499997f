"""Submitting a run: its data, its folder, then the scheduler; and the same run once more."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpc_gpt.errors import ConfigError, RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.launch.foresight import Foresight
from hpc_gpt.runs.lineage import check_resumable, check_unfinished, newest_step
from hpc_gpt.runs.run_folder import DATA_BESIDE, EXPERIMENT_FILE, RunFolder, check_writable, create_run
from hpc_gpt.runs.state import LIVE
from hpc_gpt.settings.experiment import ExperimentFile, folder_of_data
from hpc_gpt.settings.megatron_checkout import check_checkout
from hpc_gpt.settings.megatron_lm import NAME as MEGATRON_LM
from hpc_gpt.settings.requirements import check_requirements
from hpc_gpt.settings.resolve import Resolved

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast


@dataclass(frozen=True)
class Prepared:
    """An experiment ready to be submitted: its settings, its script, its file as given and where that is, what is
    predicted of it and of its chain of jobs; and what to tell the user. A relative data.path is looked for in the
    folder `data_beside` first.
    """

    resolved: Resolved
    script: str
    text: str
    notes: tuple[str, ...] = ()
    foresight: Foresight | None = None
    outlook: Forecast | None = None
    file: Path | None = None
    data_beside: Path | None = None

    @property
    def told(self) -> tuple[str, ...]:
        """What to tell the user, what is predicted last."""
        return (*self.notes, *self.foretold)

    @property
    def foretold(self) -> tuple[str, ...]:
        """What is predicted of the run, and of its chain of jobs."""
        lines = self.outlook.lines if self.outlook else ()
        return (*([self.foresight.line] if self.foresight else []), *lines)

    @property
    def links(self) -> int:
        """Jobs to submit at once."""
        singleton = self.resolved.cluster.chain == "singleton"
        return max(1, self.outlook.jobs) if self.outlook is not None and singleton else 1


@dataclass(frozen=True)
class Submitted:
    """A run and the job it has just become; `links` are all jobs of its chain, where several were sent at once."""

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


class RowFaults(ConfigError):
    """What is wrong with rows of a sweep, of which others may be sound: `faults` by row."""

    def __init__(self, message: str, hint: str, faults: Mapping[str, UserError]) -> None:
        super().__init__(message, hint)
        self.faults = faults

    def offering(self, others: int) -> RowFaults:
        """The same, with the hint that --skip-unfit submits the other rows, if there are any."""
        if others:
            self.hint += f"; --skip-unfit submits the other {others}"
        return self


def check_submission(rows: Sequence[Prepared], logs: Path, dry: bool = False) -> dict[str, Any]:
    """All that can be asked before a folder is written, of every run; makes missing data and gives the provenance.

    The runs are of one cluster. Raises as submit_run; RowFaults, all at once, where they are a sweep's. `dry`: nothing
    is made, and a Slurm that is away is no fault.
    """
    from hpc_gpt.runs.provenance import collect
    from hpc_gpt.runs.snapshot import KEY, check_path, take_snapshot

    check_path(logs)
    cluster = rows[0].resolved.cluster
    if cluster.scheduler == "slurm":
        from hpc_gpt.launch.slurm.executor import check_dependency, check_output_path
        from hpc_gpt.launch.slurm.scheduler import check_reachable

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
    from hpc_gpt.tokens.run_data import ensure_data, located

    if resolved.cluster.scheduler == "local":
        check_requirements(resolved, has_gpu)
    if resolved.engine.name == MEGATRON_LM:
        check_checkout(resolved, os.environ)
    return ensure_data(located(resolved, beside), make)


def folder_beside(
    file: ExperimentFile, resolved: Resolved, overrides: Mapping[str, Any] | None, row: str | None
) -> Path | None:
    """The `data_beside` of a run whose settings come from an experiment's file. DataError where the path names two
    files, beside that one and here."""
    folder = folder_of_data(file, overrides, row)
    if folder is None:
        return None
    from hpc_gpt.tokens.run_data import check_beside

    return check_beside(resolved.data, folder)


def faults_of_rows(faults: Mapping[str, UserError]) -> RowFaults:
    """The faults of several rows of a sweep as one: by row, and what is wrong with many of them once."""
    rows: dict[str, list[str]] = {}
    for row, fault in faults.items():
        for line in str(fault).splitlines():
            rows.setdefault(line, []).append(repr(row))
    lines = []
    for line, named in rows.items():
        others = f" and {len(named) - 3} more" if len(named) > 3 else ""
        lines.append(f"row{'s' if len(named) > 1 else ''} {', '.join(named[:3])}{others}: {line}")
    hints = dict.fromkeys(fault.hint for fault in faults.values() if fault.hint)
    return RowFaults("\n".join(lines), "; ".join(hints), faults)


def write_run(
    prepared: Prepared,
    logs: Path,
    provenance: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    resumed_from: Mapping[str, Any] | None = None,
) -> RunFolder:
    """The run folder, with all that is known before the job starts. Raises RunFolderError."""
    from hpc_gpt.runs.snapshot import take_snapshot
    from hpc_gpt.settings.ds_config import ENGINES, deepspeed_config

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


def resume_run(run: RunFolder, links: int = 1) -> Submitted:
    """A new attempt of a run, in its folder and with its own job.sh; the trainer goes on from the newest checkpoint.

    Raises RunFolderError while an earlier job of the run is still there, or may be on another machine; ConfigError
    where the run is done, or no engine could go on; DataError.
    """
    return start_run(run, check_resumption(run), links)


def check_resumption(run: RunFolder, dry: bool = False) -> Resolved:
    """The settings of a run that may start once more. Raises as resume_run; `dry` is as for check_submission."""
    from hpc_gpt.launch.status import read_own_status
    from hpc_gpt.runs.provenance import list_gpus

    state = read_own_status(run).state
    if state in LIVE:
        raise RunFolderError(f"run {run.run_id} is {state}", f"hpc-gpt cancel {run.run_id} first, or wait for its end")
    resolved = run.resolved()
    if not run.job_script.is_file():
        raise ConfigError(f"{run.path} has no job.sh", "the run folder is damaged; submit the experiment again")
    check_unfinished(run)
    if newest_step(run) is not None:
        check_resumable(resolved)
    if resolved.cluster.scheduler == "slurm" and not dry:
        from hpc_gpt.launch.slurm.scheduler import check_reachable

        check_reachable()
    # A path without a leading / may be another file from another folder.
    check_inputs(resolved, run.data_beside, bool(list_gpus()), make=not dry)
    return resolved


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
    from hpc_gpt.launch.slurm.environment import submission_environment
    from hpc_gpt.launch.slurm.scheduler import check_reachable, has_sbatch, test_only

    if not has_sbatch():
        return "no sbatch here to ask; the script is as it would be submitted"
    try:
        check_reachable()  # sbatch itself would try for 18 s
        return test_only(script, submission_environment(os.environ, {}))
    except SlurmUnreachable as fault:
        return f"{fault}: it was not asked; the script is as it would be submitted"


def told_of_rows(rows: Sequence[Prepared]) -> list[str]:
    """What to tell the user of the rows of a sweep: what is predicted by row, what is true of many of them once."""
    lines: list[str] = []
    for row in rows:
        lines += [note for note in row.notes if not (note in lines and note.startswith(("note:", "warning:")))]
        if row.foresight and row.foresight.tables is not None:
            lines.append(f"{row.resolved.row}: {row.foresight.line}")
        elif row.foresight and row.foresight.line not in lines:
            lines.append(row.foresight.line)
        if row.outlook:
            lines.append(f"{row.resolved.row}: {row.outlook.lines[0]}")
    hours = [row.outlook.total.gpu_hours for row in rows if row.outlook and row.outlook.total]
    if len(hours) > 1:
        unknown = f", {len(rows) - len(hours)} of them not known" if len(hours) < len(rows) else ""
        lines.append(f"forecast: {sum(hours):,.4g} GPU-hours for {len(rows)} rows{unknown}")
    return lines
