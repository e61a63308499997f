"""hpc-gpt status: the state of runs, and their size on the disk."""

import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.columns import Column, column, fitting, grid
from hpc_gpt.core.ends.failures import ENDED, FAILED, colour_of
from hpc_gpt.core.files import logs_folder, refused_access
from hpc_gpt.core.format import clock, counted, plain, show_bytes, show_duration, wrapped
from hpc_gpt.core.output import reader_left
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.runs.find_runs import find_runs, no_runs, singles_out
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.environment import has_sbatch
from hpc_gpt.core.terminal import Screen, painted, say, width
from hpc_gpt.launcher.watch.status import RunStatus, ask_status, shell_command, silence_note
from hpc_gpt.launcher.watch.sweep_rows import by_sweep, fold, progress

_COLUMNS = (
    column("run", "run", right=False),
    column("experiment", "name", right=False),
    column("layout", "layout", right=False),
    column("state", "state", right=False, style=lambda row: colour_of(row.state)),
    column("job", "job_id", right=False),
    column("attempts", "attempts"),
    Column("step", ("step", "steps"), progress),
    column("loss", "loss", "{:.4f}".format),
    column("tokens/s", "tokens_per_s", "{:.0f}".format),
    column("age", "age_s", show_duration),
    column("ends", "left_s", lambda left_s: clock(time.time() + left_s, time.time())),
    column("GPU hours", "gpu_hours", "{:.3g}".format),
)


# On a narrow terminal the first of these go, one after the other, until the others fit. --json has them all.
_LEFT_OUT = ("attempts", "layout", "gpu_hours", "age_s", "tokens_per_s", "job_id", "loss", "left_s", "name")


@verb(60)
@click.argument("names", nargs=-1, metavar="[RUN]...", shell_complete=completers.runs)
def status(
    names: tuple[str, ...],
    as_json: bool,
    watch: bool,
    interval: float,
    opened: bool,
    sizes: bool,
    states: tuple[str, ...],
    failed: bool,
    show_all: bool,
) -> None:
    """Show the state of runs.

    Prints state, job, attempts, last step, loss, tokens/s, the time since the submission, the expected end of a run
    that trains, and the GPU hours of all attempts; and why a run waits. RUN is a run id, its begin or its end, a job
    id, a folder, or the name of an experiment or a sweep, for all its runs; without RUN the newest 20 under
    logs/. A sweep is one line, with the least and the most steps of its runs and the sums of their attempts and GPU
    hours; if it is named, or with --open, --state or --failed, each of its runs has a line. Slurm
    is asked once for all runs; accounting is not needed. --sizes prints instead the bytes of checkpoints, logs, code
    and of work/, where a program runs; clean lists the files that may go. Exit 1 if you may not read a run's folder.
    """
    if unknown := [state for state in states if state not in ENDED]:
        raise click.BadParameter(f"{unknown[0]!r} is not one of {', '.join(map(repr, ENDED))}.", param_hint="'--state'")
    from hpc_gpt.cli.run_argument import located

    logs, names = logs_folder(), tuple(map(located, names))
    opened = opened or any(singles_out(name) for name in names) or bool(states or failed)
    wanted = {*states, *(FAILED if failed else ())} or {*ENDED}
    show_all = show_all or bool(states or failed)

    def chosen() -> list[RunFolder]:
        runs = find_runs(names, logs)
        return runs if show_all or names else [run for group in by_sweep(runs)[-20:] for run in group]

    runs = chosen()
    if as_json:
        rows, silence = _print_json(runs, wanted, sizes)
    elif not runs:
        from hpc_gpt.cli.run_argument import first_submit

        click.echo(f"{no_runs(logs)}\nnext: {first_submit()}", err=True)
        return
    elif sizes:
        _print_sizes(runs)
        return
    elif watch:
        _watch(chosen, interval, opened)
        return
    else:
        rows, silence = _print_rows(runs, opened, wanted)
        if not any(row.state in wanted for row in rows):
            say(f"none of {counted(len(runs), 'run')} is {'failed' if failed else ' or '.join(states)}", err=True)
        if names and len(runs) == len(rows) == 1 and (inside := shell_command(runs[0], rows[0])):
            click.echo(f"a shell in its job: {inside}", err=True)
    # Without Slurm, an ended run does not need its answer.
    if silence and (has_sbatch() or not all(row.is_known_over for row in rows)):
        say(silence_note(silence), err=True)
    if any(row.state == "unknown" and refused_access(Path(row.folder), os.R_OK) for row in rows):
        sys.exit(1)


def _print_json(runs: list[RunFolder], wanted: Collection[str], sizes: bool) -> tuple[list[RunStatus], str]:
    """Prints the runs in `wanted` states as one JSON object, and returns the result of `ask_status`."""
    rows, silence = ask_status(runs, limit_s=0)  # a program that reads JSON gets nothing before the answer
    pairs = [(run, row) for run, row in zip(runs, rows, strict=True) if row.state in wanted]
    answer: dict[str, Any] = {"schema": 1, "runs": [row.to_dict() for _, row in pairs]}
    if sizes:
        from hpc_gpt.core.checkpoints.disk_space import free_bytes, run_sizes

        answer["free_bytes"] = free_bytes(logs_folder())
        for row, of_run in zip(answer["runs"], (run_sizes(run) for run, _ in pairs), strict=True):
            row["sizes"] = of_run
    click.echo(json.dumps(answer, indent=1))
    return rows, silence


@no_collections()
def _print_rows(runs: list[RunFolder], opened: bool, wanted: Collection[str]) -> tuple[list[RunStatus], str]:
    """Prints the table of the runs in `wanted` states, and returns the result of `ask_status`. If Slurm is slow, the
    runs that have ended come first."""
    shown: list[RunStatus] = []

    def show(groups: Iterable[list[RunStatus]]) -> None:
        before = [_facts(row) for row in shown]
        groups = filter(None, ([row for row in group if row.state in wanted] for group in groups))
        rows = [
            row for group in groups if not before or any(_facts(row) not in before for row in group) for row in group
        ]
        for line in _table(rows, opened) if rows else ():
            click.echo(line)
        shown.extend(rows)

    def show_ended(from_folders: list[RunStatus]) -> None:
        show(group for group in by_sweep(from_folders) if all(row.is_known_over for row in group))

    rows, silence = ask_status(runs, show_ended, limit_s=0)
    show(by_sweep(rows))
    return rows, silence


def _print_sizes(runs: list[RunFolder]) -> None:
    from hpc_gpt.core.checkpoints.disk_space import SIZE_KINDS as kinds
    from hpc_gpt.core.checkpoints.disk_space import free_bytes, run_sizes

    rows: list[dict[str, Any]] = [{"run": run.run_id, "name": run.path.parent.name, **run_sizes(run)} for run in runs]
    rows.sort(key=lambda row: -sum(row[kind] for kind in kinds))
    rows.append({"run": "all", "name": "", **{kind: sum(row[kind] for row in rows) for kind in kinds}})
    columns = [column("run", "run", right=False), column("experiment", "name", right=False)]
    columns += [column(kind, kind, show_bytes) for kind in kinds]
    columns.append(Column("in all", kinds, lambda row: sum(row[kind] for kind in kinds), show_bytes))
    click.echo(grid(columns, rows).fitted(width(), "\n"), nl=False)
    if (free := free_bytes(logs_folder())) is not None:
        say(f"free: {show_bytes(free)} in {logs_folder()}")
    click.echo("next: hpc-gpt clean RUN lists the files that may go", err=True)


_BY_CLOCK = ("age_s", "left_s", "gpu_hours", "still")


def _facts(row: RunStatus) -> dict[str, Any]:
    """The fields of a row that the clock does not change. As in JSON, since a NaN loss would equal nothing."""
    return {key: value for key, value in row.to_dict().items() if key not in _BY_CLOCK}


def _watch(chosen: Callable[[], list[RunFolder]], interval: float, opened: bool) -> None:
    display = Screen()

    def show(rows: list[RunStatus]) -> None:
        every = f"{time.strftime('%Y-%m-%d %H:%M:%S')}, every {interval:g} s; Ctrl-C ends this, not the runs"
        display.show("\n".join([every, *_table(rows, opened)]))

    while True:
        rows, _ = ask_status(chosen(), show, limit_s=0)
        show(rows)
        if all(row.is_over for row in rows) or reader_left():
            break
        time.sleep(interval)


def _table(rows: list[RunStatus], opened: bool) -> list[str]:
    lines = rows if opened else fold(rows)
    room = width()
    table = grid(fitting(_COLUMNS, lines, room, _LEFT_OUT), lines).aligned(painted).splitlines()
    notes = [(row.run, f"a branch of {row.branch_of}") for row in lines if row.branch_of]
    for row in lines:
        texts = (row.cause, row.still, row.slow) if row.state != "done" else ()
        notes += [(row.run, text) for text in texts if text]
    return table + [line for run, text in notes for line in wrapped(plain(f"{run}: {text}"), room)]
