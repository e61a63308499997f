"""hpc-gpt submit: its options and help, which load in 0.15 s. `submitting`, `sweeping` and `racing` do the work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.experiment_options import CountType, experiment_options
from hpc_gpt.cli.script_words import ScriptCommand
from hpc_gpt.core.errors import ConfigError

if TYPE_CHECKING:
    from hpc_gpt.launcher.request import Request

PLACE = 50


@click.command(cls=ScriptCommand)
@experiment_options
@click.option("--dry-run", is_flag=True,
              help="Print the request and the prediction, ask sbatch --test-only, write nothing. Refuses what submit "
              "refuses, unless only Slurm cannot be reached.")  # fmt: skip
@click.option("--script", is_flag=True, help="With --dry-run: print the job script.")
@click.option("--yes", "-y", is_flag=True, envvar="HPC_GPT_YES",
              help="Queue the default experiment without asking.")  # fmt: skip
@click.option("--wait", is_flag=True,
              help="Follow the job to its end; exit 3 if it fails. Ctrl-C stops the job.")  # fmt: skip
@click.option("--now", is_flag=True,
              help="On this machine without Slurm: do not wait for GPUs that other runs use.")  # fmt: skip
@click.option("--grid", multiple=True, metavar="KEY=VALUE,VALUE", shell_complete=completers.keys_and_values,
              help="One run per value; with several --grid one per combination. In a file with [rows] it varies the "
              "row of --row.")  # fmt: skip
@click.option("--max-rows", type=CountType(least=1), default=100, show_default=True, metavar="N",
              help="With --grid: maximum number of rows.")  # fmt: skip
@click.option("--max-parallel", type=CountType(least=1), metavar="N",
              help="With --sweep or --grid: of the rows with equal requests, run at most N at a time.")  # fmt: skip
@click.option("--skip-unfit", is_flag=True,
              help="With --sweep or --grid: leave out rows that are refused, and print them.")  # fmt: skip
@click.option("--race", is_flag=True,
              help="Measure EXPERIMENT's rows, or the planner's best layouts, in turns in one job.")  # fmt: skip
@click.option("--rounds", type=CountType(), metavar="N",
              help="With --race: number of rounds, with one visit per row; 3 unless given.")  # fmt: skip
@click.option("--steps", type=CountType(), metavar="N",
              help="With --race: steps per visit, after its warm-up; 20 unless given.")  # fmt: skip
@click.option("--top", type=CountType(), metavar="N",
              help="With --race, without [rows]: number of the planner's layouts; 5 unless given.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True,
              help="One JSON object on stdout: the submitted runs; all else as lines of JSON on stderr.")  # fmt: skip
@click.option("--until", "until", multiple=True, metavar="WHAT", shell_complete=completers.until,
              help="Train until tokens=30e9, steps=N or loss=X. Prints a forecast: jobs, GPU-hours, date.")  # fmt: skip
@click.option("--resume", metavar="RUN", shell_complete=completers.runs,
              help="Resume from RUN's checkpoint: the same run, or with other options a new run.")  # fmt: skip
@click.option("--branch", metavar="RUN[@STEP]", shell_complete=completers.runs,
              help="A new run from RUN's checkpoint of that step, or its newest; it may have another learning rate, "
              "schedule, weight decay and [data]. RUN may be training.")  # fmt: skip
@click.option("--from-start", is_flag=True,
              help="With --resume: train RUN's experiment again from step 0, as a new run.")  # fmt: skip
def submit(
    request: Request,
    dry_run: bool,
    script: bool,
    yes: bool,
    wait: bool,
    now: bool,
    grid: tuple[str, ...],
    max_rows: int,
    max_parallel: int | None,
    skip_unfit: bool,
    race: bool,
    rounds: int | None,
    steps: int | None,
    top: int | None,
    as_json: bool,
    until: tuple[str, ...],
    resume: str | None,
    branch: str | None,
    from_start: bool,
) -> None:
    """Submit EXPERIMENT or a job script to Slurm, or start it here.

    A file that begins with #! is a job script: it runs as it is under the job chain. Options of sbatch and of submit
    come before it, its arguments after it; after -- all words are its arguments.

    --cluster local starts it on this machine, with one process per rank. EXPERIMENT is a TOML file, or the name of a
    file or folder under experiments/. Without EXPERIMENT it is the 52B model of Megatron-DeepSpeed's perf tables on 64
    GPUs, which is queued if an option gives its size, if you agree at the terminal, or with --yes; with --model every
    key has its default (hpc-gpt help keys).

    If the time limit ends a run, its job chain continues it, as `chain` in the profile says: Slurm requeues the job
    (requeue), or further jobs wait for it (singleton). --until prints the time and GPU-hours of the job chain, from
    earlier runs with the same settings under logs/, else as predicted. --max-gpu-hours saves and ends the run before it
    uses more.

    \b
    hpc-gpt submit demo --cluster local --wait
    hpc-gpt submit --gpus 64 --pp 16
    hpc-gpt submit demo --set train.steps=20 --tp 1
    hpc-gpt submit --time 2:00:00 train.slurm --lr 3e-4
    hpc-gpt submit memory-ladder --sweep --skip-unfit
    hpc-gpt submit demo --grid train.lr=1e-4,3e-4 --grid layout.tp=1,2 --dry-run
    hpc-gpt submit gpt2-meg-ds-zero --row full-48b --smoke
    hpc-gpt submit demo --until tokens=30e9 --time 20:00:00 --max-gpu-hours 500 --dry-run
    hpc-gpt submit --resume 20261120-1042 --tp 2 --pp 4 --until steps=50000
    hpc-gpt submit --branch 20261120-1042@40000 --until steps=44000
    """
    from hpc_gpt.cli.submit_answer import AnsweredRun, LeftOut, SubmitOptions, answer_tables
    from hpc_gpt.cli.submitting import submit_one
    from hpc_gpt.cli.sweeping import submit_sweep, with_axes
    from hpc_gpt.core.output import progress_as_json
    from hpc_gpt.launcher.until import parse_until

    if as_json and script:
        raise ConfigError("--script prints the script, and --json one object", "give one of the two")
    if grid:
        request = with_axes(request, grid, max_rows)
    sizes = {"--rounds": rounds, "--steps": steps, "--top": top}
    how, parts = SubmitOptions(dry_run, wait, now, script), list[AnsweredRun | LeftOut]()
    try:
        with progress_as_json(as_json):
            request = replace(request, until=parse_until(until))
            if race or any(size is not None for size in sizes.values()):
                from hpc_gpt.cli.racing import submit_race

                others = {"--until": until, "--resume": resume, "--branch": branch, "--now": now,
                          "--max-parallel": max_parallel, "--skip-unfit": skip_unfit}  # fmt: skip
                answer = submit_race(request, race, sizes, [name for name, value in others.items() if value], how)
            elif resume is branch is None and (request.sweep or grid or max_parallel is not None or skip_unfit):
                answer = submit_sweep(request, max_parallel, skip_unfit, how)
            else:
                answer = submit_one(request, resume, branch, from_start, yes, how)
            for part in answer:
                parts.append(part)  # one by one: the parts before a fault are printed, too
    finally:
        if as_json and any(isinstance(part, AnsweredRun) for part in parts):
            click.echo(json.dumps(answer_tables(parts, dry_run), indent=1))
