"""`hpc-gpt submit` of one run: submits it, resumes it, or branches from it. Sweeps are in `sweeping`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli.options import on_command_line
from hpc_gpt.cli.submit_answer import (
    NOTHING_DONE,
    AnsweredRun,
    AnswerParts,
    SubmitOptions,
    print_lack_of_files,
    print_lines,
    print_start,
    print_submitted,
    submitted_part,
    with_interrupts,
)
from hpc_gpt.core.errors import ConfigError, RunFolderError, UserError
from hpc_gpt.core.files import from_here, logs_folder, read_text
from hpc_gpt.core.format import counted
from hpc_gpt.core.runs.find_runs import find_run, find_runs
from hpc_gpt.core.terminal import can_ask, confirm, say
from hpc_gpt.launcher.decide import prepare
from hpc_gpt.launcher.notes import notes_said, prediction_lines, without_said
from hpc_gpt.launcher.submission import (
    check_submission,
    dry_run,
    submit_run,
)

if TYPE_CHECKING:
    from hpc_gpt.core.checkpoints.lineage import Parent
    from hpc_gpt.core.runs.run_folder import RunFolder
    from hpc_gpt.core.settings.resolved import Resolved
    from hpc_gpt.launcher.prepared import PreparedRun
    from hpc_gpt.launcher.request import Request
    from hpc_gpt.launcher.resumption import SameRun
    from hpc_gpt.launcher.submission import SubmittedRun


def submit_one(
    request: Request,
    resume: str | None,
    branch: str | None,
    from_start: bool,
    yes: bool,
    options: SubmitOptions,
) -> AnswerParts:
    """Submits one run, or resumes the run `resume`, or branches from `branch`; with --wait follows it to its end."""
    if resume is not None:
        yield from _resume(resume, request, from_start, options)
        return
    parent, said = None, None
    if branch is not None:
        prepared, parent = _branch(branch, request)
    else:
        prepared = prepare(request, queueing=not options.dry, faster=True)
        if not (options.dry or yes or request.names_experiment or request.sized):
            _ask_first(prepared, request)
        said = frozenset[str]() if options.dry else notes_said(prepared.resolved, logs_folder())
        print_lines(without_said((*prepared.notes, *prepared.faster), said))
        if prepared.job_script is not None and prepared.job_script.array and not options.dry:
            from hpc_gpt.cli.sweeping import submit_elements

            yield from submit_elements(prepared, options)
            return
    if options.dry:
        yield from _would_submit(prepared, parent, options)
    else:
        yield from _followed(*_submit(prepared, parent, options, said), options)


def _submit(
    prepared: PreparedRun, parent: Parent | None, options: SubmitOptions, said: frozenset[str] | None = None
) -> tuple[SubmittedRun, Callable[[], Iterable[str]]]:
    """Submits a new run, which resumes from `parent` if there is one. Returns (the run, its lines for the user).
    `said`: the lines of the last submission, if they were read."""
    logs = logs_folder()
    if options.now:
        _check_now(prepared.resolved)
    said = notes_said(prepared.resolved, logs) if said is None else said
    elements = prepared.job_script.array if prepared.job_script is not None else ()
    print_lack_of_files([prepared.resolved] * max(1, len(elements)))
    submitted = submit_run(prepared, logs, parent, options.now)
    return submitted, lambda: without_said(prediction_lines(prepared, logs), said)


def _would_submit(prepared: PreparedRun, parent: Parent | None, options: SubmitOptions) -> AnswerParts:
    """Checks and shows a new run that is not submitted."""
    from hpc_gpt.launcher.overview import overview

    logs = logs_folder()
    if options.now:
        _check_now(prepared.resolved)
    check_submission([prepared], logs, dry=True, begins=parent is None)
    rows, notes = overview(prepared, logs), prediction_lines(prepared, logs)
    yield AnsweredRun(prepared.resolved, prediction=prepared.prediction)
    _show(prepared.resolved, prepared.script, rows, options, notes)


def _followed(submitted: SubmittedRun, lines_of: Callable[[], Iterable[str]], options: SubmitOptions) -> AnswerParts:
    """Prints a run's lines and its job, and with --wait follows the run to its end."""

    def show() -> None:
        print_lines(lines_of())
        print_submitted(submitted, options.wait)
        if options.wait:  # these take some seconds of a busy machine; without --wait nothing reads logs
            import hpc_gpt.launcher.watch.control
            import hpc_gpt.report.gather
            import hpc_gpt.report.tables  # noqa: F401

    yield submitted_part(submitted, options.wait)
    interrupts = with_interrupts(show, options.wait)
    if options.wait:
        from hpc_gpt.launcher.watch.control import await_measurements, wait_for
        from hpc_gpt.report.gather import refresh_record
        from hpc_gpt.report.tables import print_record

        wait_for(submitted.run, interrupts)
        await_measurements(submitted.run)
        print_record(refresh_record(submitted.run))


def _check_now(resolved: Resolved) -> None:
    if resolved.cluster.scheduler == "slurm":
        raise ConfigError("--now starts a run on this machine without Slurm", "leave --now out, or use --cluster local")


def _show(
    resolved: Resolved,
    script: str,
    rows: Sequence[tuple[str, str]],
    options: SubmitOptions,
    notes: Iterable[str] = (),
) -> None:
    """Prints the run that would be submitted, as rows or as its script with `notes`. Then prints Slurm's answer, which
    may be a refusal. Raises JobRefused."""
    if options.script:
        click.echo(script.encode(errors="surrogateescape"), nl=False)
        print_lines((*notes, f"would run: {dict(rows)['would run']}"))
    else:
        width, before = max(len(label) for label, _ in rows), ""
        for label, value in rows:
            say(f"{label if label != before else '':{width}}  {value}", hang=width + 2)
            before = label
    print_lack_of_files([resolved])
    print_start(dry_run(resolved, script))
    say(NOTHING_DONE, err=True)


def _ask_first(prepared: PreparedRun, request: Request) -> None:
    """Asks whether to queue the default experiment. Raises ConfigError with an example if there is no terminal."""
    run = prepared.resolved
    if run.cluster.scheduler == "local":
        return
    from hpc_gpt.planner.table import count_text  # loads all of the planner

    message = (
        f"no EXPERIMENT and no size: this would queue {run.name}, {count_text(run.model.params)} parameters as "
        f"{run.layout} on {counted(run.gpus, 'GPU')} of {run.cluster.name}"
    )
    if not can_ask():
        cluster = f" --cluster {request.cluster}" if request.cluster else ""
        raise ConfigError(
            message,
            f"name an experiment, as in hpc-gpt submit demo{cluster}, or a size, --gpus {run.gpus}; --yes queues it",
        )
    say(message, err=True)
    if not confirm("queue it?"):
        say("nothing was submitted", err=True)
        click.get_current_context().exit(1)


def _resume(name: str, request: Request, from_start: bool, options: SubmitOptions) -> AnswerParts:
    """Resumes the run itself, or a new run from its checkpoint if the command line changes anything; `from_start` makes
    a new run without a checkpoint. If the name means a sweep, each of its rows that can be resumed is."""
    request, logs = _request_for_run(request), logs_folder()
    rows = find_runs((name,), logs)
    sweeps = {run.sweep_id for run in rows}
    if len(rows) < 2 or len(sweeps) > 1 or None in sweeps or options.wait:
        yield from _resume_run(find_run(name, logs), request, from_start, options)
        return
    refusals = list[UserError]()
    for run in rows:
        try:
            yield from _resume_run(run, request, from_start, options)
        except (ConfigError, RunFolderError) as fault:
            refusals.append(fault)
            say(f"row {run.resolved().row}, {run.run_id}, is not resumed: {fault}", err=True)
    if len(refusals) == len(rows):
        raise ConfigError(f"none of the {len(rows)} rows of {name} can be resumed", refusals[-1].hint)


def _resume_run(run: RunFolder, request: Request, from_start: bool, options: SubmitOptions) -> AnswerParts:
    """Resumes one run."""
    from hpc_gpt.core.checkpoints.branches import reading
    from hpc_gpt.launcher.branching import NewRun
    from hpc_gpt.launcher.resumption import choose_resumption

    # No checkpoint is removed until a job, or a note, holds it.
    with contextlib.nullcontext() if options.dry else reading(run):
        resumption = choose_resumption(run, request, from_start, options.dry)
        print_lines(resumption.notes)
        if isinstance(resumption, NewRun):
            if options.dry:
                yield from _would_submit(resumption.prepared, resumption.parent, options)
                return
            submitted, lines_of = _submit(resumption.prepared, resumption.parent, options)
        else:
            if options.now:
                _check_now(resumption.resolved)
            if options.dry:
                yield from _would_resume(resumption, options)
                return
            submitted, lines_of = resumption.start(options.now), tuple
    yield from _followed(submitted, lines_of, options)


def _would_resume(resumption: SameRun, options: SubmitOptions) -> AnswerParts:
    """Shows the job.sh of an existing run, which would be started."""
    from hpc_gpt.launcher.overview import summary_rows

    run, resolved = resumption.run, resumption.resolved
    text = read_text(run.job_script, errors="surrogateescape")
    rows = [
        ("resumes", f"{run.run_id}{resumption.where}"),
        *summary_rows(resolved),
        ("would run", f"the run's own {from_here(run.job_script)}"),
    ]
    yield AnsweredRun(resolved)
    _show(resolved, text, rows, options)


def _branch(text: str, request: Request) -> tuple[PreparedRun, Parent | None]:
    """Prepares a new run from a checkpoint of the run that `text` names."""
    from hpc_gpt.launcher.branching import Way, prepare_new_run, split_branch

    name, step = split_branch(text)
    branch = prepare_new_run(find_run(name, logs_folder()), _request_for_run(request), Way.BRANCH, step)
    print_lines(branch.notes)
    return branch.prepared, branch.parent


def _request_for_run(request: Request) -> Request:
    """The request without HPC_GPT_CLUSTER, which was read when the run was submitted."""
    by_option = any(parameter.name == "cluster" for parameter in on_command_line(click.get_current_context()))
    return request if by_option else replace(request, cluster=None)
