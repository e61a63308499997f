"""`hpc-gpt report`: the figures of runs, as a table or for another program."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from hpc_gpt.cli import complete
from hpc_gpt.errors import ConfigError

if TYPE_CHECKING:
    from hpc_gpt.report.gather import Gathered


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=complete.reported)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "md", "json"]),
    default="table",
    show_default=True,
    help="How the records are written.",
)
@click.option("--json", "as_json", is_flag=True, help='Short for --format json: {"schema": 1, "records": [...]}.')
@click.option(
    "--columns",
    type=click.Choice(["auto", "usual", "seed"]),
    default="auto",
    show_default=True,
    help="A sweep's own columns with the seed's figures (seed), or every run's; auto: seed where all runs are one's.",
)
def report(paths: tuple[str, ...], form: str, as_json: bool, columns: str) -> None:
    """Print the records of runs: step time, TFLOPs, loss.

    A PATH is a run folder, a folder that holds runs (logs/ unless given), a run by id, prefix or job id, or a sweep as
    experiments/gpt2-meg: its runs under logs/, in the seed's columns. Each run's record.json is brought up to date. The
    step time is the median of the steps after warm-up.
    """
    from hpc_gpt.paths import logs_dir
    from hpc_gpt.report.gather import gather_paths
    from hpc_gpt.report.tables import FORMATS, as_table
    from hpc_gpt.terminal import width

    gathered = gather_paths(paths, logs_dir())
    form = "json" if as_json else form
    sweep = _sweep(gathered, columns)
    if sweep is not None:
        from hpc_gpt.report import seed_tables
        from hpc_gpt.report.seed_lines import sweep_lines

        lines = sweep_lines(sweep, gathered.records, gathered.sweeps.get(sweep))
        text = seed_tables.as_table(lines, width()) if form == "table" else seed_tables.SEED_FORMATS[form](lines)
        click.echo(text, nl=False)
    elif form == "table" and not gathered.records:
        click.echo(f"no runs under {' '.join(paths) or logs_dir()}", err=True)
    elif form == "table":
        click.echo(as_table(gathered.records, width()), nl=False)
    else:
        click.echo(FORMATS[form](gathered.records), nl=False)
    for record in gathered.records if form == "table" else []:
        for flag in record.flags:
            click.echo(f"note: {record.name}/{record.run}: {flag}", err=True)
    if gathered.unwritten:
        more = f" (and {len(gathered.unwritten) - 1} more)" if len(gathered.unwritten) > 1 else ""
        click.echo(f"note: record.json not written: {gathered.unwritten[0]}{more}", err=True)
    for fault in gathered.unread:
        click.echo(f"Error: {fault}", err=True)
    if gathered.unread:
        sys.exit(1)


def _sweep(gathered: Gathered, columns: str) -> str | None:
    """The sweep whose columns are shown; None for the usual ones."""
    from hpc_gpt.report.seed_lines import only_sweep

    if columns == "usual":
        return None
    named = next(iter(gathered.sweeps)) if len(gathered.sweeps) == 1 else None
    found = only_sweep(gathered.records) if gathered.records else named
    if found is None and columns == "seed":
        raise ConfigError(
            "--columns seed shows one sweep, but these runs are of several or of none",
            "name the runs of one, as hpc-gpt report gpt2-meg",
        )
    return found
