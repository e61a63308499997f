"""The folder of a race, a run whose job measures rows in turns.

race.json          its rows, in order, and the number of rounds: written before the job is submitted
rows/…/<id>/       each row as a run folder that never starts; a visit is a copy of it
visits.jsonl       a line when a visit begins, and one when it ends
<row>/<visit id>/  a visit: an ordinary run of the row
bench.json         the rows as measured so far
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.core.errors import OsErrorAs, RunFolderError
from hpc_gpt.core.files import append_line
from hpc_gpt.core.runs.run_folder import RunFolder, claim_folder
from hpc_gpt.core.runs.stored import read_stored, read_stored_lines

RACE = "race.json"
_VISITS = "visits.jsonl"


@dataclass(frozen=True)
class RaceRow:
    """A row: its name, the run folder that its visits copy (None if it cannot run), and the cause if it cannot. `keys`:
    what it changes in the experiment, by dotted key; `place`: its place by the planner, from 1, None without one;
    `submit`: the command that trains with it, None if there is none."""

    name: str
    folder: str | None
    cause: str | None
    keys: dict[str, Any]
    place: int | None
    submit: str | None


@dataclass(frozen=True)
class Visit:
    """One measurement of a row; rounds and rows are numbered from 0. `attempt`: the attempt of the race, on `nodes`;
    `ended`: its class, empty while it runs. It may take `limit_s`, and took `seconds`. `dropped`: it does not count."""

    place: str
    round: int
    row: int
    attempt: int
    nodes: str
    began: float
    limit_s: float | None = None
    ended: str = ""
    cause: str | None = None
    seconds: float = 0.0
    dropped: bool = False


def is_race(run: RunFolder) -> bool:
    return (run.path / RACE).is_file()


def read_rows(run: RunFolder) -> tuple[list[RaceRow], int]:
    """Returns (the rows, the number of rounds)."""
    tables = read_stored(run.path / RACE)
    rows = [
        RaceRow(
            row.get("name", "?"),
            row.get("folder"),
            row.get("cause"),
            row.get("keys") or {},
            row.get("place"),
            row.get("submit"),
        )
        for row in tables.get("rows") or []
    ]
    return rows, tables.get("rounds") or 1


def read_visits(run: RunFolder) -> list[Visit]:
    """The visits so far, in the order in which they began."""
    lines: dict[str, dict[str, Any]] = {}
    for line in read_stored_lines(run.path / _VISITS):
        lines.setdefault(line.get("visit", ""), {"began": line.get("time", 0.0)}).update(line)
    return [
        Visit(
            place,
            line.get("round", 0),
            line.get("row", 0),
            line.get("attempt", 0),
            line.get("nodes", ""),
            line["began"],
            line.get("limit_s"),
            line.get("ended", ""),
            line.get("cause"),
            max(0.0, line.get("time", 0.0) - line["began"]),
            line.get("dropped", False),
        )
        for place, line in lines.items()
    ]


def note_visit(run: RunFolder, place: str, **keys: Any) -> None:
    """Appends a line on a visit; RunFolderError if the disk refuses."""
    with OsErrorAs(RunFolderError, f"cannot write {run.path / _VISITS}", "is the disk full?"):
        append_line(run.path / _VISITS, json.dumps({"visit": place, "time": time.time(), **keys}))


def measured(visits: Sequence[Visit]) -> int:
    """The number of visits of a race that have ended and count: its progress, like the step of a checkpoint."""
    return sum(bool(visit.ended) and not visit.dropped for visit in visits)


def make_visit(run: RunFolder, row: RaceRow) -> RunFolder:
    """Makes a run folder with the files of a row. RunFolderError if the disk refuses."""
    source = run.path / str(row.folder)
    with OsErrorAs(RunFolderError, f"cannot copy {source}", "is the disk full?"):
        visit = RunFolder(claim_folder(run.path / source.parent.name))
        shutil.copytree(source, visit.path, copy_function=_link, dirs_exist_ok=True)
    return visit


def _link(source: str, target: str) -> None:
    """Links instead of copying, as the files of a row are never written again."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
