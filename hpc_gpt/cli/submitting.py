"""What `hpc-gpt submit` does with one run: submits it, resumes it, or branches from it; sweeps are in `sweeping`."""

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import click

from hpc_gpt.cli.experiment_options import on_command_line, option_name
from hpc_gpt.cli.submit_answer import (
    NOTHING_DONE,
    SubmitAnswer,
    print_limits,
    print_lines,
    print_start,
    print_submitted,
)
from hpc_gpt.cli.sweeping import submit_elements
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import from_here, logs_folder, read_text
from hpc_gpt.core.runs.branches import reading
from hpc_gpt.core.runs.find_runs import find_run
from hpc_gpt.core.runs.lineage import Parent
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.start_check import ExpectedStart
from hpc_gpt.core.terminal import agrees, can_ask, say
from hpc_gpt.core.words import counted
from hpc_gpt.launcher.launch.branching import prepare_branch, split_branch
from hpc_gpt.launcher.launch.here import Allocation, no_script_here, read_allocation, run_in
from hpc_gpt.launcher.launch.limits import Asked
from hpc_gpt.launcher.launch.prepare import prepare
from hpc_gpt.launcher.launch.prepared import PreparedRun, notes_said, without_said
from hpc_gpt.launcher.launch.request import Request
from hpc_gpt.launcher.launch.resumption import NewRun, SameRun, choose_resumption
from hpc_gpt.launcher.launch.submission import (
    SubmittedRun,
    check_submission,
    dry_run,
    of_run,
    overview,
    prediction_lines,
    submit_run,
    write_run,
)
from hpc_gpt.launcher.launch.winner import find_winner
from hpc_gpt.launcher.plan.table import count_text
from hpc_gpt.launcher.watch.control import await_measurements, wait_for


@dataclass(frozen=True)
class _SubmitOptions:
    """How a run is submitted: `answer` says whether at all, and gets what became of it; a dry run prints its `script`
    if that is asked for; at once if in the user's `allocation`."""

    script: bool
    allocation: Allocation | None
    answer: SubmitAnswer
    now: bool = False


def submit_one(
    request: Request,
    resume: str | None,
    branch: str | None,
    winner: str | None,
    from_start: bool,
    script: bool,
    yes: bool,
    answer: SubmitAnswer,
) -> None:
    """Submits one run, or resumes the run `resume`, or branches from `branch`; with --wait follows it to its end."""
    how = _SubmitOptions(script, read_allocation() if request.here else None, answer)
    if how.allocation is not None and request.script is not None:
        raise no_script_here(str(request.script.path))
    if script and not answer.dry:
        raise ConfigError("--script prints the script of a --dry-run", "add --dry-run, or use hpc-gpt render")
    if from_start and resume is None:
        raise ConfigError("--from-start needs --resume RUN", "without --resume every run begins at step 0")
    if resume is not None and branch is not None:
        message = "--resume continues a run, and --branch begins another one from its checkpoint"
        raise ConfigError(message, "give one of the two")
    if resume is not None:
        submitted = _resume(resume, request, from_start, how)
    elif branch is not None:
        submitted = _branch(branch, request, how)
    else:
        won = find_winner(winner, logs_folder()) if winner is not None else None
        prepared = prepare(won.over(request) if won is not None else request, queueing=not answer.dry, faster=True)
        if won is not None:
            won.check(prepared.resolved)
        if not (answer.dry or yes or request.names_experiment or request.sized):
            _ask_first(prepared, request)
        said = frozenset[str]() if answer.dry else notes_said(prepared.resolved, logs_folder())
        lines = [won.line] if won is not None else []
        print_lines([*lines, *without_said((*prepared.notes, *prepared.faster), said)])
        if prepared.job_script is not None and prepared.job_script.array and not answer.dry and how.allocation is None:
            submit_elements(prepared, answer)
            return
        submitted = _submit(prepared, None, how)
    if submitted is None:
        return
    interrupts = print_submitted(submitted, answer)
    if answer.wait:
        wait_for(submitted.run, interrupts)
        _print_record(submitted.run)


def _submit(prepared: PreparedRun, parent: Parent | None, how: _SubmitOptions) -> SubmittedRun | None:
    """Submits a new run, which resumes from `parent` if there is one. None for a dry run, and for a run in an
    allocation, which has ended."""
    logs = logs_folder()
    _check_now(how.answer.now, prepared.resolved)
    if how.answer.dry:
        check_submission([prepared], logs, dry=True, begins=parent is None)
        how.answer.would(prepared.resolved, prepared.prediction)
        rows = overview(prepared, logs, here=how.allocation is not None)
        _show(Asked.of(prepared), rows, how, prediction_lines(prepared, logs))
        return None
    said = notes_said(prepared.resolved, logs)
    if how.allocation is None:
        submitted = submit_run(prepared, logs, parent, how.answer.now)
        print_lines(without_said(prediction_lines(prepared, logs), said))
        return submitted
    if prepared.job_script is not None:
        raise no_script_here(str(prepared.job_script.provenance["script"]["path"]))
    how.allocation.fitting_nodes(prepared.resolved, prepared.script)  # before anything is written
    provenance = check_submission([prepared], logs, begins=parent is None)
    run = write_run(prepared, logs, provenance, parent=parent)
    print_lines(without_said(prediction_lines(prepared, logs), said))
    return _start(SameRun(run, prepared.resolved), how)


def _check_now(now: bool, resolved: Resolved) -> None:
    if now and (resolved.cluster.scheduler == "slurm" or resolved.job.dependency is not None):
        message = "--now starts a run on this machine without Slurm, and --dependency waits"
        raise ConfigError(message, "leave --now out, or use --cluster local without --dependency")


def _print_record(run: RunFolder) -> None:
    # Imported here: a run that is not waited for needs nothing that reads logs.
    from hpc_gpt.reader.report.gather import refresh_record
    from hpc_gpt.reader.report.tables import print_record

    await_measurements(run)
    print_record(refresh_record(run))


def _start(resumption: SameRun, how: _SubmitOptions) -> SubmittedRun | None:
    """Starts the job.sh of a run that is there. None as of `_submit`."""
    run, resolved = resumption.run, resumption.resolved
    _check_now(how.answer.now, resolved)
    text = read_text(run.job_script, errors="surrogateescape")
    if how.answer.dry:
        rows = [
            ("resumes", f"{run.run_id}{resumption.where}"),
            *of_run(resolved),
            ("would run", f"the run's own {from_here(run.job_script)}"),
        ]
        how.answer.would(resolved)
        _show(Asked(resolved, text), rows, how)
        return None
    if how.allocation is None:
        return resumption.start(how.answer.now)
    say(f"started {run.run_id} {how.allocation.where_text(resolved, text)}")
    how.answer.add(run, resolved, os.environ.get("SLURM_JOB_ID"))
    run_in(how.allocation, run, resolved)
    _print_record(run)
    return None


def _show(asked: Asked, rows: Sequence[tuple[str, str]], how: _SubmitOptions, notes: Iterable[str] = ()) -> None:
    """Prints what a dry run would start, as rows or as its script with `notes`, then the limits that it would meet and
    what Slurm says of that, which may be a refusal, or where and until when it would run in the allocation. Raises
    JobRefused."""
    start = limit = None
    if how.allocation is not None:
        start = ExpectedStart(f"would run now, {how.allocation.where_text(asked.resolved, asked.script)}")
    if how.script:
        click.echo(asked.script.encode(errors="surrogateescape"), nl=False)
        print_lines((*notes, f"would run: {dict(rows)['would run']}"))
    else:
        width, before = max(len(label) for label, _ in rows), ""
        for label, value in rows:
            say(f"{label if label != before else '':{width}}  {value}", hang=width + 2)
            before = label
    if start is None:
        limit = print_limits([asked])
        start = dry_run(asked.resolved, asked.script)
    print_start(start)
    say(NOTHING_DONE, err=True)
    if limit is not None:
        raise limit


def _ask_first(prepared: PreparedRun, request: Request) -> None:
    """Asks whether to queue the default experiment; ConfigError with an example if there is no terminal."""
    run = prepared.resolved
    if run.cluster.scheduler == "local":
        return
    message = (
        f"no EXPERIMENT and no size: this would queue {run.name}, {count_text(run.model.params)} parameters as "
        f"{run.layout} on {counted(run.gpus, 'GPU')} of {run.cluster.name}"
    )
    if not can_ask():
        cluster = f" --cluster {request.cluster}" if request.cluster else ""
        raise ConfigError(
            message,
            f"name what to train, as hpc-gpt submit demo{cluster}, or its size, --gpus {run.gpus}; --yes queues it",
        )
    say(message, err=True)
    if not agrees("queue it?"):
        say("nothing was submitted", err=True)
        click.get_current_context().exit(1)


def _resume(name: str, request: Request, from_start: bool, how: _SubmitOptions) -> SubmittedRun | None:
    """Resumes the run itself, or a new run from its checkpoint if the command line changes anything; `from_start` makes
    a new run without a checkpoint. None as of `_submit`."""
    request = _of_a_run(request, "--resume")
    run = find_run(name, logs_folder())
    # No checkpoint goes until a job, or a note, keeps it; a run in the allocation has the lock until its end.
    with contextlib.nullcontext() if how.answer.dry or how.allocation is not None else reading(run):
        resumption = choose_resumption(run, request, from_start, how.answer.dry)
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
