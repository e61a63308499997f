"""hpc-gpt submit: its options and help, which load in 0.15 s. `submitting`, `sweeping` and `racing` do the work."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hpc_gpt.cli.request import experiment_argument, with_request
from hpc_gpt.cli.script_words import ScriptCommand
from hpc_gpt.cli.verb import verb

if TYPE_CHECKING:
    from hpc_gpt.launcher.request import Request


@verb(50, ScriptCommand)
@experiment_argument
@with_request
def submit(
    request: Request, dry_run: bool, script: bool, yes: bool, wait: bool, now: bool, grid: tuple[str, ...],
    max_rows: int, max_parallel: int | None, skip_unfit: bool, race: bool, rounds: int | None, steps: int | None,
    top: int | None, as_json: bool, until: tuple[str, ...], resume: str | None, branch: str | None,
    from_start: bool,
) -> None:  # fmt: skip
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
    from hpc_gpt.cli.submit_answer import SubmitOptions, answered
    from hpc_gpt.launcher.until import parse_until

    if grid:
        from hpc_gpt.cli.sweeping import with_axes

        request = with_axes(request, grid, max_rows)
    options = SubmitOptions(dry_run, wait, now, script)
    with answered(as_json, dry_run) as parts:
        request = replace(request, until=parse_until(until))
        if race:
            from hpc_gpt.cli.racing import submit_race

            answer = submit_race(request, {"--rounds": rounds, "--steps": steps, "--top": top}, options)
        elif request.sweep or grid:
            from hpc_gpt.cli.sweeping import submit_sweep

            answer = submit_sweep(request, max_parallel, skip_unfit, options)
        else:
            from hpc_gpt.cli.submitting import submit_one

            answer = submit_one(request, resume, branch, from_start, yes, options)
        for part in answer:
            parts.append(part)  # one by one: the parts before a fault are printed, too
