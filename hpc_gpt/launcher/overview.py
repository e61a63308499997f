"""The screen of lines by which `submit --dry-run` describes a run and its request."""

import shlex
from collections.abc import Collection
from pathlib import Path

from hpc_gpt.core.files import from_here
from hpc_gpt.core.format import counted
from hpc_gpt.core.runs.work_archive import describe_copy
from hpc_gpt.core.secrets import hide_words
from hpc_gpt.core.settings.cluster import FALLBACK
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import run_rows
from hpc_gpt.core.slurm.directives import options_of, script_directives
from hpc_gpt.core.slurm.requeue import requeue_of
from hpc_gpt.core.slurm.sbatch_words import read_call, read_options, split_directive
from hpc_gpt.launcher.notes import checkpoint_lines, data_lines
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.services import python_lines, service_lines


def overview(prepared: PreparedRun, logs: Path) -> list[tuple[str, str]]:
    """The (label, text) rows on a prepared run, for its user to read before the submission."""
    run = prepared.resolved
    rows = [("run", f"{run.name}, in {from_here(logs / run.slug)}/<run id>"), *summary_rows(run)]
    if run.cluster.scheduler == "slurm" and prepared.job_script is None:
        rows += [line.under("python") for line in python_lines(run.cluster)]
    rows += [("copy", line) for line in describe_copy(run, prepared.copies.work(run))]
    rows += [line.under("data") for line in data_lines(run, prepared.data_beside)]
    rows += [line.under("checkpoints") for line in checkpoint_lines(run, logs)]
    rows += [(line.label, line.text) for line in service_lines(run)]
    if (predicted := prepared.prediction) is not None:
        rows.append(("predicted", predicted.line.text if predicted.is_known else f"nothing: {predicted.line.text}"))
    if prepared.forecast is not None:
        rows += [("forecast", text) for text in prepared.forecast.texts]
    budget = run.job.max_gpu_hours
    rows += [("budget", "none" if budget is None else f"{budget:g} GPU-hours")]
    command = _command(prepared)
    # The script around a user's own has the options of the command line, too; its output alone goes elsewhere.
    elsewhere = set(read_call(shlex.split(command)[1:], options_of("sbatch"))[0])
    requested = _requested_by(prepared.script, elsewhere if prepared.job_script is None else {"output", "error"})
    rows += [("asks Slurm", shlex.join(hide_words(requested)))] if requested else []
    rows += [("output", text) for text in _outputs(run, array=bool(prepared.job_script and prepared.job_script.array))]
    return [*rows, ("would run", command)]


def _command(prepared: PreparedRun) -> str:
    """The command that would submit it, as text."""
    run, script = prepared.resolved, prepared.job_script
    if run.cluster.scheduler != "slurm":
        return f"bash job.sh, for each of {counted(run.tasks, 'rank')}"
    output = "--output=logs/…/slurm-%j.out"
    if script is not None:
        files = output if not script.array else "--output=logs/…/%a/slurm-%A_%a.out"
        files_of_run = ("output", "error", "open-mode")
        options = [option for option in read_options(script.options) if option.name not in files_of_run]
        line = shlex.join(["sbatch", *hide_words(word for option in options for word in option.argv)])
        return f"{line} {files} {files.replace('output', 'error')} job.sh RUN"
    chained = requeue_of(run.cluster).shown
    command = f"sbatch --chdir=. {output} {chained}--export=ALL job.sh, with HPC_GPT_RUN"
    return command + (f", {prepared.jobs} times" if prepared.jobs > 1 else "")


def _requested_by(script: str, elsewhere: Collection[str]) -> list[str]:
    """The directives of a script that count: the last one per option, without the options that are `elsewhere`."""
    directives = [word for line in script_directives(script) for word in split_directive(line)]
    options = {option.name: option for option in read_options(directives)}
    return [word for name, option in options.items() if name not in elsewhere for word in option.argv]


def _outputs(run: Resolved, array: bool) -> list[str]:
    """The files that get the output of a run: its log, and the files that a job script names, by sbatch's patterns."""
    log, script = "attempts/<n>/log in the run's folder", run.script
    default = None if run.cluster.scheduler == "local" else "slurm-%A_%a.out" if array else "slurm-%j.out"
    log += f"; before its first line, {default} there" if default is not None else ""
    if script is None:
        return [log]
    folder, output = Path(run.program.workdir), script.output or default
    files = [f"{folder / output}, and {log}" if output is not None else log]
    if script.error is not None and script.error != output:
        files.append(f"errors in {folder / script.error}, and attempts/<n>/err")
    return files


def summary_rows(run: Resolved) -> list[tuple[str, str]]:
    """The rows on a run's model, layout, batch and engine, or on the command that it starts."""
    gpus = "no GPU requested," if run.asked_gpus is None else counted(run.asked_gpus, "GPU")
    # A script takes nothing from the profile that applies if none is chosen.
    of_profile = "" if run.script is not None and run.cluster.name == FALLBACK else f" of {run.cluster.name}"
    where = f"{gpus} on {counted(run.nodes, 'node')}{of_profile}"
    return list(run_rows(run, where))
