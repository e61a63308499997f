"""`hpc-gpt submit` of many runs: with --sweep, with --grid, and of a job script that is an array."""

import functools
from collections.abc import Sequence
from dataclasses import replace

import click

from hpc_gpt.cli.submit_answer import (
    NOTHING_DONE,
    AnsweredRun,
    AnswerParts,
    LeftOut,
    SubmitOptions,
    on_cluster,
    print_lack_of_files,
    print_lines,
    print_start,
    print_waits,
    with_interrupts,
)
from hpc_gpt.core.ends.run_state import newest_submission
from hpc_gpt.core.errors import ConfigError, JobFailed, JobRefused, UserError
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.format import counted
from hpc_gpt.core.settings.experiment_file import gives_way
from hpc_gpt.core.settings.grid import parse_grid
from hpc_gpt.core.settings.sweep_rows import RowFaults
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.notes import data_rows, notes_of_rows, notes_said, without_said
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.submission import check_submission, dry_run
from hpc_gpt.launcher.sweep import (
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
from hpc_gpt.launcher.watch.control import wait_for, wait_for_all


def with_axes(request: Request, texts: Sequence[str], most: int) -> Request:
    """The request with a grid. Raises ConfigError for a faulty grid, and for a key that another option gives, too."""
    axes = parse_grid(texts, most)
    if twice := [axis.key for axis in axes if axis.key in request.given]:
        raise ConfigError(f"{', '.join(twice)} is given by --grid and by another option", "give one of the two")
    keys = {axis.key for axis in axes}
    replaced = gives_way(keys)
    overrides = {key: value for key, value in request.overrides.items() if key not in keys and key not in replaced}
    return replace(request, overrides=overrides, grid=axes)


def submit_sweep(request: Request, max_parallel: int | None, skip_unfit: bool, options: SubmitOptions) -> AnswerParts:
    """Queues every row that can run, and prints the outcome of each; on this machine runs them all."""
    prepared, logs = prepare_sweep(request, queueing=not options.dry, skip_unfit=skip_unfit), logs_folder()
    try:
        provenance = check_submission(prepared.rows, logs, options.dry)
    except RowFaults as refusal:
        prepared = prepared.without(refusal, skip_unfit)
        provenance = check_submission(prepared.rows, logs, options.dry)
    rows = prepared.rows
    yield from (LeftOut(row.name, str(row.impossible)) for row in prepared.impossible)
    yield from (LeftOut(name, str(fault)) for name, fault in prepared.unfit.items())
    is_local = rows[0].resolved.cluster.scheduler == "local"
    if options.dry:
        yield from (AnsweredRun(row.resolved, prediction=row.prediction) for row in rows)
        _print_rows(prepared)
        _show_sweep(rows, is_local)
        return
    print_lack_of_files([row.resolved for row in rows])
    earlier_notes = notes_said(rows[0].resolved, logs, len(rows))
    sweep = write_sweep(prepared.name, rows, logs, provenance, prepared.varied)
    _print_rows(prepared, earlier_notes)
    say(
        f"sweep {sweep.id}: {counted(len(rows), 'run')} of {sweep.name}, with links in {from_here(sweep.folder)}",
        err=True,
    )
    if is_local:
        yield from run_here(sweep, rows)
        return
    try:
        queue_sweep(sweep, rows, max_parallel)
    except UserError:
        yield from queued(sweep, options.wait)
        _print_sweep(sweep, options.wait)
        raise
    yield from queued(sweep, options.wait)
    follow_sweep(sweep, options.wait)
    if sweep.refusals:
        accepted = sum(len(job.runs) for job in sweep.jobs)
        raise JobRefused(
            f"{len(rows) - accepted} of {len(rows)} runs were refused",
            f"hpc-gpt status {sweep.id} says why; change the request and submit those rows",
        )


def submit_elements(prepared: PreparedRun, options: SubmitOptions) -> AnswerParts:
    """Submits a job script that is an array as one array; on this machine runs its elements one after the other."""
    is_local, rows = prepared.resolved.cluster.scheduler == "local", list[PreparedRun]()
    if is_local:
        sweep, rows = write_script_array(prepared, logs_folder())
    else:
        sweep = submit_script_array(prepared, logs_folder())
    say(f"sweep {sweep.id}: {counted(len(sweep.runs), 'run')}, with links in {from_here(sweep.folder)}", err=True)
    if is_local:
        yield from run_here(sweep, rows, [str(row.resolved.row) for row in rows])
    else:
        yield from queued(sweep, options.wait)
        follow_sweep(sweep, options.wait)


def queued(sweep: SubmittedSweep, followed: bool) -> AnswerParts:
    """The parts of an answer on the runs of a sweep that were queued, and on the rows that were refused."""
    for job in sweep.jobs:
        for run in job.runs:
            number = newest_submission(run).get("job_id")
            yield AnsweredRun(run.resolved(), run, number, (), job.waits, sweep.id, followed)
    accepted = {run.path for job in sweep.jobs for run in job.runs}
    for run in sweep.runs:
        if run.path not in accepted and (why := newest_submission(run).get("refused")):
            yield LeftOut(str(run.resolved().row), why)


def follow_sweep(sweep: SubmittedSweep, wait: bool) -> None:
    """Prints the jobs of a sweep, and with --wait follows its runs to their ends."""
    interrupts = with_interrupts(lambda: _print_sweep(sweep, wait), wait)
    if wait:
        wait_for_all([run for job in sweep.jobs for run in job.runs], interrupts)
        click.echo(f"next: hpc-gpt report {sweep.id}", err=True)


def _print_rows(prepared: PreparedSweep, earlier_notes: frozenset[str] = frozenset()) -> None:
    """Prints the sizes of smoke runs, the predictions, and the rows that cannot run; not the `earlier_notes`, which the
    last submission printed."""
    print_lines(dict.fromkeys(str(line) for row in prepared.rows for line in data_rows(row)))
    print_lines(without_said(notes_of_rows(prepared.rows, prepared.varied), earlier_notes))
    spare = any(row.resolved.job.spare_nodes for row in prepared.rows)
    if spare and any(len(job) > 1 for job in plan_jobs(prepared.rows)):
        print_lines(["note: spare nodes serve the preflight alone: an array's element without a node is queued again"])
    print_lines(f"not {row.name}: {row.impossible}" for row in prepared.impossible)
    print_lines(f"not {name}: {'; '.join(str(fault).splitlines())}" for name, fault in prepared.unfit.items())


def _show_sweep(rows: Sequence[PreparedRun], is_local: bool) -> None:
    """Prints one line per job of the sweep, with its rows and sbatch's answer. Raises JobRefused."""
    jobs = [[row] for row in rows] if is_local else plan_jobs(rows)
    refused, answers = list[JobRefused](), set[str]()
    for job in jobs:
        first = job[0].resolved
        kind = f"array of {len(job)}" if len(job) > 1 else "job"
        size = counted(first.gpus, "GPU") + (f" on {first.nodes} nodes" if first.nodes > 1 else "")
        say(f"{kind}, {size}: {' '.join(str(row.resolved.row) for row in job)}")
        try:
            start = dry_run(first, job[0].script)
            if str(start) not in answers:  # once for equal jobs
                print_start(start)
            answers.add(str(start))
        except JobRefused as fault:
            refused.append(fault)
            say(f"refused: {fault}", err=True)
    print_lack_of_files([row.resolved for row in rows])
    say(NOTHING_DONE, err=True)
    if refused:
        raise JobRefused(f"{len(refused)} of {len(jobs)} jobs would be refused", refused[0].hint)


def _print_sweep(sweep: SubmittedSweep, wait: bool) -> None:
    for job in sweep.jobs:
        kind = "in turns as job" if job.in_turns else "as array"
        what = f"{len(job.runs)} runs {kind}" if len(job.runs) > 1 else f"{job.runs[0].run_id} as job"
        say(f"submitted {what} {job.id}{on_cluster(job.runs[0].slurm_cluster())}")
        print_waits(job.waits)
    for refusal in sweep.refusals:
        say(f"not queued: {refusal}", err=True)
    if not wait and sweep.jobs:
        click.echo(f"next: hpc-gpt status {sweep.id}", err=True)


def run_here(sweep: SubmittedSweep, rows: Sequence[PreparedRun], names: Sequence[str] | None = None) -> AnswerParts:
    """Runs the rows one after the other, also after a failure; Ctrl-C ends the current row and the sweep. `names` are
    the names of the links to the runs, their numbers unless given."""
    queue_locally(sweep, names)
    failures = []
    for run, row in zip(sweep.runs, rows, strict=True):
        submitted = start_queued(run, row)
        if submitted is None:
            say(f"{row.resolved.row}: cancelled while it waited", err=True)
            yield LeftOut(str(row.resolved.row), "cancelled while it waited")
            continue
        yield AnsweredRun(row.resolved, run, submitted.job_id, sweep=sweep.id, followed=True)
        started = f"started {row.resolved.row}, {run.run_id}, as process {submitted.job_id}"
        interrupts = with_interrupts(functools.partial(click.echo, started), wait=True)
        try:
            wait_for(run, interrupts)
        except JobFailed as fault:
            say(f"{row.resolved.row} failed: {fault}", err=True)
            failures.append(str(row.resolved.row))
    if failures:
        message = f"{len(failures)} of {len(rows)} runs failed: {', '.join(failures)}"
        raise JobFailed(message, f"hpc-gpt status {sweep.id}")
    click.echo(f"next: hpc-gpt report {sweep.id}", err=True)
