"""What is in the folder of a race, a run whose job measures rows in turns.

race.json          its rows, in their order, and how many rounds: written before the job is submitted
rows/…/<id>/       each row as a run folder that never starts; a visit is a copy of it
visits.jsonl       a line as a visit begins, and one as it ends
<row>/<visit id>/  a visit: an ordinary run of the row
bench.json         the rows as they are measured so far, as those of a bench
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
    """A row: its name, the run folder that its visits copy, None for a row that cannot run, and why it cannot. `keys`:
    what it is over the experiment, by dotted key; `place`: the planner's place for it, from 1, None without one."""

    name: str
    folder: str | None
    cause: str | None
    keys: dict[str, Any]
    place: int | None


@dataclass(frozen=True)
class Visit:
    """One measurement of a row, both numbered from 0. `attempt`: of the race, on those `nodes`; `ended`: its class,
    empty while it runs. It may take `limit_s`, and took `seconds`. `dropped`: it counts for nothing."""

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
    """(the rows, how many rounds there are)."""
    tables = read_stored(run.path / RACE)
    rows = [
        RaceRow(row.get("name", "?"), row.get("folder"), row.get("cause"), row.get("keys") or {}, row.get("place"))
        for row in tables.get("rows") or []
    ]
    return rows, tables.get("rounds") or 1


def read_visits(run: RunFolder) -> list[Visit]:
    """The visits so far, in the order of their beginnings."""
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
    """How many visits of a race have ended and count: its progress, as the step of a checkpoint is a training's."""
    return sum(bool(visit.ended) and not visit.dropped for visit in visits)


def make_visit(run: RunFolder, row: RaceRow) -> RunFolder:
    """A run folder with the files of a row. RunFolderError if the disk refuses."""
    source = run.path / str(row.folder)
    with OsErrorAs(RunFolderError, f"cannot copy {source}", "is the disk full?"):
        visit = RunFolder(claim_folder(run.path / source.parent.name))
        shutil.copytree(source, visit.path, copy_function=_link, dirs_exist_ok=True)
    return visit


def _link(source: str, target: str) -> None:
    """Nothing of a row's files is written again, so a second name does for a copy."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
