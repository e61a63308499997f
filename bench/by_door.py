"""Published rows asked as a user asks, `hpc-gpt plan EXPERIMENT --cluster PROFILE --set KEY=VALUE …`, beside
predictions of the rows' own trainings: `python -m bench.by_door ROWS.json… [-v]`, 10 s for 300 rows.

Each row is an experiment of engine `command` with [plan], a profile of its machine, and settings; the answer is the
best candidate that `plan` has for the row's layout and batch. Errors are means over rows of the absolute error, in %,
and then over sources. A noisy row is in no mean and in no count. What ran and "does not fit", or is refused, is a wrong
fit, and has no time.
"""

import argparse
import collections
import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from bench.published.door import predict_by_plan
from bench.published.rows import LeftOut, PublishedRow, read_rows
from bench.published.scores import DATA_SHEET, Predicted, predict_row, tells_fit
from hpc_gpt.planner.machine import DEFAULT


@dataclass
class Asked:
    """A row, predicted by its own training and as a user gets it, or refused."""

    row: PublishedRow
    own: Predicted
    by_plan: Predicted | LeftOut

    @property
    def refusal(self) -> str:
        return self.by_plan.reason if isinstance(self.by_plan, LeftOut) else ""

    @property
    def is_wrong_fit(self) -> bool:
        """Whether the answer contradicts that the row ran, or that it ran out of memory."""
        published = self.row.published
        fits = isinstance(self.by_plan, Predicted) and self.by_plan.fits
        if published.noisy:
            return False
        return not fits if published.step_s is not None else tells_fit(self.own) and published.fits != fits


def ask_rows(paths: Iterable[Path]) -> list[Asked]:
    found = []
    for path in paths:
        for row in read_rows(path).rows:
            own = predict_row(row, DEFAULT, DATA_SHEET)
            if isinstance(own, Predicted):
                found.append(Asked(row, own, predict_by_plan(row)))
    return found


COLUMNS = ("own time", "time", "own memory", "memory")


def errors_of(rows: Iterable[Asked]) -> dict[str, float]:
    """The mean error of each column in %; without the columns that have no figure."""
    errors = collections.defaultdict[str, list[float | None]](list)
    for each in rows:
        if each.row.published.noisy:
            continue
        errors["own time"].append(each.own.time_error)
        errors["own memory"].append(each.own.memory_error)
        if isinstance(each.by_plan, Predicted):
            errors["time"].append(each.by_plan.time_error if each.by_plan.fits else None)
            errors["memory"].append(each.by_plan.memory_error)
    known = {name: [abs(error) for error in each if error is not None] for name, each in errors.items()}
    return {name: 100 * statistics.mean(known[name]) for name in COLUMNS if known.get(name)}


def table_line(name: str, rows: list[Asked], errors: dict[str, float]) -> str:
    shown = "".join(f"{errors[column]:12.1f}" if column in errors else f"{'-':>12}" for column in COLUMNS)
    refused, wrong = sum(bool(each.refusal) for each in rows), sum(each.is_wrong_fit for each in rows)
    return f"{name:36}{shown}{len(rows):6}{refused:9}{wrong:12}"


def mean_of_sources(rows: list[Asked]) -> dict[str, float]:
    by_source = collections.defaultdict[str, list[Asked]](list)
    for each in rows:
        by_source[each.row.source].append(each)
    errors = [errors_of(of_source) for of_source in by_source.values()]
    every = {name: [of_source[name] for of_source in errors if name in of_source] for name in COLUMNS}
    return {name: statistics.mean(values) for name, values in every.items() if values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="+", type=Path)
    parser.add_argument("-v", action="store_true", help="a line a row")
    given = parser.parse_args()
    asked = ask_rows(given.rows)
    print(f"{'source, like':36}{''.join(f'{name:>12}' for name in COLUMNS)}  rows  refused  wrong fits")
    tables = collections.defaultdict[tuple[str, str], list[Asked]](list)
    for each in asked:
        tables[each.row.source, each.row.training.engine].append(each)
    for (source, engine), rows in tables.items():
        print(table_line(f"{source:22} {engine}", rows, errors_of(rows)))
    for is_mixture, kind in ((True, "mixtures"), (False, "dense")):
        if rows := [each for each in asked if bool(each.row.training.shape.is_mixture) == is_mixture]:
            print(table_line(f"{kind}, mean over sources", rows, mean_of_sources(rows)))
    for each in asked if given.v else ():
        answer = each.refusal or f"{each.by_plan.step.step_s:.4g} s, {each.by_plan.memory_gib:.4g} GiB"  # type: ignore[union-attr]
        own = f"{each.own.step.step_s:.4g} s, {each.own.memory_gib:.4g} GiB"
        measured = f"{each.row.step_s} s, {each.row.published.memory_gib} GiB"
        print(
            f"{each.row.id}  measured {measured}  own {own}  plan {answer}{'  wrong fit' if each.is_wrong_fit else ''}"
        )


if __name__ == "__main__":
    os.environ |= {"HPC_GPT_CACHE": "off", "NO_COLOR": "1"}
    main()
