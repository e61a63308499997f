"""Predicted against published memory, by source, and each source predicted with constants chosen on the others.

python -m tests.benchmarks.plan_memory ../shared/planner/open.json ../shared/planner/calibration.json
"""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from hpc_gpt.plan import memory
from tests.plan.published.files import read_rows
from tests.plan.published.rows import PublishedRow

if TYPE_CHECKING:
    from collections.abc import Iterator

# What the constants are tried at, when a source is left out.
TRIED = {
    (memory, "RENEWED_SLACK"): (0.6, 0.7, 0.8, 0.9, 1.0),
    (memory, "REPEATED_SLACK"): (0.0, 0.03, 0.06),
    (memory, "CONTEXT_GIB"): (0.5, 0.75, 1.0),
    (memory, "COMMUNICATOR_GIB"): (0.2, 0.4, 0.6),
}


@dataclass(frozen=True)
class Score:
    """Errors are predicted over published, less 1. `wrong_fits`: ids of rows that ran and were said not to, or the
    other way round; a row of theory (kind component, or a share of another row) neither ran nor ran out."""

    errors: dict[str, list[float]]
    wrong_fits: list[str]
    fits_asked: int

    @property
    def all(self) -> list[float]:
        return [error for errors in self.errors.values() for error in errors]


def mean(errors: Sequence[float]) -> float:
    """Mean of the absolute errors."""
    return sum(map(abs, errors)) / len(errors)


def rows_of(paths: Sequence[Path]) -> list[PublishedRow]:
    return [row for path in paths for row in read_rows(path).rows]


def predicted_gib(row: PublishedRow) -> float:
    """GiB in the row's kind, of the stages that the row lists, else of all."""
    kind = row.published.memory_kind or "nvidia_smi"
    stages = memory.predict_memory(row.training, row.machine).stages
    listed = [stages[stage] for stage, _ in row.published.by_stage] or stages
    return max(float(getattr(stage, kind)) for stage in listed)


def is_theory(row: PublishedRow) -> bool:
    return row.published.memory_kind == "component" or row.source.startswith("korthikanti")


def score(rows: Sequence[PublishedRow]) -> Score:
    """Errors of memory by source, and the verdicts on whether a row fits."""
    errors: dict[str, list[float]] = defaultdict(list)
    wrong, asked = [], 0
    for row in rows:
        if is_theory(row):
            continue
        if row.published.memory_gib is not None:
            errors[row.source].append(predicted_gib(row) / row.published.memory_gib - 1)
        if row.published.fits is not None:
            asked += 1
            found = memory.predict_memory(row.training, row.machine)
            if memory.fits_in_memory(found, row.machine) != row.published.fits:
                wrong.append(row.id)
    return Score(dict(errors), wrong, asked)


@contextmanager
def constants(values: Sequence[float]) -> Iterator[None]:
    """The constants at other values, for as long as it lasts."""
    places = list(TRIED)
    with (
        mock.patch.object(*places[0], values[0]),
        mock.patch.object(*places[1], values[1]),
        mock.patch.object(*places[2], values[2]),
        mock.patch.object(*places[3], values[3]),
    ):
        yield


def left_out(rows: Sequence[PublishedRow]) -> dict[str, tuple[float, tuple[float, ...]]]:
    """Of each source with memory: its mean error under the constants that suit the other sources best, and those."""
    grid = {}
    measured = [row for row in rows if row.published.memory_gib is not None and not is_theory(row)]
    for values in itertools.product(*TRIED.values()):
        with constants(values):
            grid[values] = {source: mean(errors) for source, errors in score(measured).errors.items()}
    sources = next(iter(grid.values()))
    found = {}
    for source in sources:
        best = min(grid, key=lambda values: sum(error for name, error in grid[values].items() if name != source))
        found[source] = (grid[best][source], best)
    return found


def main() -> None:
    rows = rows_of([Path(name) for name in sys.argv[1:]])
    found, without = score(rows), left_out(rows)
    print(f"{'source':<20} {'rows':>4} {'mean error':>10} {'within 10 %':>11}  fitted without it, constants")
    for source, errors in found.errors.items():
        near = sum(abs(error) <= 0.1 for error in errors)
        error, values = without[source]
        print(
            f"{source:<20} {len(errors):>4} {mean(errors):>10.1%} {near:>8}/{len(errors):<2}  {error:.1%}"
            f"  {', '.join(map(str, values))}"
        )
    near = sum(abs(error) <= 0.1 for error in found.all)
    print(f"{'all':<20} {len(found.all):>4} {mean(found.all):>10.1%} {near:>8}/{len(found.all):<2}")
    print(f"said wrongly to fit or not: {len(found.wrong_fits)} of {found.fits_asked} {found.wrong_fits}")


if __name__ == "__main__":
    main()
