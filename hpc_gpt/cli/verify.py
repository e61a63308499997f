"""hpc-gpt verify"""

import json
import sys

import click

from hpc_gpt.cli.run_argument import chosen_run, run_argument
from hpc_gpt.core.terminal import say
from hpc_gpt.core.words import plain

PLACE = 160


@click.command()
@run_argument
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object: schema, run, equal, differences, not_checked, notes."
)
def verify(run: str | None, as_json: bool) -> None:
    """Say what has changed since RUN was submitted.

    Compares the code, file by file with the snapshot that the run uses; package versions; the cluster profile; the
    experiment's file; the data; the script; resolved.json with the script; the newest checkpoint, byte by byte. Of a
    job script of yours it compares the file, code and versions. Says what each difference means: the run itself keeps
    to what was submitted, and what could not be compared. RUN is as for logs. Exit 0 if all is equal, 1 if something
    differs.
    """
    from hpc_gpt.launcher.launch.verification import MEANS, verify_run

    result = verify_run(chosen_run(run))
    if as_json:
        click.echo(json.dumps(result.to_dict(), indent=1))
    else:
        for check, means in MEANS.items():
            differences = [one for one in result.differences if one.check == check]
            for one in differences:
                say(plain(f"{check:10}  {one.name}: {one.words}"), hang=12)
            if differences:
                say(f"{'':10}  {means}", hang=12)
        for note in result.notes:
            say(plain(f"note: {note}"), err=True)
        for check, why in result.not_checked.items():
            say(plain(f"note: {check} not compared: {why}"), err=True)
        if not result.differences:
            say(f"{result.run}: equal to what was submitted")
    if result.differences:
        sys.exit(1)
