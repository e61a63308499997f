"""What `hpc-gpt submit` does: submits a run, resumes one, or submits all rows of a sweep."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from shlex import quote
from typing import Any

import click

from hpc_gpt.cli.experiment_options import on_command_line, option_name
from hpc_gpt.ends.run_state import newest_submission
from hpc_gpt.errors import ConfigError, JobFailed, JobRefused, UserError
from hpc_gpt.files import logs_folder, read_text
from hpc_gpt.launch.branching import prepare_branch, split_branch
from hpc_gpt.launch.here import Allocation, no_script_here, read_allocation, run_in
from hpc_gpt.launch.prepare import prepare
from hpc_gpt.launch.prepared import PreparedRun
from hpc_gpt.launch.request import Request
from hpc_gpt.launch.resumption import NewRun, SameRun, choose_resumption
from hpc_gpt.launch.submission import (
    SubmittedRun,
    check_submission,
    data_lines,
    dry_run,
    of_run,
    overview,
    prediction_lines,
    submit_run,
    write_run,
)
from hpc_gpt.launch.sweep import (
    PreparedSweep,
    SubmittedSweep,
    plan_jobs,
    prepare_sweep,
    queue_locally,
    queue_sweep,
    start_queued,
    submit_script_array,
    write_script_array,
    write_sweep,
)
from hpc_gpt.launch.until import parse_until
from hpc_gpt.launch.winner import find_winner
from hpc_gpt.plan.prediction import Prediction
from hpc_gpt.plan.table import count_text
from hpc_gpt.runs.branches import reading
from hpc_gpt.runs.find_runs import find_run
from hpc_gpt.runs.lineage import Parent
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.experiment_file import gives_way
from hpc_gpt.settings.grid import parse_grid
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.settings.sized import shown_layout
from hpc_gpt.settings.sweep_rows import RowFaults
from hpc_gpt.slurm.start_check import ExpectedStart
from hpc_gpt.terminal import can_ask
from hpc_gpt.watch.control import await_measurements, wait_for, wait_for_all
from hpc_gpt.watch.status import read_folders
from hpc_gpt.words import counted

NOTHING_DONE = "dry run: nothing was written or submitted"


@dataclass
class SubmitAnswer:
    """What `submit --json` prints: what was submitted, or would be; each run with its job, those of a sweep with their
    rows; the rows that were left out, and why."""

    dry: bool
    wait: bool
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
        own = {"run": run.run_id, "folder": str(run.path), "job": job, "jobs": list(jobs) or [job] if job else []}
        self.runs.append(self._run(resolved) | own | {"waits": waits or None})

    def _run(self, resolved: Resolved, predicted: Mapping[str, Any] | None = None) -> dict[str, Any]:
        places = dict.fromkeys(("run", "folder", "job"))
        sizes = {"gpus": resolved.asked_gpus, "nodes": resolved.nodes, "layout": shown_layout(resolved) or None}
        of = {"name": resolved.name, "row": resolved.row, "scheduler": resolved.cluster.scheduler}
        return {**places, "jobs": [], **of, **sizes, "predicted": predicted, "waits": None}


@dataclass(frozen=True)
class _SubmitOptions:
    """How a run is submitted: not at all if `dry`, its `script` printed then; at once if in the user's `allocation`, or
    `now` on this machine. `answer` gets what became of it."""

    dry: bool
    script: bool
    allocation: Allocation | None
    answer: SubmitAnswer
    now: bool = False


def submit_one(
    request: Request,
    until: tuple[str, ...],
    resume: str | None,
    branch: str | None,
    from_start: bool,
    dry_run: bool,
    script: bool,
    yes: bool,
    wait: bool,
    answer: SubmitAnswer,
    winner: str | None = None,
    now: bool = False,
) -> None:
    """Submits one run, or resumes the run `resume`, or branches from `branch`; with `wait` follows it to its end."""
    request = replace(request, until=parse_until(until))
    how = _SubmitOptions(dry_run, script, read_allocation() if request.here else None, answer, now)
    if how.allocation is not None and request.script is not None:
        raise no_script_here(str(request.script.path))
    if script and not dry_run:
        raise ConfigError("--script prints the script of a --dry-run", "add --dry-run, or use hpc-gpt render")
    if from_start and resume is None:
        raise ConfigError("--from-start needs --resume RUN", "without --resume every run begins at step 0")
    if resume is not None and branch is not None:
        words = "--resume continues a run, and --branch begins another one from its checkpoint"
        raise ConfigError(words, "give one of the two")
    if resume is not None:
        submitted = _resume(resume, request, from_start, how)
    elif branch is not None:
        submitted = _branch(branch, request, how)
    else:
        found = find_winner(winner, logs_folder()) if winner is not None else None
        if found is not None:
            request = found.over(request)
        prepared = prepare(request, queueing=not dry_run, faster=True)
        prepared = found.kept(prepared) if found is not None else prepared
        if not (dry_run or yes or request.names_experiment or request.sized):
            _ask_first(prepared, request)
        print_lines((*prepared.notes, *prepared.faster))
        if prepared.job_script is not None and prepared.job_script.array and not dry_run and how.allocation is None:
            _submit_array(prepared, wait, answer)
            return
        submitted = _submit(prepared, None, how)
    if submitted is None:
        return
    answer.add(submitted.run, submitted.run.resolved(), submitted.job_id, submitted.jobs, submitted.waits)
    interrupts = with_interrupts(lambda: submitted_lines(submitted, wait), wait)
    if wait:
        wait_for(submitted.run, interrupts)
        _print_record(submitted.run)


def _submit_array(prepared: PreparedRun, wait: bool, answer: SubmitAnswer) -> None:
    """Submits an array of a job script as one array; on this machine runs its elements one after the other."""
    here, rows = prepared.resolved.cluster.scheduler == "local", list[PreparedRun]()
    if here:
        sweep, rows = write_script_array(prepared, logs_folder())
    else:
        sweep = submit_script_array(prepared, logs_folder())
    click.echo(f"sweep {sweep.id}: {counted(len(sweep.runs), 'run')}, with links in {sweep.folder}", err=True)
    if here:
        _run_here(sweep, rows, answer, [str(row.resolved.row) for row in rows])
    else:
        _follow_sweep(sweep, wait, answer)


def _submit(prepared: PreparedRun, parent: Parent | None, how: _SubmitOptions) -> SubmittedRun | None:
    """Submits a new run, which resumes from `parent` if there is one. None for a dry run, and for a run in an
    allocation, which has ended."""
    logs = logs_folder()
    _check_now(how.now, prepared.resolved)
    if how.dry:
        check_submission([prepared], logs, dry=True, begins=parent is None)
        how.answer.would(prepared.resolved, prepared.prediction)
        rows = overview(prepared, logs, here=how.allocation is not None)
        _show(prepared.resolved, prepared.script, rows, how, prediction_lines(prepared, logs))
        return None
    if how.allocation is None:
        submitted = submit_run(prepared, logs, parent, how.now)
        print_lines(prediction_lines(prepared, logs))
        return submitted
    if prepared.job_script is not None:
        raise no_script_here(str(prepared.job_script.provenance["script"]["path"]))
    how.allocation.place(prepared.resolved, prepared.script)  # before anything is written
    provenance = check_submission([prepared], logs, begins=parent is None)
    run = write_run(prepared, logs, provenance, parent=parent)
    print_lines(prediction_lines(prepared, logs))
    return _start(SameRun(run, prepared.resolved), how)


def _check_now(now: bool, resolved: Resolved) -> None:
    if now and (resolved.cluster.scheduler == "slurm" or resolved.job.dependency is not None):
        words = "--now starts a run on this machine without Slurm, and --dependency waits"
        raise ConfigError(words, "leave --now out, or use --cluster local without --dependency")


def _print_record(run: RunFolder) -> None:
    # Imported here: a run that is not waited for needs nothing that reads logs.
    from hpc_gpt.report.gather import refresh_record
    from hpc_gpt.report.tables import print_record

    await_measurements(run)
    print_record(refresh_record(run))


def _start(resumption: SameRun, how: _SubmitOptions) -> SubmittedRun | None:
    """Starts the job.sh of a run that is there. None as of `_submit`."""
    run, resolved = resumption.run, resumption.resolved
    _check_now(how.now, resolved)
    text = read_text(run.job_script, errors="surrogateescape")
    if how.dry:
        rows = [
            ("resumes", f"{run.run_id}{resumption.where}"),
            *of_run(resolved),
            ("would run", f"the run's own {run.job_script}"),
        ]
        how.answer.would(resolved)
        _show(resolved, text, rows, how)
        return None
    if how.allocation is None:
        return resumption.start(how.now)
    click.echo(f"started {run.run_id} {how.allocation.words(resolved, text)}")
    how.answer.add(run, resolved, os.environ.get("SLURM_JOB_ID"))
    run_in(how.allocation, run, resolved)
    _print_record(run)
    return None


def _show(
    resolved: Resolved, text: str, rows: Sequence[tuple[str, str]], how: _SubmitOptions, notes: Iterable[str] = ()
) -> None:
    """Prints what a dry run would start, as rows or as its script with `notes`, and what Slurm says of that, or where
    and until when it would run in the allocation."""
    if how.allocation is None:
        start = dry_run(resolved, text)
    else:
        start = ExpectedStart(f"would run now, {how.allocation.words(resolved, text)}")
    if how.script:
        click.echo(text.encode(errors="surrogateescape"), nl=False)
        print_lines((*notes, f"would run: {dict(rows)['would run']}"))
    else:
        width, before = max(len(subject) for subject, _ in rows), ""
        for subject, what in rows:
            click.echo(f"{subject if subject != before else '':{width}}  {what}")
            before = subject
    print_start(start)
    click.echo(NOTHING_DONE, err=True)


def print_lines(lines: Iterable[str]) -> None:
    for line in lines:
        click.echo(line, err=True)


def with_interrupts(show: Callable[[], None], wait: bool) -> int:
    """Calls `show`, and returns 1 if Ctrl-C came meanwhile, for the wait to handle; without a wait it is raised."""
    try:
        show()
    except KeyboardInterrupt:
        if not wait:
            raise
        return 1
    return 0


def _ask_first(prepared: PreparedRun, request: Request) -> None:
    """Asks whether to queue the default experiment; ConfigError with an example if there is no terminal."""
    run = prepared.resolved
    if run.cluster.scheduler == "local":
        return
    words = (
        f"no EXPERIMENT and no size: this would queue {run.name}, {count_text(run.model.params)} parameters as "
        f"{run.layout} on {counted(run.gpus, 'GPU')} of {run.cluster.name}"
    )
    if not can_ask():
        cluster = f" --cluster {request.cluster}" if request.cluster else ""
        raise ConfigError(
            words,
            f"name what to train, as hpc-gpt submit demo{cluster}, or its size, --gpus {run.gpus}; --yes queues it",
        )
    click.echo(words, err=True)
    if not _agrees("queue it?"):
        click.echo("nothing was submitted", err=True)
        click.get_current_context().exit(1)


def _agrees(question: str) -> bool:
    """The answer at the terminal; end of input is a no."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as end:
        if not isinstance(end.__context__, EOFError):
            raise
        click.echo("", err=True)
        return False


def _resume(name: str, request: Request, from_start: bool, how: _SubmitOptions) -> SubmittedRun | None:
    """Resumes the run itself, or a new run from its checkpoint if the command line changes anything; `from_start` makes
    a new run without a checkpoint. None as of `_submit`."""
    request = _of_a_run(request, "--resume")
    run = find_run(name, logs_folder())
    # No checkpoint goes until a job, or a note, keeps it; a run in the allocation has the lock until its end.
    with contextlib.nullcontext() if how.dry or how.allocation is not None else reading(run):
        resumption = choose_resumption(run, request, from_start, how.dry)
        print_lines(resumption.notes)
        if isinstance(resumption, NewRun):
            return _submit(resumption.prepared, resumption.parent, how)
        return _start(resumption, how)


def _branch(text: str, request: Request, how: _SubmitOptions) -> SubmittedRun | None:
    """Submits a new run from a checkpoint of the run that `text` names. None as of `_submit`."""
    request = _of_a_run(request, "--branch")
    name, step = split_branch(text)
    branch = prepare_branch(find_run(name, logs_folder()), step, request)
    print_lines(branch.notes)
    return _submit(branch.prepared, branch.parent, how)


def _of_a_run(request: Request, option: str) -> Request:
    """The request as it is of a run's own experiment. ConfigError if the command line names another one."""
    ours = ("resume", "branch", "from_start", "wait", "here", "dry_run", "script", "yes", "force", "until")
    given = on_command_line(*ours)
    others = [
        one.human_readable_name if one.name == "experiment" else option_name(one)
        for one in given
        if one.name in ("experiment", "row", "sweep", "grid", "smoke", "max_parallel", "skip_unfit")
    ]
    if others:
        raise ConfigError(
            f"{option} continues a run's own experiment; {', '.join(others)} would be another",
            "leave them out, or submit a new run",
        )
    if "cluster" not in [one.name for one in given]:
        request = replace(request, cluster=None)  # HPC_GPT_CLUSTER was read when the run was submitted
    return request


def print_start(start: ExpectedStart) -> None:
    click.echo(start.answer, err=True)
    _print_waits(start.waits)


def _print_waits(why: str) -> None:
    if why:
        click.echo(f"it cannot start now: {why}", err=True)


def submitted_lines(submitted: SubmittedRun, wait: bool) -> None:
    run, job_id, on_slurm = submitted.run, submitted.job_id, submitted.scheduler == "slurm"
    around = os.environ.get("SLURM_JOB_ID")
    set_ = sorted(name for name in os.environ if name.startswith("SBATCH_") or name == "SLURM_CLUSTERS")
    if on_slurm and around is None and set_ and run.resolved().script is None:  # in a job, Slurm has set them
        click.echo(f"not passed on: {', '.join(set_)}; use options or the cluster profile", err=True)
    if on_slurm and around:
        words = f"note: this is within job {around}, but a new job is queued, with nodes of its own"
        click.echo(f"{words}; --here runs on those of job {around}", err=True)
    words = f"submitted {run.run_id} as job {job_id}{_on_cluster(run)}"
    verb = "queued" if submitted.waits else "started"
    click.echo(words if on_slurm else f"{verb} {run.run_id} as process {job_id}")
    if len(submitted.jobs) > 1:
        click.echo(f"{len(submitted.jobs) - 1} more jobs wait for it: {', '.join(submitted.jobs[1:])}", err=True)
    _print_waits(submitted.waits)
    click.echo(f"run folder {run.path}", err=True)
    if not wait:
        click.echo(f"next: hpc-gpt status {job_id if on_slurm else run.run_id}", err=True)


# --- sweeps


def with_axes(request: Request, texts: Sequence[str], most: int) -> Request:
    """The request with a grid. ConfigError for a fault of it, and for a key that another option gives, too."""
    axes = parse_grid(texts, most)
    if request.sweep or request.script is not None:
        other = "--sweep" if request.sweep else f"{request.script.path}, a job script," if request.script else ""
        raise ConfigError(f"{other} has rows of its own or none, and --grid makes some", "give one of the two")
    if twice := [axis.key for axis in axes if axis.key in request.given]:
        raise ConfigError(f"{', '.join(twice)} is given by --grid and by another option", "give one of the two")
    keys = {axis.key for axis in axes}
    given_way = gives_way(keys)
    overrides = {key: value for key, value in request.overrides.items() if key not in keys and key not in given_way}
    return replace(request, overrides=overrides, grid=axes)


def submit_sweep(
    request: Request,
    until: tuple[str, ...],
    max_parallel: int | None,
    skip_unfit: bool,
    answer: SubmitAnswer,
    now: bool = False,
) -> None:
    """Queues every row that can run and prints what became of each; on this machine runs them all."""
    request, dry_run, wait = replace(request, until=parse_until(until)), answer.dry, answer.wait
    if request.here or now:
        option = "--grid" if request.grid else "--sweep"
        words = f"{'--here' if request.here else '--now'} runs one run, and {option} is many"
        raise ConfigError(words, "--row NAME names one of them")
    if not (request.sweep or request.grid):
        option = "--max-parallel" if max_parallel is not None else "--skip-unfit"
        raise ConfigError(f"{option} needs --sweep", f"add --sweep, or leave {option} out")
    prepared, logs = prepare_sweep(request, queueing=not dry_run, skip_unfit=skip_unfit), logs_folder()
    try:
        provenance = check_submission(prepared.rows, logs, dry_run)
    except RowFaults as refusal:
        prepared = prepared.without(refusal, skip_unfit)
        provenance = check_submission(prepared.rows, logs, dry_run)
    rows = prepared.rows
    answer.left_out = {row.name: str(row.impossible) for row in prepared.impossible}
    answer.left_out |= {name: str(fault) for name, fault in prepared.unfit.items()}
    here = rows[0].resolved.cluster.scheduler == "local"
    if dry_run:
        for row in rows:
            answer.would(row.resolved, row.prediction)
        _print_rows(prepared)
        _show_sweep(rows, here)
        return
    sweep = write_sweep(prepared.name, rows, logs, provenance, prepared.varied)
    _print_rows(prepared)
    click.echo(f"sweep {sweep.id}: {counted(len(rows), 'run')} of {sweep.name}, with links in {sweep.folder}", err=True)
    if here:
        _run_here(sweep, rows, answer)
        return
    try:
        queue_sweep(sweep, rows, max_parallel)
    except UserError:
        _print_sweep(sweep, wait, answer)
        raise
    _follow_sweep(sweep, wait, answer)
    if sweep.refusals:
        queued = sum(len(job.runs) for job in sweep.jobs)
        words = f"{len(rows) - queued} of {len(rows)} runs were refused"
        raise JobRefused(words, f"hpc-gpt status {sweep.id} says why; change the request and submit those rows")


def _follow_sweep(sweep: SubmittedSweep, wait: bool, answer: SubmitAnswer) -> None:
    """Prints the jobs of a sweep, and with `wait` follows its runs to their ends."""
    interrupts = with_interrupts(lambda: _print_sweep(sweep, wait, answer), wait)
    if wait:
        wait_for_all([run for job in sweep.jobs for run in job.runs], interrupts)
        click.echo(f"next: hpc-gpt report {quote(str(sweep.folder))}", err=True)


def _print_rows(prepared: PreparedSweep) -> None:
    """Prints what a smoke run made small, what is predicted, and which rows cannot run."""
    print_lines(dict.fromkeys(str(line) for row in prepared.rows for line in data_lines(row)))
    print_lines(prepared.messages)
    print_lines(f"not {row.name}: {row.impossible}" for row in prepared.impossible)
    print_lines(f"not {name}: {'; '.join(str(fault).splitlines())}" for name, fault in prepared.unfit.items())


def _show_sweep(rows: Sequence[PreparedRun], here: bool) -> None:
    """Prints a line for each job it would make, with its rows, and what sbatch says of it. Raises JobRefused."""
    jobs = [[row] for row in rows] if here else plan_jobs(rows)
    refused: list[JobRefused] = []
    for job in jobs:
        first = job[0].resolved
        kind = f"array of {len(job)}" if len(job) > 1 else "job"
        each = counted(first.gpus, "GPU") + (f" on {first.nodes} nodes" if first.nodes > 1 else "")
        click.echo(f"{kind}, {each}: {' '.join(str(row.resolved.row) for row in job)}")
        try:
            print_start(dry_run(first, job[0].script))
        except JobRefused as fault:
            refused.append(fault)
            click.echo(f"refused: {fault}", err=True)
    click.echo(NOTHING_DONE, err=True)
    if refused:
        raise JobRefused(f"{len(refused)} of {len(jobs)} jobs would be refused", refused[0].hint)


def _on_cluster(run: RunFolder) -> str:
    return f" on cluster {cluster}" if (cluster := run.slurm_cluster()) else ""


def _print_sweep(sweep: SubmittedSweep, wait: bool, answer: SubmitAnswer) -> None:
    answer.sweep = sweep.id
    for job in sweep.jobs:
        for run in job.runs:
            answer.add(run, run.resolved(), newest_submission(run).get("job_id"), waits=job.waits)
        what = f"{len(job.runs)} runs as array" if len(job.runs) > 1 else f"{job.runs[0].run_id} as job"
        click.echo(f"submitted {what} {job.id}{_on_cluster(job.runs[0])}")
        _print_waits(job.waits)
    queued = {run.path for run in answer.folders}
    for run in sweep.runs:
        if run.path not in queued and (why := newest_submission(run).get("refused")):
            answer.left_out[str(run.resolved().row)] = why
    for refusal in sweep.refusals:
        click.echo(f"not queued: {refusal}", err=True)
    if not wait and sweep.jobs:
        click.echo(f"next: hpc-gpt status {sweep.id}", err=True)


def _run_here(
    sweep: SubmittedSweep, rows: Sequence[PreparedRun], answer: SubmitAnswer, names: Sequence[str] | None = None
) -> None:
    """Runs the rows one after the other, also after a failure; Ctrl-C ends the current row and the sweep. `names`: of
    the links to the runs, their numbers unless given."""
    queue_locally(sweep, names)
    answer.sweep, answer.wait = sweep.id, True
    failures = []
    for run, row in zip(sweep.runs, rows, strict=True):
        submitted = start_queued(run, row)
        if submitted is None:
            click.echo(f"{row.resolved.row}: cancelled while it waited", err=True)
            answer.left_out[str(row.resolved.row)] = "cancelled while it waited"
            continue
        answer.add(run, row.resolved, submitted.job_id)
        started = f"started {row.resolved.row}, {run.run_id}, as process {submitted.job_id}"
        interrupts = with_interrupts(functools.partial(click.echo, started), wait=True)
        try:
            wait_for(run, interrupts)
        except JobFailed as fault:
            click.echo(f"{row.resolved.row} failed: {fault}", err=True)
            failures.append(str(row.resolved.row))
    if failures:
        words = f"{len(failures)} of {len(rows)} runs failed: {', '.join(failures)}"
        raise JobFailed(words, f"hpc-gpt status {sweep.id}")
    click.echo(f"next: hpc-gpt report {quote(str(sweep.folder))}", err=True)
