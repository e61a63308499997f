"""hpc-gpt bench"""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, TextIO

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.experiment_options import CountType, bench_options, on_command_line, option_name
from hpc_gpt.cli.option_groups import GroupedCommand
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import from_here, logs_folder
from hpc_gpt.core.format import plain
from hpc_gpt.core.output import progress_as_json
from hpc_gpt.core.runs.provenance import known_gpus
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.terminal import say, width
from hpc_gpt.launcher.bench_rows import (
    DEFAULT_BENCH,
    BenchCell,
    BenchRequest,
    parse_engines,
    parse_micro_batches,
    prepare_cells,
)
from hpc_gpt.launcher.request import Request
from hpc_gpt.launcher.this_machine import profile_here

if TYPE_CHECKING:
    from hpc_gpt.launcher.bench.bench_run import Bench
    from hpc_gpt.launcher.ladder import PreparedLadder

PLACE = 45

_ROUNDS = 3


@click.command(cls=GroupedCommand)
@bench_options
@click.option(
    "--engines",
    "--engine",
    "engines",
    metavar="ENGINE[:STAGE],...",
    shell_complete=completers.complete_engines,
    help="Engines to compare, each with its ZeRO stage if needed: ddp,deepspeed-zero:3,fsdp.",
)
@click.option(
    "--micro-batch-size",
    "--mbs",
    "micro_batches",
    metavar="N,...",
    help="Micro-batches to try, as 1,2,4,8. One that runs out of memory is marked.",
)
@click.option("--steps", type=CountType(), metavar="N", help="Steps of each run; the first few are warm-up.")
@click.option(
    "--rounds",
    type=CountType(),
    metavar="K",
    help=f"How often to measure each row, in turns; {_ROUNDS} if there are several rows, else 1.",
)
@click.option(
    "--peer",
    "peers",
    multiple=True,
    metavar="NAME='COMMAND'",
    help="A program of yours, measured in turns with our rows. bash runs the command as it is, and the log "
    "readers find tokens/s in its output. May be repeated.",
)
@click.option(
    "--peer-pattern",
    "patterns",
    multiple=True,
    metavar="[NAME=]REGEX",
    help="Find a peer's tokens/s with this expression instead. Its one group is the figure of a line; the median of "
    "all lines but the first few counts. NAME= sets it for one peer; without NAME= it is for all others. May be "
    "repeated.",
)
@click.option(
    "--ladder",
    type=click.Choice(["colab", "memory", "mingpt"]),
    help="Run a published ladder rung by rung instead of EXPERIMENT. Prints the ladder's columns, its figures beside "
    "ours, and what each rung saves and costs. --row NAME,... picks some of its rungs. memory also runs each memory "
    "technique on gpt2, after its own rungs.",
)
@click.option("--machine", is_flag=True, help="Measure the speed of this machine instead, and print it as [machine] "
              "and [calibration] of a profile.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help='One JSON object: {"schema": 1, "records": [...]}.')  # fmt: skip
def bench(
    request: Request,
    engines: str | None,
    micro_batches: str | None,
    steps: int | None,
    rounds: int | None,
    peers: tuple[str, ...],
    patterns: tuple[str, ...],
    ladder: str | None,
    machine: bool,
    as_json: bool,
) -> None:
    """Train EXPERIMENT on random tokens on this machine, and print its speed and memory.

    Without EXPERIMENT: GPT-124M, 1,024 tokens a sample, engine ddp on one GPU. Prints one row per engine and
    micro-batch: tokens/s, TFLOPs by each formula, MFU, memory beside the prediction of plan, and figures of the GPU and
    its allocator. Several rows are measured in turns over several rounds: each shows the median of its rounds and the
    ratio to the first row. --row takes several rows of EXPERIMENT; a row with engine command is a peer. --cluster only
    says which machine this is; nothing is queued.

    No checkpoint is saved. Each round is a run under logs/; the rows are records in bench.json beside them, for report
    and compare. Ctrl-C ends the current run and keeps the rows that are done. Exit 3 if the first row runs out of
    memory, or any row fails for another reason.

    A rung of a ladder that this machine cannot run, for lack of GPUs or memory, is marked with the reason, and the next
    one is run. The rungs train as long as the published ones, five minutes each for colab, unless --steps is given.

    --machine trains nothing. In two minutes at most it measures matrix products in each format, attention, memory,
    copies from the host, and sends, all-gathers and all-reduces within a node and between nodes. It uses one GPU, this
    machine, or all nodes of the Slurm allocation in which it is started. --cluster names a profile with the fabric.

    \b
    hpc-gpt bench
    hpc-gpt bench --model gpt2-xl --mbs 4,8,16
    hpc-gpt bench --engines ddp,deepspeed-zero,deepspeed-zero:3,fsdp --rounds 5
    hpc-gpt bench memory-techniques --row base,loss-chunks
    hpc-gpt bench --smoke --engines ddp,deepspeed-zero
    hpc-gpt bench --peer nanogpt='cd ~/nanoGPT && python train.py --max_iters=100'
    hpc-gpt bench --ladder memory --steps 30
    hpc-gpt bench --machine --cluster mine
    """
    from hpc_gpt.launcher.peers import prepare_peer, read_peers

    if machine:
        _measure_machine(request, as_json)
        return
    out = click.get_current_context().with_resource(progress_as_json()) if as_json else None
    _check_count("--rounds", rounds)
    _check_count("--steps", steps)
    read_peers(peers, patterns)
    if ladder is not None:
        _check_ladder()
        _climb(request, ladder, steps, rounds or 1, out)
        return
    bench_request = _bench_request(request, engines, micro_batches, steps)
    prepared = prepare_cells(bench_request)
    programs = read_peers(peers, patterns, [cell.name for cell in prepared.cells])
    cells = [*prepared.cells, *(prepare_peer(name, *peer, bench_request.profile) for name, peer in programs.items())]
    for note in prepared.notes:
        say(note, err=True)
    predictions = [cell.prepared.prediction for cell in prepared.cells if cell.prepared]
    for line in dict.fromkeys(prediction.line for prediction in predictions if prediction):
        say(str(line), err=True)
    _run(bench_request, prepared.name, cells, rounds or (_ROUNDS if len(cells) > 1 else 1), out)


def _bench_request(request: Request, engines: str | None, micro_batches: str | None, steps: int | None) -> BenchRequest:
    parsed_engines, parsed_batches = parse_engines(engines), parse_micro_batches(micro_batches)
    gpus = known_gpus()
    return BenchRequest(
        request.experiment if request.names_experiment else DEFAULT_BENCH,
        profile_here(load_profile(request.cluster) if request.cluster else None, gpus),
        request.overrides,
        request.row,
        parsed_engines,
        parsed_batches,
        steps,
        request.smoke,
        bool(gpus),
    )


def _climb(request: Request, ladder: str, steps: int | None, rounds: int, out: TextIO | None) -> None:
    """Runs a ladder rung by rung."""
    from hpc_gpt.launcher.ladder import prepare_ladder

    bench_request = replace(_bench_request(request, None, None, steps), is_ladder=True)
    prepared = prepare_ladder(bench_request, ladder, request.row, len(known_gpus()))
    for note in prepared.notes:
        say(note, err=True)
    _run(bench_request, prepared.name, [rung.cell for rung in prepared.rungs], rounds, out, prepared)


def _measure_machine(request: Request, as_json: bool) -> None:
    from hpc_gpt.launcher.bench.machine import as_profile, machine_text, measure_machine

    if options := [option_name(parameter) for parameter in on_command_line("machine", "cluster", "as_json")]:
        raise ConfigError(
            f"--machine trains nothing, and does not take {', '.join(options)}", "it takes --cluster and --json"
        )
    chosen = load_profile(request.cluster) if request.cluster else None
    measured = measure_machine(chosen)
    profile = as_profile(measured, chosen)
    tables = {"schema": 1, **profile, "measured": measured}
    click.echo(json.dumps(tables, indent=1) if as_json else machine_text(measured, profile).rstrip())


def _check_ladder() -> None:
    """Raises ConfigError if the command line also gives what the ladder itself has; variables are for other benches."""
    on_line = {parameter.name for parameter in on_command_line()}
    names = {"experiment": "EXPERIMENT", "engines": "--engines", "micro_batches": "--mbs", "peers": "--peer"}
    for name, option in names.items():
        if name in on_line:
            raise ConfigError(
                f"--ladder and {option} do not go together: the table of the ladder has its rungs",
                f"use two commands, or one without {option}; --set changes a value of all rungs",
            )


def _check_count(option: str, count: int | None) -> None:
    if count is not None and count < 1:
        raise ConfigError(
            f"{option} is {count}, but must be at least 1", f"leave {option} out, or give a number above 0"
        )


def _run(
    request: BenchRequest,
    name: str,
    cells: Sequence[BenchCell],
    rounds: int,
    out: TextIO | None,
    ladder: PreparedLadder | None = None,
) -> None:
    """Measures, and prints the rows that are done, however it ends; with `ladder` in the ladder's own columns. `out`
    gets the object of --json."""
    from hpc_gpt.launcher.bench.bench_run import Bench, make_folder
    from hpc_gpt.launcher.submission import check_submission

    logs = logs_folder()
    ours = [cell.prepared for cell in cells if cell.prepared]
    provenance = check_submission(ours, logs) if ours else {}
    bench_run = Bench(cells, rounds, make_folder(logs, name), provenance, request.profile)
    say(f"bench {bench_run.folder.id} in {from_here(bench_run.folder.path)}", err=True)
    with signals_as_ctrl_c():
        try:
            bench_run.run()
        except KeyboardInterrupt:
            done = len(bench_run.rows)
            what = f"{done} of {len(cells)} rows were measured and are" if done else "no row was measured; the log is"
            say(f"{what} kept in {from_here(bench_run.folder.path)}", err=True)
            raise
        finally:
            _print(bench_run, out, ladder)
    bench_run.check_rows(is_ladder=ladder is not None)


def _print(bench_run: Bench, out: TextIO | None, ladder: PreparedLadder | None) -> None:
    from hpc_gpt.launcher.bench.bench_run import bench_text, tables_of
    from hpc_gpt.launcher.bench.ladder import ladder_json, ladder_text

    rows = bench_run.rows
    if out is not None:
        of_ladder = {"ladder": ladder_json(ladder.ladder, ladder.rungs, rows)} if ladder else {}
        click.echo(json.dumps(tables_of(rows, bench_run.folder) | of_ladder, indent=1, allow_nan=False), file=out)
    else:
        text = ladder_text(ladder.ladder, ladder.rungs, rows, width()) if ladder else bench_text(rows, width())
        click.echo(text, nl=False)
        for row in rows:
            for flag in row.record.flags:
                say(plain(f"note: {row.cell}: {flag}"), err=True)
    for hint in bench_run.hints:
        say(f"hint: {hint}", err=True)
    if rows:
        click.echo(f"next: hpc-gpt report {bench_run.folder.id}", err=True)


@contextlib.contextmanager
def signals_as_ctrl_c() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end a bench as Ctrl-C does; otherwise the programs that it started would keep
    running."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = {}
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup
            previous[number] = signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
