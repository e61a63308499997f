"""hpc-gpt doctor"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli.experiment_options import experiment_options
from hpc_gpt.doctor import checks
from hpc_gpt.doctor.checks import Check, check_profile, guarded, probe_here, slow_nodes_of_runs
from hpc_gpt.doctor.site import read_site
from hpc_gpt.errors import ConfigError, NoSuchRun, UserError
from hpc_gpt.launch.prepare import Request, choose_profile, prepare
from hpc_gpt.launch.slurm import ask, check_reachable
from hpc_gpt.paths import data_dir, logs_folder, state_dir
from hpc_gpt.runs.bad_nodes import forgive, listed
from hpc_gpt.runs.provenance import list_gpus
from hpc_gpt.runs.run_folder import RunFolder, find_run
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.experiment_file import find_experiment
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.words import plain


@click.command()
@experiment_options
@click.option("--probe", is_flag=True, help="Also start the ranks of a local profile for seconds, and measure them; "
              "where there is a GPU they always are.")  # fmt: skip
@click.option("--forgive", metavar="NODE", help="Take NODE off the cluster's list of bad nodes; nothing else.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def doctor(request: Request, probe: bool, forgive: str | None, as_json: bool) -> int:
    """Look for what would go wrong before EXPERIMENT is submitted.

    On a login node or here: whether Slurm answers and has what the profile asks for, what sbatch says of the script,
    versions, GPUs, the data, folders, room for the checkpoints to come, the clock, the cluster's bad nodes, and nodes
    that runs have found slow. EXPERIMENT may be a RUN. Exit code 1 if a check fails.

    With job.preflight the job itself probes its nodes before the ranks start (hpc-gpt help keys).

    \b
    hpc-gpt doctor --cluster mine
    hpc-gpt doctor demo --gpus 64 --json
    hpc-gpt doctor --cluster mine --forgive n17
    """
    run = _run_named(request)
    profile = run.resolved().cluster if run is not None else choose_profile(request, queueing=False)
    if forgive is not None:
        return _forgive(profile.name, forgive)
    checks = _checks(request, run, profile, probe)
    bad = list(listed(profile.name).values())
    slow = slow_nodes_of_runs(logs_folder(), profile.name)
    failed = any(check.level == "fail" for check in checks)
    if as_json:
        found = {
            "schema": 1,
            "cluster": profile.name,
            "ok": not failed,
            "checks": [vars(check) for check in checks],
            "bad_nodes": [vars(node) for node in bad],
            "slow_nodes": [vars(node) for node in slow],
        }
        click.echo(json.dumps(found, indent=1))
    else:
        _show(profile.name, checks, bad, slow)
    return 1 if failed else 0


def _run_named(request: Request) -> RunFolder | None:
    """The run that stands in EXPERIMENT's place; None for an experiment, which goes first."""
    if not request.names_experiment:
        return None
    if (Path(request.experiment) / "resolved.json").is_file():  # it holds an experiment.toml as well
        return find_run(request.experiment, logs_folder())
    try:
        find_experiment(request.experiment)
    except ConfigError as fault:
        try:
            return find_run(request.experiment, logs_folder())
        except NoSuchRun:
            raise fault from None
    return None


def _forgive(cluster: str, node: str) -> int:
    if not forgive(cluster, node):
        known = ", ".join(listed(cluster)) or "none"
        raise ConfigError(f"{node} is not on the list of bad nodes of {cluster}", f"on it: {known}")
    click.echo(f"{node} is off the list of bad nodes of {cluster}")
    return 0


def _checks(request: Request, run: RunFolder | None, profile: ClusterProfile, probe: bool) -> list[Check]:
    logs = run.path if run is not None else logs_folder()
    found = []
    resolved, script, beside = None, "", None
    try:
        resolved, script, beside = _prepared(request, run)
    except Exception as fault:
        if not isinstance(fault, UserError):
            raise
        found.append(checks.Check("experiment", "fail", " ".join(str(fault).split()), fault.hint))
    else:
        nodes = f"{resolved.nodes} node{'s' * (resolved.nodes != 1)}"
        words = f"{resolved.name}: {resolved.layout} on {nodes} of {profile.name}"
        found.append(checks.Check("experiment", "ok", words))
    found += _scheduler_checks(resolved, script, profile)
    found += checks.check_versions()
    if resolved is not None:
        found += checks.check_gpus(resolved)
        found += checks.guarded("inputs", lambda: checks.check_needs(resolved, beside))
    folders = {"logs": logs, "data": data_dir(), "state": state_dir()}
    found += checks.check_folders(folders, shared=profile.scheduler == "slurm")
    if resolved is not None:
        found += checks.guarded("space", lambda: checks.check_space(resolved, logs, run))
    found += checks.guarded("clock", lambda: checks.check_clock(logs))
    if resolved is not None and profile.scheduler == "local" and (probe or list_gpus()):
        found += checks.guarded("probe", lambda: probe_here(resolved, logs, sys.stderr))
    elif probe:
        words = (
            "the nodes of a cluster are probed in a job: --set job.preflight=true, or preflight = true in the profile"
        )
        found.append(checks.Check("probe", "warn", "not made here", words))
    return found


def _prepared(request: Request, run: RunFolder | None) -> tuple[Resolved, str, Path | None]:
    """(settings, script, the folder where a relative data.path is looked for first)."""
    if run is not None:
        return run.resolved(), run.job_script.read_text(encoding="utf-8"), run.data_beside

    prepared = prepare(request)
    return prepared.resolved, prepared.script, prepared.data_beside


def _scheduler_checks(resolved: Resolved | None, script: str, profile: ClusterProfile) -> list[Check]:
    """Slurm: whether it answers, has what is asked for, and would take the script."""
    if profile.scheduler != "slurm":
        return [Check("slurm", "ok", f"profile {profile.name} is this machine, which needs none")]

    def reach() -> list[Check]:
        check_reachable()
        return [Check("slurm", "ok", f"slurmctld answers, {ask(['sbatch', '--version']).stdout.strip()}")]

    found = guarded("slurm", reach)
    if found[0].level == "fail" or resolved is None:
        return found
    found += guarded("profile", lambda: check_profile(resolved, read_site()))

    def put_before_slurm() -> list[Check]:
        from hpc_gpt.launch.submission import dry_run

        return [Check("sbatch", "ok", " ".join(dry_run(resolved, script).split()))]

    return found + guarded("sbatch", put_before_slurm)


def _show(cluster: str, checks: list[Check], bad: list[Any], slow: list[Any]) -> None:
    width = max(len(check.name) for check in checks)
    for check in checks:
        click.echo(f"{check.level.ljust(4)}  {check.name.ljust(width)}  {check.words}")
        if check.hint and check.level != "ok":
            click.echo(f"      {' ' * width}  do: {check.hint}")
    click.echo(f"\nbad nodes of {cluster}: {len(bad) or 'none'}")
    for node in bad:
        until = time.strftime("%Y-%m-%d %H:%M", time.localtime(node.until))
        whose = "every run" if node.everyone else f"run {node.run}"
        times = f", {node.times} times" if node.times > 1 else ""
        click.echo(plain(f"  {node.node}  {node.why}{times}; left out by {whose} until {until}"))
    if slow:
        click.echo(f"\nfound slow or broken by the last runs on {cluster}:")
        for node in slow:
            click.echo(plain(f"  {node.node}  {node.words} (run {node.run})"))
    failed = sum(check.level == "fail" for check in checks)
    warned = sum(check.level == "warn" for check in checks)
    click.echo(f"\n{len(checks)} checks, {failed} failed, {warned} to look at", err=True)


# It looks at one row of a sweep.
doctor.params = [parameter for parameter in doctor.params if parameter.name != "sweep"]
