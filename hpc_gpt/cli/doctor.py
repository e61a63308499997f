"""hpc-gpt doctor"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli.request import experiment_argument, small_options, with_request
from hpc_gpt.cli.script_words import ScriptCommand
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.ends import bad_nodes
from hpc_gpt.core.ends.bad_nodes import BadNode, listed
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import counted, plain
from hpc_gpt.core.settings.experiment_file import find_experiment
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.request import Request, choose_profile, with_small

if TYPE_CHECKING:
    from hpc_gpt.launcher.doctor.checks import Check
    from hpc_gpt.launcher.doctor.site import SlowNodeOfRun

_STYLES = {"fail": "red", "warn": "yellow"}


@verb(20, ScriptCommand)
@experiment_argument
@with_request
def doctor(request: Request, probe: bool, forgive: str | None, as_json: bool) -> int:
    """Check what could go wrong at this site before EXPERIMENT is submitted.

    The checks run on the machine where doctor is started, such as a login node: whether Slurm answers and has what the
    profile requests, sbatch's answer to the script, PyTorch's build, GPUs, open files, folders, the clock, the bad
    nodes of the cluster, and nodes that runs found slow; with train.init our logits and transformers'. With neither
    EXPERIMENT nor a size it is demo. submit --dry-run checks the run itself. Exit code 1 if a check fails.

    With job.preflight the job itself probes its nodes before the ranks start (hpc-gpt help keys).

    \b
    hpc-gpt doctor --cluster mine
    hpc-gpt doctor demo --gpus 64 --json
    hpc-gpt doctor --cluster mine --forgive n17
    """
    from hpc_gpt.launcher.doctor.checks import check_all  # needs numpy
    from hpc_gpt.launcher.doctor.site import slow_nodes_of_runs

    if request.names_experiment:
        find_experiment(request.experiment)  # a name that nothing has is a mistake, not a finding
    profile = choose_profile(request, queueing=False)
    if forgive is not None:
        return _forgive(profile.name, forgive)
    if (small := with_small(request, profile)) is not request:
        request = small
        say(f"no EXPERIMENT and no size: checks {' '.join(small_options(request.overrides))}", err=True)
    checks = check_all(request, profile, probe)
    bad = list(listed(profile.name).values())
    slow = slow_nodes_of_runs(logs_folder(), profile.name)
    failed = any(check.level == "fail" for check in checks)
    if as_json:
        answer = {
            "schema": 1,
            "cluster": profile.name,
            "ok": not failed,
            "checks": [vars(check) for check in checks],
            "bad_nodes": [vars(node) for node in bad],
            "slow_nodes": [vars(node) for node in slow],
        }
        click.echo(json.dumps(answer, indent=1))
    else:
        _show(profile.name, checks, bad, slow)
    return 1 if failed else 0


def _forgive(cluster: str, node: str) -> int:
    if not bad_nodes.forgive(cluster, node):
        on_list = ", ".join(listed(cluster)) or "none"
        raise ConfigError(f"{node} is not on the list of bad nodes of {cluster}", f"on the list: {on_list}")
    say(f"{node} is off the list of bad nodes of {cluster}")
    from hpc_gpt.launcher.attempts import siblings

    with contextlib.suppress(SlurmUnreachable):
        if jobs := siblings.forgive(cluster, node):
            say(f"{counted(jobs, 'queued job')} may get it again")
    return 0


def _show(cluster: str, checks: list[Check], bad: list[BadNode], slow: list[SlowNodeOfRun]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        text, hang = f"  {check.name.ljust(width)}  {check.words}", width + 8
        say(text, label=check.level.ljust(4), style=_STYLES.get(check.level, ""), hang=hang)
        if check.hint and check.level != "ok":
            say(f"{' ' * hang}do: {check.hint}", hang=hang + 4)
    say(f"\nbad nodes of {cluster}: {len(bad) or 'none'}")
    for node in bad:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(node.until))
        whose = "every run" if node.everyone else f"run {node.run}"
        times = f", {node.times} times" if node.times > 1 else ""
        say(plain(f"  {node.node}  {node.why}{times}; left out by {whose} until {until}"))
    if slow:
        say(f"\nfound slow or broken by the last runs on {cluster}:")
        for entry in slow:
            say(plain(f"  {entry.node}  {entry.words} (run {entry.run})"))
    failed = sum(check.level == "fail" for check in checks)
    warned = sum(check.level == "warn" for check in checks)
    say(f"\n{len(checks)} checks, {failed} failed, {warned} to look at", err=True)
    say("hpc-gpt submit --dry-run checks the run itself: its Python, data, memory and space", err=True)
