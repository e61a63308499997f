"""`hpc-gpt submit --race`: measures rows in turns, in one job or on this machine."""

from collections.abc import Mapping

import click

from hpc_gpt.cli.submit_answer import NOTHING_DONE, AnsweredRun, AnswerParts, SubmitOptions, print_lines, print_start
from hpc_gpt.cli.sweeping import follow_sweep, queued, run_here
from hpc_gpt.core.errors import ConfigError, JobFailed
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.format import counted
from hpc_gpt.core.slurm.sbatch_words import shown_directives
from hpc_gpt.core.terminal import say, width
from hpc_gpt.launcher.race import ROUNDS, STEPS, TOP, PreparedRace, check_race, prepare_race, write_race
from hpc_gpt.launcher.render import turns_script
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.submission import dry_run as ask_slurm
from hpc_gpt.launcher.sweep import SubmittedSweep, queue_in_turns
from hpc_gpt.report.bench_table import tables_text
from hpc_gpt.report.gather import gather_records
from hpc_gpt.report.rows_in_rounds import tables_of_sweep


def submit_race(request: Request, sizes: Mapping[str, int | None], options: SubmitOptions) -> AnswerParts:
    """Submits a race. `sizes`: the values of --rounds, --steps and --top."""
    if request.row and not request.grid:
        raise ConfigError(f"--race and --row {request.row} exclude each other", f"leave --row {request.row} out")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{name} {size}: a race needs 1 or more", f"leave {name} out for its default")
    rounds, steps, top = (sizes[name] or usual for name, usual in zip(sizes, (ROUNDS, STEPS, TOP), strict=True))
    prepared, logs = prepare_race(request, not options.dry, rounds, steps, top), logs_folder()
    runs = [visit for _, _, visit in prepared.visits]
    is_local = runs[0].resolved.cluster.scheduler == "local"
    if options.dry:
        check_race(prepared, logs, dry=True)
        yield from (
            AnsweredRun(row.visit.resolved, prediction=row.visit.prediction) for row in prepared.rows if row.visit
        )
        _show(prepared, options.script)
        return
    print_lines(prepared.lines)
    sweep = write_race(prepared, logs)
    say(f"race {sweep.id}: {counted(len(runs), 'visit')}, with links in {from_here(sweep.folder)}", err=True)
    try:
        if is_local:
            yield from run_here(sweep, runs)
        else:
            queue_in_turns(sweep, runs)
            yield from queued(sweep, options.wait)
            follow_sweep(sweep, options.wait)
    except JobFailed:
        _print_table(sweep)
        raise
    if is_local or options.wait:
        _print_table(sweep)


def _print_table(sweep: SubmittedSweep) -> None:
    """Prints the measured rows, and which one is fastest."""
    if (found := tables_of_sweep(gather_records(sweep.runs).runs)) is not None:
        click.echo(tables_text(found[1], found[0], width()), nl=False)


def _show(race: PreparedRace, script: bool) -> None:
    runs = [visit for _, _, visit in race.visits]
    resolved, scripts = runs[0].resolved, [run.script for run in runs]
    text = scripts[0] if resolved.cluster.scheduler == "local" else turns_script(race.name, scripts)
    directives = shown_directives(text)
    if script:
        click.echo(text.encode(errors="surrogateescape"), nl=False)
    else:
        for row in race.rows:
            predicted = row.visit.prediction if row.visit is not None else None
            say(f"{row.name}: {row.cause or (predicted.line if predicted is not None else 'not predicted')}")
        say(": ".join([f"job of {counted(resolved.gpus, 'GPU')}", *filter(None, [directives])]))
    print_lines(race.lines)
    print_start(ask_slurm(resolved, runs[0].script))
    say(NOTHING_DONE, err=True)
