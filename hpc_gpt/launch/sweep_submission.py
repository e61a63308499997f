"""Submitting a sweep: a run folder for every row, then one array for each set of rows that ask Slurm for the same.

`logs/<sweep>/<sweep id>/` holds what belongs to no single run: `<n>/` for the n-th job, with a link `<i>` to the
folder of each of its runs, and the script of an array. Each run's `sweep.json` names the sweep's id.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import JobRefused, RunFolderError, SlurmUnreachable
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.render import array_script, directives_but_name
from hpc_gpt.launch.slurm.scheduler import largest_array
from hpc_gpt.launch.submission import Submitted, check_submission, start_run, write_run
from hpc_gpt.process import start_time
from hpc_gpt.runs.run_folder import IN_QUEUE, RunFolder, claim_folder
from hpc_gpt.settings.resolve import folder_name
from hpc_gpt.small_files import write_once


@dataclass(frozen=True)
class Job:
    """What the scheduler has taken: an array, or one run's own job."""

    id: str
    runs: tuple[RunFolder, ...]


@dataclass
class SubmittedSweep:
    """A sweep with a folder for each of its runs, the jobs that they have become, and what sbatch refused.

    `largest` is how many elements its cluster lets an array have.
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
    """Checks every row, then writes the folder of each run. What can be refused is refused before there is a folder.

    Raises as submit_run. Where a later folder cannot be written the earlier ones stay, marked refused.
    """
    provenance = check_submission(rows, logs)
    largest = 1
    if rows[0].resolved.cluster.scheduler == "slurm":
        largest = largest_array()
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
    """Hands a sweep to Slurm, one array for each set of rows with equal directives, a job of its own for the others.

    `at_once`: how many runs of an array may run at a time. What sbatch refuses is kept among the refusals, and the
    rest goes on. Raises SlurmUnreachable and RunFolderError; the rows after it are then marked refused.
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
    from hpc_gpt.launch.slurm.executor import ARRAY_SCRIPT, submit_array

    if len(rows) == 1:
        return start_run(runs[0], rows[0].resolved, rows[0].links).job_id
    write_once(folder / ARRAY_SCRIPT, array_script(sweep.name, [row.script for row in rows]))
    return submit_array(folder, rows[0].resolved, runs, at_once)


def link_runs(sweep: SubmittedSweep, number: int, runs: Sequence[RunFolder]) -> Path:
    """Makes the folder of the sweep's n-th job, with a link to each of its runs."""
    folder = sweep.folder / str(number)
    try:
        folder.mkdir()
        for index, run in enumerate(runs):
            (folder / str(index)).symlink_to(os.path.relpath(run.path, folder), target_is_directory=True)
    except OSError as fault:
        raise RunFolderError(f"cannot link runs in {folder}: {fault.strerror}", "is the disk full?") from None
    return folder


def hold_here(sweep: SubmittedSweep) -> None:
    """Says in each run that it waits for its turn on this machine, and by which process."""
    pid = os.getpid()
    queue = {"pid": pid, "pid_start": start_time(pid)}
    for run in sweep.runs:
        run.add_submission({"scheduler": "local", "job_id": None, "queue": queue, "host": platform.node()})
    link_runs(sweep, 1, sweep.runs)


def start_held(run: RunFolder, row: Prepared) -> Submitted | None:
    """Starts a run whose turn has come; None if it was cancelled while it waited."""
    return None if run.cancelled_mark(IN_QUEUE).exists() else start_run(run, row.resolved)


def _refuse(runs: Sequence[RunFolder], why: str) -> None:
    for run in runs:
        run.add_submission({"scheduler": "slurm", "job_id": None, "refused": why})


def plan_jobs(rows: Sequence[Prepared]) -> list[list[Prepared]]:
    """The rows of each job that queue_sweep would hand to Slurm, as far as that can be said without asking Slurm."""
    return [[rows[index] for index in group] for group in group_alike([row.script for row in rows], len(rows))]


def group_alike(scripts: Sequence[str], largest: int) -> list[list[int]]:
    """The numbers of the scripts, those with equal directives together, `largest` at most; the job's name aside.

    Groups come in the order of their first script.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for number, script in enumerate(scripts):
        groups.setdefault(tuple(directives_but_name(script)), []).append(number)
    return [group[at : at + largest] for group in groups.values() for at in range(0, len(group), largest)]
