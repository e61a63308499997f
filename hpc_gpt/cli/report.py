"""`hpc-gpt report`: the figures of runs, as a table or for another program."""

from __future__ import annotations

import sys

import click

from hpc_gpt.cli import complete


@click.command()
@click.argument("paths", nargs=-1, metavar="[PATH]...", shell_complete=complete.runs)
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "csv", "md", "json"]),
    default="table",
    show_default=True,
    help="How the records are written.",
)
@click.option("--json", "as_json", is_flag=True, help='Short for --format json: {"schema": 1, "records": [...]}.')
def report(paths: tuple[str, ...], form: str, as_json: bool) -> None:
    """Print the records of runs: step time, TFLOPs, loss.

    A PATH is a run folder, a folder that holds runs (logs/ unless given), or a run by id, prefix or job id. Each
    run's record.json is brought up to date. The step time is the median of the steps after warm-up.
    """
    from hpc_gpt.paths import logs_dir
    from hpc_gpt.report.gather import gather_records
    from hpc_gpt.report.tables import FORMATS, as_table
    from hpc_gpt.runs import find_runs
    from hpc_gpt.terminal import width

    gathered = gather_records(find_runs(paths, logs_dir()))
    form = "json" if as_json else form
    if form == "table" and not gathered.records:
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
