"""hpc-gpt submit"""

from __future__ import annotations

from typing import Any

import click

from hpc_gpt.cli import complete
from hpc_gpt.cli.experiment_options import Request, experiment_options, logs_folder


@click.command()
@experiment_options
@click.option("--dry-run", is_flag=True, help="Print script and command, ask sbatch --test-only; write nothing.")
@click.option("--wait", is_flag=True, help="Follow the job to its end; exit 3 if it failed. Ctrl-C stops the job.")
@click.option("--max-parallel", type=click.IntRange(min=1), metavar="N",
              help="For --sweep: so many of an array at a time.")  # fmt: skip
@click.option("--resume", metavar="RUN", shell_complete=complete.runs,
              help="Go on from RUN's checkpoint: in its own folder, or with other options as a new run.")  # fmt: skip
def submit(request: Request, dry_run: bool, wait: bool, max_parallel: int | None, resume: str | None) -> None:
    """Submit EXPERIMENT to Slurm, or start it here.

    --cluster local starts it on this machine, a process for each rank. EXPERIMENT is a TOML file, or a file or folder
    under experiments/ by name; by default seed 001's own 64-GPU run.

    \b
    hpc-gpt submit --gpus 64 --pp 16
    hpc-gpt submit experiments/demo.toml --cluster local --wait
    hpc-gpt submit demo --set train.steps=20 --tp 1
    hpc-gpt submit memory-ladder --sweep
    hpc-gpt submit gpt2-meg-ds-zero --row full-48b --smoke
    hpc-gpt submit --resume 20261120-1042 --tp 2 --pp 4
    """
    if resume is None and (request.sweep or max_parallel is not None):
        from hpc_gpt.cli.sweep import submit_sweep

        submit_sweep(request, dry_run, wait, max_parallel)
        return
    if wait:
        # Loaded before there is a job: from then on a Ctrl-C is meant for the job.
        from hpc_gpt.waiting import wait_for
    if resume is not None:
        submitted = _resume(resume, request, dry_run)
        if submitted is None:
            return
    else:
        from hpc_gpt.cli.preparation import prepare

        prepared = prepare(request, queueing=not dry_run)
        for note in prepared.notes:
            click.echo(note, err=True)
        if dry_run:
            _dry_run(prepared)
            return
        from hpc_gpt.submission import submit_run

        submitted = submit_run(prepared.resolved, prepared.script, prepared.text, logs_folder(), prepared.foresight)
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


def _resume(name: str, request: Request, dry_run: bool) -> Any:
    """The same run once more, or a new one that goes on from it where the command line changes anything; None for a
    dry run."""
    from hpc_gpt.errors import ConfigError
    from hpc_gpt.runs import find_run

    ctx = click.get_current_context()
    given = [
        parameter
        for parameter in ctx.command.params
        if parameter.name not in ("resume", "wait", "dry_run", "force")
        and ctx.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE
    ]
    others = [
        one.human_readable_name if one.name == "experiment" else one.opts[0]
        for one in given
        if one.name in ("experiment", "row", "sweep", "smoke", "max_parallel")
    ]
    if others:
        raise ConfigError(
            f"--resume goes on with a run's own experiment; {', '.join(others)} would be another",
            "leave them out, or submit a new run",
        )
    run = find_run(name, logs_folder())
    if not given:
        from hpc_gpt.submission import resume_run

        if dry_run:
            raise ConfigError(
                "--resume without other options starts the run's own job.sh as it is", f"see {run.job_script}"
            )
        return resume_run(run)
    from hpc_gpt.cluster import load_profile
    from hpc_gpt.resumption import prepare_resumption, resume_elsewhere

    # What HPC_GPT_* variables say was the run's to heed when it was submitted.
    profile = load_profile(request.cluster) if request.cluster and _is_given("cluster") else None
    prepared, parent = prepare_resumption(run, request.given, profile, request.template, request.force)
    if dry_run:
        _dry_run(prepared)
        return None
    click.echo(f"goes on from {parent.run} after step {parent.step}, as {prepared.resolved.layout}", err=True)
    submitted = resume_elsewhere(prepared, parent, logs_folder())
    _foretell(prepared)
    return submitted


def _is_given(name: str) -> bool:
    source = click.get_current_context().get_parameter_source(name)
    return source is click.core.ParameterSource.COMMANDLINE


def _foretell(prepared: Any) -> None:
    """What is predicted of a run that nothing has refused."""
    if prepared.foresight is not None:
        click.echo(prepared.foresight.line, err=True)


def _dry_run(prepared: Any) -> None:
    from hpc_gpt.submission import dry_run

    click.echo(prepared.script, nl=False)
    _foretell(prepared)
    if prepared.resolved.cluster.scheduler == "slurm":
        command = "sbatch --chdir=. --output=logs/…/slurm-%j.out --export=ALL job.sh, with HPC_GPT_RUN"
    else:
        command = f"bash job.sh, for each of {prepared.resolved.gpus} ranks"
    click.echo(f"would run: {command}", err=True)
    click.echo(dry_run(prepared.resolved, prepared.script), err=True)
    click.echo("dry run: nothing was written or submitted", err=True)


def _say(submitted: Any, wait: bool) -> None:
    run = submitted.run
    leaked = _ignored_variables() if submitted.scheduler == "slurm" else []
    if leaked:
        click.echo(f"not passed on: {', '.join(leaked)}; use options or the cluster profile", err=True)
    if submitted.scheduler == "slurm":
        click.echo(f"submitted {run.run_id} as job {submitted.job_id}")
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
