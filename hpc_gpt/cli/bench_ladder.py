"""The ladders of `hpc-gpt bench`: what is measured of each, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hpc_gpt.bench.cell import Cell
    from hpc_gpt.bench.ladder import Ladder, Rung
    from hpc_gpt.bench.measurement import Row
    from hpc_gpt.bench.preparation import Asked


@dataclass(frozen=True)
class AskedLadder:
    """A ladder with its rungs, and what it goes by."""

    name: str
    ladder: Ladder
    rungs: Sequence[Rung]

    @property
    def cells(self) -> list[Cell]:
        return [rung.cell for rung in self.rungs]

    def text(self, rows: Sequence[Row]) -> str:
        """What is printed of the rows there are."""
        from hpc_gpt.bench.ladder import as_text
        from hpc_gpt.terminal import width

        return as_text(self.ladder, self.rungs, rows, width())

    def tables(self, rows: Sequence[Row]) -> dict[str, Any]:
        """What `--json` has beside the records."""
        from hpc_gpt.bench.ladder import as_json

        return {"ladder": as_json(self.ladder, self.rungs, rows)}


def ask_ladder(asked: Asked, name: str, rows: str | None, gpus: int) -> AskedLadder:
    """The ladder's rungs, or those that `rows` names, with what must be known of them said on stderr."""
    from hpc_gpt.bench.ladder import LADDERS, prepare_ladder

    ladder = LADDERS[name]
    names = [row.strip() for row in rows.split(",") if row.strip()] if rows is not None else []
    rungs = prepare_ladder(asked, ladder, gpus, names)
    prepared = [rung.cell.prepared for rung in rungs if rung.cell.prepared]
    for note in dict.fromkeys(note for each in prepared for note in each.notes):
        click.echo(note, err=True)
    for rung in rungs:
        if rung.cell.record is not None:
            click.echo(f"not {rung.row.name}: {rung.cell.record.cause}", err=True)
    minutes = sum(each.resolved.train.minutes or 0 for each in prepared)
    if minutes:
        click.echo(f"note: {len(prepared)} rungs train for {minutes:g} minutes in all; --steps N for less", err=True)
    if not gpus:
        click.echo(
            "note: no GPU here, so no memory is measured: what a process takes of the host is another figure"
            + ("" if asked.smoke else "; --smoke runs the same rungs small"),
            err=True,
        )
    return AskedLadder(ladder.rungs.sweep + ("-smoke" if asked.smoke else ""), ladder, rungs)
