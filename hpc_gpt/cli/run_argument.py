"""The argument RUN of verbs that show one run: the newest run that it means, or the newest of all; and the command that
submits a first run."""

import contextlib
import os
import re
import shlex
from pathlib import Path

import click

from hpc_gpt.cli import completers
from hpc_gpt.core.errors import NoSuchRun, SlurmUnreachable, UserError
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import plain
from hpc_gpt.core.runs.find_runs import Named, find_named, list_runs, no_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.cluster import user_default
from hpc_gpt.core.slurm.clients import ask, patience_s
from hpc_gpt.core.slurm.environment import has_sbatch
from hpc_gpt.core.terminal import say

run_argument = click.argument("run", required=False, shell_complete=completers.runs)
run_or_logs_argument = click.argument("run", nargs=-1, metavar="[RUN]...", shell_complete=completers.runs_and_logs)


def chosen_run(name: str | None) -> RunFolder:
    """The run that `name` means. If it means several, or there is no name, the newest, whose id is then printed to
    stderr. Raises NoSuchRun."""
    logs = logs_folder()
    named = Named(list_runs(logs)) if name is None else find_named(located(name), logs)
    if not named.runs:
        hint = "name a run, or submit one: hpc-gpt submit demo --cluster local"
        raise NoSuchRun(no_runs(logs) if name is None else f"no runs under {name}", hint)
    run, count = named.runs[-1], len(named.runs)
    which_run = "the newest run" if name is None else f"the newest of the {count} runs of {named.what}"
    if name is None or count > 1:
        say(plain(f"{which_run}, {run.run_id} of {run.path.parent.name}:"), err=True)
    return run


def located(name: str) -> str:
    """The folder of the run whose job has this id, if no run here has it and Slurm knows the job; else the name."""
    if not re.fullmatch(r"\d+(_\d+)?", name):
        return name
    try:
        find_named(name, logs_folder())
    except NoSuchRun:
        with contextlib.suppress(SlurmUnreachable):
            shown = ask(["scontrol", "--oneliner", "show", "job", name], timeout_s=patience_s()).stdout
            script = re.search(r" Command=(\S+/job\.sh)(?: |$)", shown)
            if script is not None and (Path(script[1]).parent / "resolved.json").is_file():
                return str(Path(script[1]).parent)
    return name


def first_submit(*settings: str) -> str:
    """The command that submits the demo with some `--set`; on this machine if there is neither a profile nor Slurm."""
    try:
        profile = os.environ.get("HPC_GPT_CLUSTER") or user_default()
    except UserError:
        profile = None
    command = ["hpc-gpt", "submit", "demo", *([] if profile or has_sbatch() else ["--cluster", "local"])]
    return shlex.join([*command, *(word for setting in settings for word in ("--set", setting))])
