"""Submit a sweep: a run folder for every row, and one job array for each set of rows with equal requests to Slurm.

What belongs to no single run is in `logs/<sweep>/<sweep id>/`: `<n>/` for the n-th job, with a link `<i>` to the folder
of each of its runs, and the script of an array. Each run's `sweep.json` has the sweep's id.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hpc_gpt.errors import JobRefused, RunFolderError, SlurmUnreachable
from hpc_gpt.files import write_once
from hpc_gpt.launch.prepare import Prepared
from hpc_gpt.launch.render import array_script, directives_but_name
from hpc_gpt.launch.slurm import largest_array
from hpc_gpt.launch.slurm_start import NeverStarts
from hpc_gpt.launch.submission import Submitted, check_start, check_submission, start_run, write_run
from hpc_gpt.process import start_time
from hpc_gpt.runs.run_folder import IN_QUEUE, RunFolder, claim_folder
from hpc_gpt.settings.resolved import folder_name


@dataclass(frozen=True)
class SweepJob:
    """A submitted job: an array, or the job of one run."""

    id: str
    runs: tuple[RunFolder, ...]


@dataclass
class SubmittedSweep:
    """A sweep with the folders of its runs, its jobs, and what sbatch refused.

    `largest` is the most elements that an array can have on its cluster; `waits`: {job id: why Slurm cannot
    start it now}.
    """

    name: str
    folder: Path
    largest: int = 1
    runs: list[RunFolder] = field(default_factory=list)
    jobs: list[SweepJob] = field(default_factory=list)
    refusals: list[JobRefused] = field(default_factory=list)
    waits: dict[str, str] = field(default_factory=dict)

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
            refuse_runs(sweep.runs, f"the folder of row {row.resolved.row!r} could not be written: {fault}")
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
            sweep.jobs.append(
                SweepJob(_queue(sweep, folder, [rows[index] for index in group], runs, at_once), tuple(runs))
            )
        except JobRefused as fault:
            names = ", ".join(repr(rows[index].resolved.row) for index in group)
            sweep.refusals.append(JobRefused(f"row{'s' * (len(group) > 1)} {names}: {fault}", fault.hint))
        except (SlurmUnreachable, RunFolderError, KeyboardInterrupt) as fault:
            refuse_runs([sweep.runs[index] for later in groups[number:] for index in later], str(fault) or "Ctrl-C")
            raise


def _queue(
    sweep: SubmittedSweep, folder: Path, rows: Sequence[Prepared], runs: Sequence[RunFolder], at_once: int | None
) -> str:
    from hpc_gpt.launch.slurm_executor import ARRAY_SCRIPT, submit_array

    try:
        waits = check_start(rows[0].resolved, rows[0].script)
    except NeverStarts as fault:
        refuse_runs(runs, str(fault))
        raise
    if len(rows) == 1:
        job_id = start_run(runs[0], rows[0].resolved, rows[0].jobs).job_id
    else:
        write_once(folder / ARRAY_SCRIPT, array_script(sweep.name, [row.script for row in rows]))
        job_id = submit_array(folder, rows[0].resolved, runs, at_once)
    if waits:
        sweep.waits[job_id] = waits
    return job_id


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


def refuse_runs(runs: Sequence[RunFolder], why: str) -> None:
    """Note in each run that its job was not submitted."""
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
