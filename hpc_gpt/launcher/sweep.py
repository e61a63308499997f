"""Prepare and submit a sweep: one run folder per row, and one job array per set of rows with equal requests to Slurm.

Files of no single run are in `logs/<sweep>/<sweep id>/`: `<n>/` for the n-th job, with a link `<i>` to the folder of
each of its runs, and the script of an array. Each run's `sweep.json` has the sweep's id.
"""

from __future__ import annotations

import contextlib
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.errors import ConfigError, JobRefused, OsErrorAs, RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.runs.run_folder import EXPERIMENT, IN_QUEUE, RunFolder, SharedFile, claim_folder
from hpc_gpt.core.settings.resolved import folder_name
from hpc_gpt.core.settings.sweep_rows import RowFaults, SweepRow, faults_of_rows
from hpc_gpt.core.slurm.clients import largest_array
from hpc_gpt.core.slurm.directives import directives_but_name
from hpc_gpt.core.slurm.sbatch_words import array_variables
from hpc_gpt.core.slurm.start_check import NeverStarts
from hpc_gpt.core.tables import flat
from hpc_gpt.launcher.decide import prepare_row
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import array_script, turns_script
from hpc_gpt.launcher.request import Request, choose_profile, requested_file
from hpc_gpt.launcher.submission import SubmittedRun, check_start, check_submission, start_run, write_run


@dataclass(frozen=True)
class PreparedSweep:
    """A sweep: the prepared rows, the rows that can never run, and {row: error} of skipped rows. `varied` has for each
    row {dotted key: value} of the keys that it sets."""

    name: str
    rows: list[PreparedRun]
    impossible: list[SweepRow]
    unfit: dict[str, UserError]
    varied: dict[str, dict[str, Any]] = field(default_factory=dict)

    def without(self, refusal: RowFaults, skip_unfit: bool) -> PreparedSweep:
        """The sweep without the refused rows. Raises the refusal if they are not to be skipped, or if no other row is
        left."""
        left = [row for row in self.rows if row.resolved.row not in refusal.of_rows]
        if left and not skip_unfit:
            refusal.add_hint(f"--skip-unfit submits the other {len(left)}")
        if not (left and skip_unfit):
            raise refusal
        return replace(self, rows=left, unfit={**self.unfit, **refusal.of_rows})


def prepare_sweep(request: Request, queueing: bool = False, skip_unfit: bool = False) -> PreparedSweep:
    """Prepares every row of a sweep, as `prepare` does for one. Raises the faults of all rows at once.

    `skip_unfit`: rows with a fault are skipped, if there are others.
    """
    profile = choose_profile(request, queueing)
    file = requested_file(request, profile)
    if file.rows is None:
        raise ConfigError(f"{request.experiment} is not a sweep: its file has no [rows]", "leave --sweep out")
    if request.row is not None and not request.grid:
        raise ConfigError("--row asks for one row and --sweep for all of them", "give one of the two")
    if not file.possible:
        raise ConfigError(f"{file.path}: no row can run", "add a row that can")
    prepared: list[PreparedRun] = []
    faults: dict[str, UserError] = {}
    for row in file.possible:
        try:
            prepared.append(prepare_row(request, profile, file, row.name))
        except UserError as fault:
            faults[row.name] = fault
    varied = {row.name: flat(row.overrides) for row in file.rows}
    sweep = PreparedSweep(file.name, prepared, [row for row in file.rows if row.impossible is not None], {}, varied)
    return sweep.without(faults_of_rows(faults, len(file.possible)), skip_unfit) if faults else sweep


# --- submitted


@dataclass(frozen=True)
class SweepJob:
    """A submitted job: an array, the job of one run, or one that starts its runs `in_turns`. `waits`: the reason why
    Slurm cannot start it now, empty if it can."""

    id: str
    runs: tuple[RunFolder, ...]
    waits: str = ""
    in_turns: bool = False


@dataclass
class SubmittedSweep:
    """A sweep with the folders of its runs, its jobs, and the refusals of sbatch. `largest` is the maximum number of
    elements of an array on its cluster."""

    name: str
    folder: Path
    largest: int = 1
    runs: list[RunFolder] = field(default_factory=list)
    jobs: list[SweepJob] = field(default_factory=list)
    refusals: list[JobRefused] = field(default_factory=list)

    @property
    def id(self) -> str:
        """The id that all its runs share."""
        return self.folder.name


def write_sweep(
    name: str,
    rows: Sequence[PreparedRun],
    logs: Path,
    provenance: Mapping[str, Any],
    varied: Mapping[str, Mapping[str, Any]] | None = None,
    rounds: Sequence[int] | None = None,
) -> SubmittedSweep:
    """Writes the folder of each run, after `check_submission`, which returns the provenance. `varied`: as in a
    PreparedSweep. `rounds`: the round, from 0, of each run of a sweep with several runs of a row.

    Raises SlurmUnreachable and RunFolderError. If a folder cannot be written, the earlier ones stay, marked as refused.
    """
    largest = largest_array() if rows[0].resolved.cluster.scheduler == "slurm" else 1
    sweep = SubmittedSweep(name, claim_folder(logs / folder_name(name)), largest)
    notes: list[dict[str, Any]]
    notes = [{"varied": keys} if (keys := (varied or {}).get(str(row.resolved.row))) else {} for row in rows]
    if rounds is not None:
        notes = [{**note, "round": number} for note, number in zip(notes, rounds, strict=True)]
    _write_rows(sweep, rows, logs, provenance, notes)
    return sweep


def _write_rows(
    sweep: SubmittedSweep,
    rows: Sequence[PreparedRun],
    logs: Path,
    provenance: Mapping[str, Any],
    notes: Sequence[Mapping[str, Any]] | None = None,
) -> None:
    """Writes the run folder of each row. `notes`: further keys of each row's sweep.json."""
    texts: dict[str, SharedFile] = {}  # all rows share the file that has them
    for row, keys in zip(rows, notes or [{}] * len(rows), strict=True):
        try:
            note = {"id": sweep.id, "name": sweep.name, "row": row.resolved.row, **keys}
            if row.text not in texts:
                text = row.text.encode("utf-8", "surrogateescape")
                texts[row.text] = SharedFile(EXPERIMENT, text, row.resolved.files_mode)
            sweep.runs.append(write_run(row, logs, provenance, note, text=texts[row.text]))
        except RunFolderError as fault:
            refuse_runs(sweep.runs, f"the folder of row {row.resolved.row!r} could not be written: {fault}")
            raise


def queue_sweep(sweep: SubmittedSweep, rows: Sequence[PreparedRun], at_once: int | None = None) -> None:
    """Submits a sweep to Slurm: arrays per set of rows with equal directives, single jobs for the others.

    `at_once`: the number of runs of such a set that may run at a time; if the set needs several arrays, each waits
    until the one before has ended. A job that sbatch refuses is added to the refusals, and the other jobs are
    submitted. Raises SlurmUnreachable and RunFolderError; the later rows are then marked as refused.
    """
    groups = group_alike([row.script for row in rows], sweep.largest)
    before: dict[tuple[str, ...], str] = {}
    for number, group in enumerate(groups, 1):
        runs, alike = [sweep.runs[index] for index in group], tuple(directives_but_name(rows[group[0]].script))
        try:
            folder = link_runs(sweep, number, runs)
            job = _queue(sweep, folder, [rows[index] for index in group], runs, at_once, before.get(alike))
            sweep.jobs.append(job)
            if at_once:
                before[alike] = job.id
        except JobRefused as fault:
            names = ", ".join(repr(rows[index].resolved.row) for index in group)
            sweep.refusals.append(JobRefused(f"row{'s' * (len(group) > 1)} {names}: {fault}", fault.hint))
        except (SlurmUnreachable, RunFolderError, KeyboardInterrupt) as fault:
            refuse_runs([sweep.runs[index] for later in groups[number:] for index in later], str(fault) or "Ctrl-C")
            raise


def _queue(
    sweep: SubmittedSweep,
    folder: Path,
    rows: Sequence[PreparedRun],
    runs: Sequence[RunFolder],
    at_once: int | None,
    after: str | None,
) -> SweepJob:
    from hpc_gpt.launcher.executor import ARRAY_SCRIPT, submit_array

    try:
        waits = check_start(rows[0].resolved, rows[0].script)
    except NeverStarts as fault:
        refuse_runs(runs, str(fault))
        raise
    if len(rows) == 1 and (after is None or sweep.largest == 1):
        job_id = start_run(runs[0], rows[0].resolved, rows[0].jobs).job_id
    else:
        write_once(folder / ARRAY_SCRIPT, array_script(sweep.name, [row.script for row in rows]))
        job_id = submit_array(folder, rows[0].resolved, runs, at_once, after)
    return SweepJob(job_id, tuple(runs), waits)


def queue_in_turns(sweep: SubmittedSweep, rows: Sequence[PreparedRun]) -> None:
    """Submits a sweep to Slurm as one job, whose script starts one run after the other. The rows have equal directives.
    Raises JobRefused, SlurmUnreachable and RunFolderError; the runs are then marked as refused."""
    from hpc_gpt.launcher.executor import TURNS_SCRIPT, submit_in_turns

    try:
        waits = check_start(rows[0].resolved, rows[0].script)
        folder = link_runs(sweep, 1, sweep.runs, [f"{number:04d}" for number in range(len(rows))])
        write_once(folder / TURNS_SCRIPT, turns_script(sweep.name, [row.script for row in rows]))
    except (NeverStarts, SlurmUnreachable, RunFolderError) as fault:
        refuse_runs(sweep.runs, str(fault))
        raise
    job_id = submit_in_turns(folder, rows[0].resolved, sweep.runs)
    sweep.jobs.append(SweepJob(job_id, tuple(sweep.runs), waits, in_turns=True))


def write_script_array(prepared: PreparedRun, logs: Path) -> tuple[SubmittedSweep, list[PreparedRun]]:
    """Writes one run folder per element of a job script that is an array; returns the sweep and its rows. On this
    machine the elements get Slurm's variables of an array. Raises as write_sweep does."""
    script, resolved = prepared.job_script, prepared.resolved
    assert script is not None
    provenance = check_submission([prepared], logs)
    sweep = SubmittedSweep(resolved.name, claim_folder(logs / resolved.slug))
    variables = {"SLURM_ARRAY_JOB_ID": str(os.getpid()), **array_variables(script.array)}
    elements = [replace(resolved, sweep=resolved.name, row=str(number)) for number in script.array]
    rows = [replace(prepared, resolved=element) for element in elements]
    is_local = resolved.cluster.scheduler == "local"
    notes = [{"array": {**variables, "SLURM_ARRAY_TASK_ID": row.resolved.row}} if is_local else {} for row in rows]
    _write_rows(sweep, rows, logs, provenance, notes)
    return sweep, rows


def submit_script_array(prepared: PreparedRun, logs: Path) -> SubmittedSweep:
    """Submits a job script that is an array: one run folder per element, with a link by its number, and one job. Raises
    as submit_run does."""
    from hpc_gpt.launcher.executor import ARRAY_OUTPUT, submit_own

    script, resolved = prepared.job_script, prepared.resolved
    assert script is not None
    waits = check_start(resolved, prepared.script)
    sweep, rows = write_script_array(prepared, logs)
    numbers = [str(row.resolved.row) for row in rows]
    try:
        folder = link_runs(sweep, 1, sweep.runs, numbers)
    except RunFolderError as fault:
        refuse_runs(sweep.runs, str(fault))
        raise
    by_element = [(f"_{number}", run) for number, run in zip(numbers, sweep.runs, strict=True)]
    job_id = submit_own(folder, ARRAY_OUTPUT, resolved, by_element, script.options)
    sweep.jobs.append(SweepJob(job_id, tuple(sweep.runs), waits))
    return sweep


def link_runs(
    sweep: SubmittedSweep, number: int, runs: Sequence[RunFolder], names: Iterable[str] | None = None
) -> Path:
    """Makes the folder of the sweep's n-th job, with a link to each of its runs, by the `names` or else by number.
    Raises RunFolderError."""
    folder = sweep.folder / str(number)
    with OsErrorAs(RunFolderError, f"cannot link runs in {folder}", "is the disk full?"):
        folder.mkdir()
        for index, run in zip(names or range(len(runs)), runs, strict=True):
            (folder / str(index)).symlink_to(os.path.relpath(run.path, folder), target_is_directory=True)
    return folder


def queue_locally(sweep: SubmittedSweep, names: Iterable[str] | None = None) -> None:
    """Notes in each run that it waits for its turn on this machine, and in which process; `names` as in link_runs."""
    queue = process_identity(os.getpid())
    for run in sweep.runs:
        run.add_submission({"scheduler": "local", "job_id": None, "queue": queue, "host": platform.node()})
    link_runs(sweep, 1, sweep.runs, names)


def start_queued(run: RunFolder, row: PreparedRun) -> SubmittedRun | None:
    """Starts a run whose turn has come; None if it was cancelled while it waited."""
    return None if run.cancelled_mark(IN_QUEUE).exists() else start_run(run, row.resolved)


def refuse_runs(runs: Sequence[RunFolder], why: str) -> None:
    """Notes in each run that its job was not submitted."""
    for run in runs:
        run.add_submission({"scheduler": "slurm", "job_id": None, "refused": why})


def plan_jobs(rows: Sequence[PreparedRun]) -> list[list[PreparedRun]]:
    """The rows of each job that queue_sweep would submit. If Slurm does not answer, arrays have no limit of size."""
    largest = len(rows)
    with contextlib.suppress(SlurmUnreachable):
        largest = largest_array()
    return [[rows[index] for index in group] for group in group_alike([row.script for row in rows], largest)]


def group_alike(scripts: Sequence[str], largest: int) -> list[list[int]]:
    """The scripts' numbers in groups with equal directives (the job's name may differ), `largest` at most in each.

    Groups are in the order of their first script.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, script in enumerate(scripts):
        groups.setdefault(tuple(directives_but_name(script)), []).append(number)
    return [group[at : at + largest] for group in groups.values() for at in range(0, len(group), largest)]
