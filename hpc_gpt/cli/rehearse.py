"""hpc-gpt rehearse"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpc_gpt.cli.experiment_options import experiment_options, small_options
from hpc_gpt.cli.script_words import ScriptCommand
from hpc_gpt.core.errors import ConfigError, JobFailed, OsErrorAs
from hpc_gpt.core.output import progress_as_json
from hpc_gpt.core.runs.provenance import known_gpus
from hpc_gpt.core.settings.smoke import sizes_beside
from hpc_gpt.core.terminal import say
from hpc_gpt.launcher.launch.forecast import Forecast
from hpc_gpt.launcher.launch.prepare import prepare
from hpc_gpt.launcher.launch.prepared import PreparedRun
from hpc_gpt.launcher.launch.render import render_script
from hpc_gpt.launcher.launch.request import Request, choose_profile, with_small

if TYPE_CHECKING:
    from hpc_gpt.launcher.rehearsal.small_run import RehearsalOutcome, SmallRun
    from hpc_gpt.launcher.rehearsal.stages import Stage

PLACE = 40

# A rehearsal is of one run, and always small.
_NOT_HERE = ("smoke", "sweep")


@click.command(cls=ScriptCommand)
@experiment_options
@click.option("--quick", is_flag=True, help="One interruption, by the time limit; no preemption.")
@click.option("--keep", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
              help="Keep the rehearsed runs there, in a new or empty folder.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="One JSON object: schema, ok, cause, stages, not_rehearsed, …")
def rehearse(request: Request, quick: bool, keep: Path | None, as_json: bool) -> None:
    """Run the whole life of EXPERIMENT's job on this machine, before it waits in a queue.

    The job script that submit would send runs here, at --smoke size, with stand-ins for Slurm's commands. It is
    submitted, saves, gets USR2 before its time limit, saves and is requeued, resumes, is preempted once, resumes again
    and finishes, with the same losses as an uninterrupted run. Waiting times are skipped. What cannot be shown here is
    listed. Nothing is left running, and nothing of yours is written except to --keep. Takes a minute or two. With
    neither EXPERIMENT nor a size it is demo. A job script runs as it is, in its folder, and is stopped after its second
    start; of an array so does each element.

    \b
    hpc-gpt rehearse demo
    hpc-gpt rehearse gpt2-meg-ds-3d --gpus 64 --pp 16 --cluster jean-zay-v100-32g
    hpc-gpt rehearse memory-ladder --row batch64 --quick --json
    hpc-gpt rehearse --checkpoints 'out/step-*' train.slurm

    Exit 0 if every stage holds, 3 with the first cause if one fails, 130 on Ctrl-C, which ends everything.
    """
    from hpc_gpt.launcher.rehearsal.small_run import (  # needs numpy
        CHAIN_JOBS,
        make_small,
        script_as_it_is,
        with_slurm_profile,
    )
    from hpc_gpt.launcher.rehearsal.small_run import rehearse as live

    out = click.get_current_context().with_resource(progress_as_json(as_json))
    if keep is not None:
        with OsErrorAs(ConfigError, f"--keep {keep}", "name a folder that you can write"):
            keep.mkdir(parents=True, exist_ok=True)
            if any(keep.iterdir()):
                raise ConfigError(f"--keep {keep}: that folder is not empty", "name a new one")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    began = time.monotonic()
    request, note = with_slurm_profile(request)
    if note:
        say(note, err=True)
    request = with_small(request, choose_profile(request, queueing=False))
    real = prepare(request)
    if real.job_script is not None:
        small, prepared = script_as_it_is(real, len(known_gpus())), real
    else:
        small = make_small(real.resolved, len(known_gpus()))
        script = render_script(small.resolved, request.template)
        prepared = PreparedRun(small.resolved, script, real.text, forecast=Forecast((), jobs=CHAIN_JOBS))
    say(f"rehearsing {real.resolved.name} with profile {real.resolved.cluster.name}", err=True)
    shown = sizes_beside(real.resolved, small.resolved) if real.job_script is None else ()
    for line in (*shown, *small.notes):
        say(f"  {line}", err=True)
    for line in real.notes:
        say(line, err=True)

    at_terminal = sys.stderr.isatty()

    def wait(what: str) -> None:
        if at_terminal:
            click.echo(f"\r\x1b[K{'':10}waiting for {what}", nl=False, err=True)

    def show(stage: Stage) -> None:
        if at_terminal:
            click.echo("\r\x1b[K", nl=False, err=True)
        say(f"{stage.at_s:6.1f} s  {stage.name:<10} {'' if stage.ok else 'FAILED: '}{stage.evidence}", hang=21)

    outcome = live(real, small, prepared, quick, keep, show, wait)
    took_s = time.monotonic() - began
    if as_json:
        folder = str(keep.resolve()) if keep is not None else None
        click.echo(json.dumps(_tables(real, small, outcome, folder, took_s), indent=1), file=out)
    else:
        say("not rehearsed here:")
        for each in outcome.missing:
            say(f"  {each.what}: {each.why}")
    name = real.resolved.name
    if outcome.cause is not None:
        for line in outcome.log:
            click.echo(f"  | {line}", err=True)
        look = f"look at {keep}" if keep is not None else "--keep DIR keeps the run to look at"
        raise JobFailed(f"the rehearsal of {name} failed at {outcome.cause}", f"fix it and rehearse again; {look}")
    say(f"the rehearsal of {name} holds: {len(outcome.stages)} stages in {took_s:.0f} s")
    if keep is not None:
        say(f"kept in {keep}", err=True)
    click.echo(f"next: {_next_text(request)}", err=True)


def _tables(
    real: PreparedRun, small: SmallRun, outcome: RehearsalOutcome, folder: str | None, took_s: float
) -> dict[str, Any]:
    return {
        "schema": 1,
        "experiment": real.resolved.name,
        "cluster": real.resolved.cluster.name,
        "layout": str(small.resolved.layout),
        "ok": outcome.cause is None,
        "cause": outcome.cause,
        "stages": [
            {"name": each.name, "ok": each.ok, "evidence": each.evidence, "at_s": round(each.at_s, 2)}
            for each in outcome.stages
        ],
        "not_rehearsed": [{"what": each.what, "why": each.why} for each in outcome.missing],
        "folder": folder,
        "took_s": round(took_s, 2),
    }


def _next_text(request: Request) -> str:
    """The `hpc-gpt submit` that was rehearsed: this command line without the options of rehearse, and with the
    experiment that it took for want of one."""
    options, left = [], sys.argv[sys.argv.index("rehearse") + 1 :] if "rehearse" in sys.argv else []
    while left:
        word = left.pop(0)
        if word == "--keep":
            left = left[1:]
        elif word not in ("--quick", "--json") and not word.startswith("--keep="):
            options.append(word)
    named = [] if request.names_experiment or request.sized else small_options(request.overrides)
    return shlex.join(["hpc-gpt", "submit", *named, *options])


rehearse.params = [parameter for parameter in rehearse.params if parameter.name not in _NOT_HERE]
