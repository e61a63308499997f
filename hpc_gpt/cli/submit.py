"""hpc-gpt submit"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import complete
from hpc_gpt.cli.experiment_options import experiment_options, logs_folder

if TYPE_CHECKING:
    from hpc_gpt.chain.forecast import Forecast
    from hpc_gpt.launch.prepare import Prepared, Request
    from hpc_gpt.launch.submission import Submitted
    from hpc_gpt.runs.run_folder import RunFolder


@click.command()
@experiment_options
@click.option("--dry-run", is_flag=True, envvar="HPC_GPT_DRY_RUN",
              help="Print script and command, ask sbatch --test-only; write nothing. What submit refuses is refused, "
              "but for a Slurm that is away.")  # fmt: skip
@click.option("--yes", "-y", is_flag=True, envvar="HPC_GPT_YES",
              help="Do not ask whether to queue the default experiment.")  # fmt: skip
@click.option("--wait", is_flag=True, envvar="HPC_GPT_WAIT",
              help="Follow the job to its end; exit 3 if it failed. Ctrl-C stops the job.")  # fmt: skip
@click.option("--max-parallel", type=click.IntRange(min=1), metavar="N", envvar="HPC_GPT_MAX_PARALLEL",
              help="For --sweep: so many of an array at a time.")  # fmt: skip
@click.option("--skip-unfit", is_flag=True, envvar="HPC_GPT_SKIP_UNFIT",
              help="For --sweep: leave out the rows that are refused or do not fit, and say which.")  # fmt: skip
@click.option("--until", "until", multiple=True, metavar="WHAT", envvar="HPC_GPT_UNTIL",
              help="How far: tokens=30e9, steps=N or loss=X; says how many jobs and GPU-hours that takes, and when it "
              "is done.")  # fmt: skip
@click.option("--resume", metavar="RUN", envvar="HPC_GPT_RESUME", shell_complete=complete.runs,
              help="Go on from RUN's checkpoint: in its own folder, or with other options as a new run.")  # fmt: skip
def submit(
    request: Request,
    dry_run: bool,
    yes: bool,
    wait: bool,
    max_parallel: int | None,
    skip_unfit: bool,
    until: tuple[str, ...],
    resume: str | None,
) -> None:
    """Submit EXPERIMENT to Slurm, or start it here.

    --cluster local starts it on this machine, a process for each rank. EXPERIMENT is a TOML file, or a file or folder
    under experiments/ by name. Without one it is seed 001's own 64-GPU run, which is queued if its size is named, a
    terminal agrees or --yes is given; with --model it is the default of every key (hpc-gpt help keys).

    A run that its time limit ends goes on by itself, as the profile's chain says: the same job once more (requeue), or
    jobs that wait for each other (singleton). --until tells beforehand what the chain takes, from earlier runs of the
    same settings under logs/, else as predicted. --max-gpu-hours ends it as budget, saved, before it takes more.

    \b
    hpc-gpt submit demo --cluster local --wait
    hpc-gpt submit --gpus 64 --pp 16
    hpc-gpt submit demo --set train.steps=20 --tp 1
    hpc-gpt submit memory-ladder --sweep --skip-unfit
    hpc-gpt submit gpt2-meg-ds-zero --row full-48b --smoke
    hpc-gpt submit demo --until tokens=30e9 --time 20:00:00 --max-gpu-hours 500 --dry-run
    hpc-gpt submit --resume 20261120-1042 --tp 2 --pp 4 --until steps=50000
    """
    from hpc_gpt.launch.until import parse_until

    request = replace(request, until=parse_until(until))
    if resume is None and (request.sweep or max_parallel is not None or skip_unfit):
        from hpc_gpt.cli.sweep import submit_sweep

        submit_sweep(request, dry_run, wait, max_parallel, skip_unfit)
        return
    if wait:
        # Loaded before there is a job: from then on a Ctrl-C is meant for the job.
        from hpc_gpt.launch.following import wait_for
    if resume is not None:
        submitted = _resume(resume, request, dry_run)
        if submitted is None:
            return
    else:
        from hpc_gpt.launch.prepare import prepare

        prepared = prepare(request, queueing=not dry_run)
        if not (dry_run or yes or request.names_experiment or request.sized):
            _ask_first(prepared, request)
        for note in prepared.notes:
            click.echo(note, err=True)
        if dry_run:
            _dry_run(prepared)
            return
        from hpc_gpt.launch.submission import submit_run

        submitted = submit_run(prepared, logs_folder())
        _foretell(prepared)
    interrupts = 0
    try:
        _say(submitted, wait)
    except KeyboardInterrupt:
        if not wait:
            raise
        interrupts = 1
    if wait:
        wait_for(submitted.run, interrupts)
        from hpc_gpt.report.gather import leave_record
        from hpc_gpt.report.tables import print_record

        print_record(leave_record(submitted.run))


def _ask_first(prepared: Prepared, request: Request) -> None:
    """Asks on a terminal whether to queue what nobody has named; ConfigError with an example off it."""
    from hpc_gpt.errors import ConfigError
    from hpc_gpt.report.plan_table import count_words
    from hpc_gpt.terminal import can_ask

    run = prepared.resolved
    if run.cluster.scheduler == "local":
        return
    words = (
        f"no EXPERIMENT and no size: this would queue {run.name}, {count_words(run.model.params)} parameters as "
        f"{run.layout} on {run.gpus} GPUs of {run.cluster.name}"
    )
    if not can_ask():
        cluster = f" --cluster {request.cluster}" if request.cluster else ""
        raise ConfigError(
            words,
            f"name what to train, as hpc-gpt submit demo{cluster}, or its size, as --gpus {run.gpus}; --yes queues it",
        )
    click.echo(words, err=True)
    if not _agrees("queue it?"):
        click.echo("nothing was submitted", err=True)
        click.get_current_context().exit(1)


def _agrees(question: str) -> bool:
    """The answer on the terminal; the end of the input is a no."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as end:
        if not isinstance(end.__context__, EOFError):
            raise
        click.echo("", err=True)
        return False


def _resume(name: str, request: Request, dry_run: bool) -> Submitted | None:
    """The same run once more, or a new one that goes on from it where the command line changes anything; None for a
    dry run."""
    from hpc_gpt.errors import ConfigError
    from hpc_gpt.runs.run_folder import find_run

    ctx = click.get_current_context()
    given = [
        parameter
        for parameter in ctx.command.params
        if parameter.name not in ("resume", "wait", "dry_run", "yes", "force", "until")
        and ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    others = [
        one.human_readable_name if one.name == "experiment" else one.opts[0]
        for one in given
        if one.name in ("experiment", "row", "sweep", "smoke", "max_parallel", "skip_unfit")
    ]
    if others:
        raise ConfigError(
            f"--resume goes on with a run's own experiment; {', '.join(others)} would be another",
            "leave them out, or submit a new run",
        )
    run = find_run(name, logs_folder())
    from hpc_gpt.launch.prepare import earlier_runs
    from hpc_gpt.launch.resumption import changed_length, forecast_same, prepare_resumption, resume_elsewhere

    assert request.until is not None
    if not given and not changed_length(run.resolved(), request.until, request.given):
        return _resume_same(run, forecast_same(run, request.until, earlier_runs()), dry_run)
    from hpc_gpt.settings.cluster import load_profile

    # What HPC_GPT_* variables say was the run's to heed when it was submitted.
    profile = load_profile(request.cluster) if request.cluster and _is_given("cluster") else None
    prepared, parent = prepare_resumption(
        run, request.given, profile, request.template, request.force, request.until, earlier_runs()
    )
    for note in prepared.notes:
        click.echo(note, err=True)
    if dry_run:
        _dry_run(prepared)
        return None
    click.echo(f"goes on from {parent.run} after step {parent.step}, as {prepared.resolved.layout}", err=True)
    submitted = resume_elsewhere(prepared, parent, logs_folder())
    _foretell(prepared)
    return submitted


def _resume_same(run: RunFolder, outlook: Forecast | None, dry_run: bool) -> Submitted | None:
    """The run's own job.sh once more. Of a dry run the outlook is all there is to say."""
    from hpc_gpt.errors import ConfigError
    from hpc_gpt.launch.resumption import check_resumption, resume_run

    for line in outlook.lines if outlook else ():
        click.echo(line, err=True)
    if dry_run:
        check_resumption(run, dry=True)
    if dry_run and outlook is None:
        raise ConfigError(
            "--resume without other options starts the run's own job.sh as it is", f"see {run.job_script}"
        )
    if dry_run:
        click.echo(f"would run: the run's own {run.job_script}", err=True)
        click.echo("dry run: nothing was written or submitted", err=True)
        return None
    return resume_run(run, outlook.jobs if outlook and run.resolved().cluster.chain == "singleton" else 1)


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _foretell(prepared: Prepared) -> None:
    """What is predicted of a run that nothing has refused."""
    for line in prepared.foretold:
        click.echo(line, err=True)


def _dry_run(prepared: Prepared) -> None:
    from hpc_gpt.launch.submission import check_submission, dry_run

    check_submission([prepared], logs_folder(), dry=True)
    click.echo(prepared.script, nl=False)
    _foretell(prepared)
    if prepared.resolved.cluster.scheduler == "slurm":
        chained = "--job-name=…-RUN --dependency=singleton " if prepared.resolved.cluster.chain == "singleton" else ""
        command = f"sbatch --chdir=. --output=logs/…/slurm-%j.out {chained}--export=ALL job.sh, with HPC_GPT_RUN"
        command += f", {prepared.links} times" if prepared.links > 1 else ""
    else:
        command = f"bash job.sh, for each of {prepared.resolved.gpus} ranks"
    click.echo(f"would run: {command}", err=True)
    click.echo(dry_run(prepared.resolved, prepared.script), err=True)
    click.echo("dry run: nothing was written or submitted", err=True)


def _say(submitted: Submitted, wait: bool) -> None:
    run = submitted.run
    leaked = _ignored_variables() if submitted.scheduler == "slurm" else []
    if leaked:
        click.echo(f"not passed on: {', '.join(leaked)}; use options or the cluster profile", err=True)
    if submitted.scheduler == "slurm":
        click.echo(f"submitted {run.run_id} as job {submitted.job_id}")
        if len(submitted.links) > 1:
            click.echo(f"{len(submitted.links) - 1} more wait for it: {', '.join(submitted.links[1:])}", err=True)
    else:
        click.echo(f"started {run.run_id} as process {submitted.job_id}")
    click.echo(f"run folder {run.path}", err=True)
    if not wait:
        name = submitted.job_id if submitted.scheduler == "slurm" else run.run_id
        click.echo(f"next: hpc-gpt status {name}", err=True)


def _ignored_variables() -> list[str]:
    """SBATCH_* of the user's own shell: outside a job they are meant, so their loss is said."""
    import os

    if "SLURM_JOB_ID" in os.environ:
        return []
    return sorted(name for name in os.environ if name.startswith("SBATCH_"))
