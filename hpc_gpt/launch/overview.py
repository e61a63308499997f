"""What a run will be and ask for, in a screen of lines: the answer of `submit --dry-run`."""

from __future__ import annotations

import shlex
from pathlib import Path

from hpc_gpt.formulas import GIB
from hpc_gpt.launch.prepared import PreparedRun
from hpc_gpt.program.work_folder import describe_copy
from hpc_gpt.runs.disk_space import checkpoint_bytes, free_gib, space_needed_gib
from hpc_gpt.secrets import hide_secrets
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.slurm.directives import script_directives
from hpc_gpt.slurm.requeue import way_of
from hpc_gpt.tokens.run_data import describe_data, located
from hpc_gpt.words import counted, show_bytes


def overview(prepared: PreparedRun, logs: Path, here: bool = False) -> list[tuple[str, str]]:
    """(subject, what of it) of a run that is prepared, for its user to read before it is submitted. `here`: it would
    run in the user's allocation."""
    run = prepared.resolved
    rows = [("run", f"{run.name}, in {logs / run.slug}/<run id>"), *of_run(run)]
    rows += [("copy", line) for line in describe_copy(run)]
    rows += [("data", line.removeprefix("data: ")) for line in _on_data(prepared)]
    rows += [("checkpoints", text) for text in saves(run, logs)]
    if prepared.prediction is not None:
        line = prepared.prediction.line.removeprefix("predicted: ")
        rows.append(("predicted", line.replace("not predicted: ", "nothing: ", 1)))
    if prepared.forecast is not None:
        rows += [("forecast", line.removeprefix("forecast: ")) for line in prepared.forecast.lines]
    budget = run.job.max_gpu_hours
    rows += [("budget", "none" if budget is None else f"{budget:g} GPU-hours")]
    directives = script_directives(prepared.script)
    rows += [("asks Slurm", " ".join(directives))] if directives and not here else []
    return [*rows, ("would run", _command(prepared, here))]


def _command(prepared: PreparedRun, here: bool) -> str:
    """What would submit it, as text."""
    run = prepared.resolved
    if here:
        return "bash job.sh, with HPC_GPT_RUN, in this allocation"
    if run.cluster.scheduler != "slurm":
        return f"bash job.sh, for each of {counted(run.tasks, 'rank')}"
    if prepared.job_script is not None:
        return f"{shlex.join(['sbatch', *map(hide_secrets, prepared.job_script.words)])} … job.sh RUN"
    chained = way_of(run.cluster).shown
    command = f"sbatch --chdir=. --output=logs/…/slurm-%j.out {chained}--export=ALL job.sh, with HPC_GPT_RUN"
    return command + (f", {prepared.jobs} times" if prepared.jobs > 1 else "")


def data_lines(prepared: PreparedRun) -> list[str]:
    """What a run takes along and reads, as lines after its submission."""
    return [*(f"copy: {line}" for line in describe_copy(prepared.resolved)), *_on_data(prepared)]


def _on_data(prepared: PreparedRun) -> tuple[str, ...]:
    return describe_data(located(prepared.resolved, prepared.data_beside))


def prediction_lines(prepared: PreparedRun, logs: Path) -> list[str]:
    """The lines on its data, its checkpoints and what is predicted of it."""
    on_saves = saves(prepared.resolved, logs)
    saved = [text if text.startswith("warning: ") else f"checkpoints: {text}" for text in on_saves]
    return [*data_lines(prepared), *saved, *prepared.predictions]


def of_run(run: Resolved) -> list[tuple[str, str]]:
    """Model, layout, batch and engine of a run, or the command that it starts."""
    where = f"{counted(run.gpus, 'GPU')} on {counted(run.nodes, 'node')} of {run.cluster.name}"
    return list(run.form.rows(where))


def saves(run: Resolved, logs: Path) -> list[str]:
    """When a run saves, what it keeps, and the room for that; empty if another program saves."""
    train = run.train
    if not run.form.saves_by_train:
        return []
    when = [f"every {train.save_minutes:g} min"] if train.save_minutes else []
    when += [f"every {counted(train.save_every, 'step')}"] if train.save_every else []
    when += [f"after step {', '.join(map(str, sorted(set(train.save_at))))}"] if train.save_at else []
    when += ["at the end"] if train.save_last else []
    if not when:
        return ["none: train.save_last is false"]
    kept = f", the newest {train.keep_last} kept" if train.keep_last else ""
    one, (_, every) = checkpoint_bytes(run), space_needed_gib(run)
    room = f"about {show_bytes(one)} each, {show_bytes(every * GIB)} in all"
    free = free_gib(logs)
    lines = [f"{' and '.join(when)}{kept}: {room}" + (f", {show_bytes(free * GIB)} free" if free is not None else "")]
    if train.save_minutes and free is not None and free * GIB < 2 * one:
        lines.append("two do not fit in the free space: those by train.save_minutes are left out until they do")
    if free is not None and free < every:
        fit = int(free * GIB // one) if one else 0
        means = "the next one does not fit" if not fit else f"{counted(fit, 'checkpoint')} fit"
        way = "train.keep_last = 3 keeps the newest three" if not train.keep_last else "save less often"
        lines.append(
            f"warning: all checkpoints take more than is free: {means}; {way}, HPC_GPT_LOGS names another disk"
        )
    return lines
