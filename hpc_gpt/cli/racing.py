"""`hpc-gpt submit --race`: measures rows in turns, in one job or on this machine."""

from collections.abc import Mapping
from functools import partial

import click

from hpc_gpt.cli.submit_answer import (
    NOTHING_DONE,
    AnsweredRun,
    AnswerParts,
    SubmitOptions,
    print_lines,
    print_start,
    print_submitted,
    submitted_part,
    with_interrupts,
)
from hpc_gpt.core.errors import ConfigError, JobFailed
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.format import counted
from hpc_gpt.core.slurm.sbatch_words import shown_directives
from hpc_gpt.core.terminal import say, width
from hpc_gpt.launcher.race.prepare_race import ROUNDS, STEPS, TOP, PreparedRace, check_race, prepare_race, queue_race
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.submission import dry_run as ask_slurm
from hpc_gpt.launcher.watch.control import wait_for
from hpc_gpt.reader.runs.run_read import BENCH_FILE
from hpc_gpt.report.bench_table import file_text


def submit_race(request: Request, sizes: Mapping[str, int | None], options: SubmitOptions) -> AnswerParts:
    """Submits a race. `sizes`: the values of --rounds, --steps and --top."""
    if request.row and not request.grid:
        raise ConfigError(f"--race and --row {request.row} exclude each other", f"leave --row {request.row} out")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ConfigError(f"{name} {size}: a race needs 1 or more", f"leave {name} out for its default")
    rounds, steps, top = (sizes[name] or usual for name, usual in zip(sizes, (ROUNDS, STEPS, TOP), strict=True))
    prepared, logs = prepare_race(request, not options.dry, rounds, steps, top), logs_folder()
    if options.dry:
        check_race(prepared, logs, dry=True)
        yield AnsweredRun(prepared.run.resolved)
        _show(prepared, options.script)
        return
    print_lines(prepared.lines)
    submitted = queue_race(prepared, logs)
    yield submitted_part(submitted, options.wait)
    interrupts = with_interrupts(partial(print_submitted, submitted, options.wait), options.wait)
    if options.wait:
        failed = None
        try:
            wait_for(submitted.run, interrupts)
        except JobFailed as fault:
            failed = fault
        click.echo(file_text(submitted.run.path / BENCH_FILE, width()), nl=False)
        if failed is not None:
            raise failed


def _show(race: PreparedRace, script: bool) -> None:
    resolved, directives = race.run.resolved, shown_directives(race.run.script)
    if script:
        click.echo(race.run.script.encode(errors="surrogateescape"), nl=False)
    else:
        for row in race.rows:
            predicted = row.visit.prediction if row.visit is not None else None
            say(f"{row.name}: {row.cause or (predicted.line if predicted is not None else 'not predicted')}")
        say(": ".join([f"job of {counted(resolved.gpus, 'GPU')}", *filter(None, [directives])]))
    print_lines(race.lines)
    print_start(ask_slurm(resolved, race.run.script))
    say(NOTHING_DONE, err=True)
