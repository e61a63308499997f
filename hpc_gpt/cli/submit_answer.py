"""What `hpc-gpt submit` prints, and its answer as JSON."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import click

from hpc_gpt.core.errors import JobRefused
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import shown_layout
from hpc_gpt.core.slurm.start_check import ExpectedStart
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.launch.limits import Asked, limits_met
from hpc_gpt.launcher.launch.submission import SubmittedRun
from hpc_gpt.launcher.plan.prediction import Prediction
from hpc_gpt.launcher.watch.status import read_folders

NOTHING_DONE = "dry run: nothing was written or submitted"


@dataclass
class SubmitAnswer:
    """What `submit --json` prints: what was submitted, or would be; each run with its job, those of a sweep with their
    rows; the rows that were left out, and why. And how it was asked for: not submitted if `dry`, followed if `wait`, at
    once on this machine if `now`."""

    dry: bool
    wait: bool
    now: bool = False
    sweep: str | None = None
    runs: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    folders: list[RunFolder] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The object. Of runs that were waited for with their state, as their folders say it."""
        states = [status.state for status in read_folders(self.folders)] if self.wait else []
        runs = [{**run, "state": state} for run, state in zip_longest(self.runs, states)]
        return {"schema": 1, "dry_run": self.dry, "sweep": self.sweep, "runs": runs, "left_out": self.left_out}

    def would(self, resolved: Resolved, prediction: Prediction | None = None) -> None:
        """Adds a run that would be submitted."""
        self.runs.append(self._run(resolved, prediction.tables if prediction is not None else None))

    def add(
        self, run: RunFolder, resolved: Resolved, job: str | None, jobs: Sequence[str] = (), waits: str = ""
    ) -> None:
        """Adds a run that was submitted."""
        self.folders.append(run)
        its_job = {"run": run.run_id, "folder": str(run.path), "job": job, "jobs": list(jobs) or [job] if job else []}
        self.runs.append(self._run(resolved) | its_job | {"waits": waits or None})

    def _run(self, resolved: Resolved, predicted: Mapping[str, Any] | None = None) -> dict[str, Any]:
        places = dict.fromkeys(("run", "folder", "job"))
        sizes = {"gpus": resolved.asked_gpus, "nodes": resolved.nodes, "layout": shown_layout(resolved) or None}
        of = {"name": resolved.name, "row": resolved.row, "scheduler": resolved.cluster.scheduler}
        return {**places, "jobs": [], **of, **sizes, "predicted": predicted, "waits": None}


def print_lines(lines: Iterable[str]) -> None:
    """Prints lines for the user, which are no data."""
    for line in lines:
        say(line, err=True)


def print_limits(rows: Sequence[Asked]) -> JobRefused | None:
    """Prints the limits that a submission of runs would meet. One that would not let them all in is not printed, but
    returned as the refusal to raise."""
    met = limits_met(rows, logs_folder())
    refusal = next((limit for limit in met if limit.refuses), None)
    print_lines(str(limit) for limit in met if limit is not refusal)
    return None if refusal is None else JobRefused(f"limit: {refusal.words}", refusal.remedy)


def with_interrupts(show: Callable[[], None], wait: bool) -> int:
    """Calls `show`, and returns 1 if Ctrl-C came meanwhile, for the wait to handle; without a wait it is raised."""
    try:
        show()
    except KeyboardInterrupt:
        if not wait:
            raise
        return 1
    return 0


def print_start(start: ExpectedStart) -> None:
    """Prints what sbatch says of a job that is not submitted, and why it would wait."""
    say(start.answer, err=True)
    print_waits(start.waits)


def print_waits(why: str) -> None:
    """Prints why a job cannot start now; nothing if it can."""
    if why:
        say(f"it cannot start now: {why}", err=True)


def on_cluster(run: RunFolder) -> str:
    """The part of a message that names the run's Slurm cluster, if one of several was chosen."""
    return f" on cluster {cluster}" if (cluster := run.slurm_cluster()) else ""


def print_submitted(submitted: SubmittedRun, answer: SubmitAnswer) -> int:
    """Adds a run to the answer and prints its job. Returns how often Ctrl-C came meanwhile, as `with_interrupts`."""
    answer.add(submitted.run, submitted.run.resolved(), submitted.job_id, submitted.jobs, submitted.waits)
    return with_interrupts(lambda: _print_job(submitted, answer.wait), answer.wait)


def _print_job(submitted: SubmittedRun, wait: bool) -> None:
    run, job_id, on_slurm = submitted.run, submitted.job_id, submitted.scheduler == "slurm"
    outer_job = os.environ.get("SLURM_JOB_ID")
    set_ = sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS")
    if on_slurm and outer_job is None and set_ and run.resolved().script is None:  # in a job, Slurm has set them
        say(f"not passed on: {', '.join(set_)}; use options or the cluster profile", err=True)
    if on_slurm and outer_job:
        note = f"note: this is within job {outer_job}, but a new job is queued, with nodes of its own"
        say(f"{note}; --here runs on those of job {outer_job}", err=True)
    message = f"submitted {run.run_id} as job {job_id}{on_cluster(run)}"
    verb = "queued" if submitted.waits else "started"
    say(message if on_slurm else f"{verb} {run.run_id} as process {job_id}")
    if len(submitted.jobs) > 1:
        say(f"{len(submitted.jobs) - 1} more jobs wait for it: {', '.join(submitted.jobs[1:])}", err=True)
    print_waits(submitted.waits)
    say(f"run folder {from_here(run.path)}", err=True)
    if not wait:
        click.echo(f"next: hpc-gpt status {job_id if on_slurm else run.run_id}", err=True)
