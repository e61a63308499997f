"""hpc-gpt top"""

import click

from hpc_gpt.cli.run_argument import chosen_run, run_argument
from hpc_gpt.cli.verb import verb
from hpc_gpt.core.output import reader_left
from hpc_gpt.core.terminal import Screen, keys, width
from hpc_gpt.launcher.watch.status import ask_status, silence_note
from hpc_gpt.launcher.watch.top import screen
from hpc_gpt.planner.table import can_draw_blocks


@verb(65)
@run_argument
def top(run: str | None, interval: float) -> None:
    """Show one run on one screen, refreshed; q ends it, not the run.

    Prints the curve of the loss, tokens/s, the figures of each node's GPUs, the step, phase and heartbeat of each rank
    with the slowest first, the free space, the time left, and what the run does next. All is read from the run folder:
    it works without ssh, and adds nothing to the ranks' work. If there are more than ten nodes or ranks, it shows the
    spread and the ten worst. Printed once if there is no terminal. RUN is as for logs.
    """
    shown, display, columns = chosen_run(run), Screen(), width()
    with keys() as pressed:
        while True:
            (status,), silence = ask_status([shown], limit_s=0)
            lines = screen(shown, status, columns or 80, can_draw_blocks())
            notes = [silence_note(silence)] if silence and not status.is_known_over else []
            if columns is None:
                click.echo("\n".join(lines))
                click.echo("".join(f"{note}\n" for note in notes), err=True, nl=False)
                return
            display.show("\n".join([*lines[:2], *notes, *lines[2:]]))
            if status.is_over or reader_left() or pressed(interval) == "q":
                return
            columns = width()
