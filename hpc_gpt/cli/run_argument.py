"""RUN of the verbs that only look at one run: the newest one if it is left out; what to submit if there is none."""

import os
import shlex

import click

from hpc_gpt.cli import completers
from hpc_gpt.errors import NoSuchRun, UserError
from hpc_gpt.files import logs_folder
from hpc_gpt.runs.find_runs import list_runs
from hpc_gpt.settings.cluster import user_default
from hpc_gpt.slurm.clients import has_sbatch
from hpc_gpt.terminal import say

run_argument = click.argument("run", required=False, shell_complete=completers.runs)
run_or_logs_argument = click.argument("run", nargs=-1, metavar="[RUN]...", shell_complete=completers.runs_and_logs)


def run_or_newest(name: str | None) -> str:
    """`name`, or the folder of the newest run, which is then named on stderr. Raises NoSuchRun if there is none."""
    if name is not None:
        return name
    runs = list_runs(logs_folder())
    if not runs:
        raise NoSuchRun(f"no run in {logs_folder()}", "name a run, or submit one: hpc-gpt submit demo --cluster local")
    say(f"the newest run, {runs[-1].run_id} of {runs[-1].path.parent.name}:", err=True)
    return str(runs[-1].path)


def first_submit(*settings: str) -> str:
    """The command that submits the demo with some `--set`; on this machine if there is neither a profile nor Slurm."""
    try:
        own = os.environ.get("HPC_GPT_CLUSTER") or user_default()
    except UserError:
        own = None
    command = ["hpc-gpt", "submit", "demo", *([] if own or has_sbatch() else ["--cluster", "local"])]
    return shlex.join([*command, *(word for setting in settings for word in ("--set", setting))])
