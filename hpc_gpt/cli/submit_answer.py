"""The options of `hpc-gpt submit` that say how to submit, the lines that it prints, and its answer as JSON."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import click

from hpc_gpt.core.checkpoints.disk_space import lack_of_files
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.output import prints_on_stderr
from hpc_gpt.core.process import interrupts_wait
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import shown_layout
from hpc_gpt.core.slurm.start_check import ExpectedStart
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.submission import SubmittedRun
from hpc_gpt.planner.prediction import Prediction

NOTHING_DONE = "dry run: nothing was written or submitted"


@dataclass(frozen=True)
class SubmitOptions:
    """The manner of a submission: `dry` only shows it, with `script` as its script; `wait` follows the run to its end;
    `now` starts it at once on this machine."""

    dry: bool = False
    wait: bool = False
    now: bool = False
    script: bool = False


@dataclass(frozen=True)
class AnsweredRun:
    """A run in the answer of `submit --json`: its settings, and the prediction of a dry run, else its `folder`, the ids
    of its `job` and of all `jobs` of its chain, and why it `waits`. `sweep`: the id of its sweep. `followed`: the
    answer says its state at the end."""

    resolved: Resolved
    folder: RunFolder | None = None
    job: str | None = None
    jobs: Sequence[str] = ()
    waits: str = ""
    sweep: str | None = None
    followed: bool = False
    prediction: Prediction | None = None

    def tables(self) -> dict[str, Any]:
        """Its object in the answer, without its state."""
        run, folder = self.resolved, self.folder
        return {
            "run": folder.run_id if folder is not None else None,
            "folder": str(folder.path) if folder is not None else None,
            "job": self.job,
            "jobs": list(self.jobs) or ([self.job] if self.job else []),
            "name": run.name,
            "row": run.row,
            "scheduler": run.cluster.scheduler,
            "gpus": run.asked_gpus,
            "nodes": run.nodes,
            "layout": shown_layout(run) or None,
            "predicted": self.prediction.tables if self.prediction is not None else None,
            "waits": self.waits or None,
        }


@dataclass(frozen=True)
class LeftOut:
    """A row of a sweep that was left out, and why."""

    row: str
    why: str


# The parts of an answer, each as soon as it is known, since the submission may fail or be interrupted after it.
AnswerParts = Iterator[AnsweredRun | LeftOut]


def submitted_part(submitted: SubmittedRun, followed: bool) -> AnsweredRun:
    """The part of an answer on a submitted run and its job."""
    jobs, waits = submitted.jobs, submitted.waits
    return AnsweredRun(submitted.resolved, submitted.run, submitted.job_id, jobs, waits, followed=followed)


@contextlib.contextmanager
def answered(as_json: bool, dry: bool) -> Iterator[list[AnsweredRun | LeftOut]]:
    """The parts of the answer, to be added to. With --json it is printed at the end, also after a fault."""
    parts = list[AnsweredRun | LeftOut]()
    try:
        with prints_on_stderr(as_json):
            yield parts
    finally:
        if as_json and any(isinstance(part, AnsweredRun) for part in parts):
            click.echo(json.dumps(answer_tables(parts, dry), indent=1))


def answer_tables(parts: Sequence[AnsweredRun | LeftOut], dry: bool) -> dict[str, Any]:
    """The object of `submit --json`. Runs that were followed have their state, read from their folders."""
    from hpc_gpt.launcher.watch.status import read_folders  # no other answer reads folders

    runs = [part for part in parts if isinstance(part, AnsweredRun)]
    folders = [run.folder for run in runs if run.followed and run.folder is not None]
    states = dict(zip(folders, (status.state for status in read_folders(folders)), strict=True))
    return {
        "schema": 1,
        "dry_run": dry,
        "sweep": next((run.sweep for run in runs if run.sweep is not None), None),
        "runs": [{**run.tables(), "state": states.get(run.folder) if run.folder is not None else None} for run in runs],
        "left_out": {part.row: part.why for part in parts if isinstance(part, LeftOut)},
    }


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines for the user, which are not data, to stderr."""
    for line in lines:
        say(line, err=True)


def print_lack_of_files(runs: Sequence[Resolved]) -> None:
    """Prints a warning if the disk, or a quota, allows fewer files than runs that are submitted may make."""
    if text := lack_of_files(runs, logs_folder()):
        say(f"warning: {text}; HPC_GPT_LOGS names another disk, train.keep_last keeps fewer checkpoints", err=True)


def with_interrupts(show: Callable[[], None], wait: bool) -> int:
    """Calls `show`, for a wait to its end, and returns 1 if Ctrl-C came meanwhile, for the wait to handle: one that
    ended the command would leave the submitted run going. Without a wait it is raised at once."""
    if not wait:
        show()
        return 0
    try:
        with interrupts_wait():
            show()
    except KeyboardInterrupt:
        return 1
    return 0


def print_start(start: ExpectedStart) -> None:
    """Prints sbatch's answer about a job that is not submitted, and why it would wait."""
    say(start.answer, err=True)
    print_waits(start.waits)


def print_waits(why: str) -> None:
    """Prints why a job cannot start now; nothing if it can."""
    if why:
        say(f"it cannot start now: {why}", err=True)


def on_cluster(cluster: str | None) -> str:
    """The part of a message that names a run's Slurm cluster, if one of several was chosen."""
    return f" on cluster {cluster}" if cluster else ""


def print_submitted(submitted: SubmittedRun, wait: bool) -> None:
    """Prints a run's job."""
    run, job_id, on_slurm = submitted.run, submitted.job_id, submitted.resolved.cluster.scheduler == "slurm"
    outer_job = os.environ.get("SLURM_JOB_ID")
    choices = sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS")
    if on_slurm and outer_job is None and choices and submitted.resolved.script is None:  # in a job, Slurm has set them
        say(f"not passed on: {', '.join(choices)}; use options or the cluster profile", err=True)
    if on_slurm and outer_job:
        note = f"note: this is within job {outer_job}, but a new job is queued, with nodes of its own"
        say(f"{note}; hpc-gpt render … >x.sh && bash x.sh runs on the nodes of job {outer_job}", err=True)
    message = f"submitted {run.run_id} as job {job_id}{on_cluster(submitted.cluster)}"
    verb = "queued" if submitted.waits else "started"
    say(message if on_slurm else f"{verb} {run.run_id} as process {job_id}")
    if len(submitted.jobs) > 1:
        say(f"{len(submitted.jobs) - 1} more jobs wait for it: {', '.join(submitted.jobs[1:])}", err=True)
    print_waits(submitted.waits)
    say(f"run folder {from_here(run.path)}", err=True)
    if not wait:
        click.echo(f"next: hpc-gpt status {job_id if on_slurm else run.run_id}", err=True)
