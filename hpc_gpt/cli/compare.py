"""hpc-gpt compare"""

import json
import string

import click

from hpc_gpt.cli import completers
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.files import logs_folder
from hpc_gpt.core.terminal import say, shows_life, width


@verb(130)
@click.argument("names", nargs=-1, metavar="A [B]...", shell_complete=completers.runs_and_logs)
def compare(names: tuple[str, ...], as_json: bool) -> None:
    """Say whether one run is faster than another, and how their settings differ.

    Prints the ratio of the median steady-state steps with its 95 % interval, by a block bootstrap, since neighbouring
    steps are alike: "faster by 4 % (3.1 to 4.9)", or "no difference shown". Percentages refer to speed: twice as fast
    is 100 % faster. The interval is about these runs' steps, not about how fast a repeat would be. If a step is not the
    same work in both, tokens/s are compared. Then come losses at equal steps, memory, how each ended, and the settings
    that differ, with those that decide speed first.

    Two rows of a race are compared by their rounds, each a block. Rounds of one race are paired, since they were
    measured in turns. Few rounds make the interval wide; fewer than three give none.

    A and B are runs by id, prefix, job id or folder, any program's log or a folder with the logs of one run, a
    record.json, or a row of a race: RACE#2 is the second. The name of a sweep, an experiment or a race means all its
    runs or rows. If there are more than two, each is compared with the first.
    """
    from hpc_gpt.report.compare import compare_runs
    from hpc_gpt.report.compare_text import as_tables, comparison_text, title
    from hpc_gpt.report.gather import compared_names, read_compared

    logs = logs_folder()
    names = tuple(single for name in names for single in compared_names(name, logs))
    if len(names) < 2:
        raise ConfigError(f"compare needs two runs or more, but got {len(names)}", "hpc-gpt compare RUN_A RUN_B")
    if names.count("-") > 1:
        raise ConfigError("standard input is named twice, but can be read only once", "give one of the logs as a file")
    with shows_life("reading"):
        runs = [read_compared(name, logs) for name in names]
    comparisons = [compare_runs(runs[0], run) for run in runs[1:]]
    if as_json:
        click.echo(json.dumps(as_tables(comparisons, names), indent=1, allow_nan=False, default=str))
        return
    letters = [_letter(place) for place in range(len(runs))]
    margin = max(map(len, letters))
    for letter, run in zip(letters, runs, strict=True):
        say(f"{letter:<{margin}}  {title(run)}")
    for letter, comparison in zip(letters[1:], comparisons, strict=True):
        click.echo("\n" + comparison_text(comparison, letters[0], letter, width()), nl=False)
    intervals = sum(any(speed.interval for speed in comparison.speeds) for comparison in comparisons)
    if intervals > 1:
        note = f"note: each of the {intervals} intervals has 95 % confidence by itself, not all of them together"
        say(f"\n{note}", err=True)


def _letter(place: int) -> str:
    """The name of a run in the tables: A, B, … Z, A1, B1, …"""
    return string.ascii_uppercase[place % 26] + (str(place // 26) if place >= 26 else "")
