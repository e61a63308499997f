"""The planner's predictions of the published rows and how far they are off, as committed beside this file.

`python bench/plan.py --write` renews it. It holds our predictions and scores, none of the sources' figures.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.published.door import predict_by_plan
from bench.published.fitting import FITTED_MIXTURES, by_release, by_source, fitted_without
from bench.published.rows import Rows, read_rows
from bench.published.scores import (
    Errors,
    Predicted,
    Scores,
    calibrate_clusters,
    choosing,
    predict_rows,
    predicted_only,
    score,
    without_row,
    without_source,
)

COMMITTED = Path(__file__).with_name("figures.json")
DATA_SHEETS = "data sheets only"
CALIBRATED = "constants of calibration.json"
WITHOUT_SOURCE = "fitted without the source"
WITHOUT_ROW = "fitted without the row, within its cluster"
CONSTANTS = (DATA_SHEETS, CALIBRATED, WITHOUT_SOURCE, WITHOUT_ROW)

Files = tuple[Rows, Rows, Rows]


def read_files(folder: Path) -> Files:
    """open.json, calibration.json and open2.json."""
    first, second, third = (read_rows(folder / f"{name}.json") for name in ("open", "calibration", "open2"))
    return first, second, third


def by_data_sheets(files: Files) -> list[Predicted]:
    """The rows as a user's `plan` predicts them, from data sheets alone."""
    return [entry for rows in files for entry in predicted_only(map(predict_by_plan, rows.rows))]


def score_with(constants: str, files: Files) -> Scores:
    """The scores of all rows, predicted with one of CONSTANTS."""
    every = [row for rows in files for row in rows.rows]
    if constants == WITHOUT_SOURCE:
        return score(without_source(every))
    if constants == WITHOUT_ROW:
        return score(without_row(every))
    if constants == DATA_SHEETS:
        return score(by_data_sheets(files))
    choose = choosing(calibrate_clusters(files[1].rows))
    return score([entry for rows in files for entry in predicted_only(predict_rows(rows, choose))])


def all_scores(files: Files) -> dict[str, Scores]:
    """The scores by whose constants they are predicted with."""
    return {constants: score_with(constants, files) for constants in CONSTANTS}


def as_tables(files: Files, scores: dict[str, Scores]) -> dict[str, Any]:
    """What is committed: of each of `scores` a line for each source, and step seconds, GiB and fit of every row."""
    return {
        "scores": {name: _of_scores(each) for name, each in scores.items()},
        "rows": {
            entry.row.id: [_short(entry.step.step_s), _short(entry.memory_gib), entry.memory_kind, entry.fits]
            for entry in by_data_sheets(files)
        },
        "left_out": {entry.id: entry.reason for rows in files for entry in rows.left_out},
    }


def mixture_tables(rows: Rows) -> dict[str, Any]:
    """What is committed of the rows of mixtures: scores of a user's `plan`, and the reasons of those left out."""
    scores = score(predicted_only(map(predict_by_plan, rows.rows)))
    return {DATA_SHEETS: _of_scores(scores), "left out": {entry.id: entry.reason for entry in rows.left_out}}


def crossed_tables(rows: Rows) -> dict[str, Any]:
    """The same, of each source of mixtures and of each release of a program: the number of rows, and the mean error of
    their times by constants fitted to all others."""
    tables = {}
    for name, part in {WITHOUT_SOURCE: by_source, "fitted without the release": by_release}.items():
        errors = fitted_without(rows.rows, FITTED_MIXTURES, part)
        tables[name] = {each: [len(found), round(fmean(found), 4)] for each, found in errors.items()}
    return tables


def write(tables: dict[str, Any]) -> None:
    """Replaces the committed file: a row a line."""
    parts = []
    for name, table in tables.items():
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in table.items()]
        parts.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
    COMMITTED.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _of_scores(scores: Scores) -> dict[str, Any]:
    picks = [sum(pick.is_good for pick in scores.picks), len(scores.picks)]
    wrong = len(scores.said_to_fit) + len(scores.said_not_to)
    return {
        "time": {each.source: _of_errors(each.time) for each in scores.sources if each.time.rows},
        "memory": {each.source: _of_errors(each.memory) for each in scores.sources if each.memory.rows},
        "time of all rows": _of_errors(scores.time),
        "memory of all rows": _of_errors(scores.memory),
        "time averaged over sources": round(scores.time_mean or 0, 4),
        "good picks": picks,
        "wrong fits": wrong,
    }


def _of_errors(errors: Errors) -> list[float]:
    """Rows, mean absolute error, shares within 10 and 15 %."""
    return [errors.rows, *(round(share or 0, 4) for share in (errors.mean, errors.within_10, errors.within_15))]


def _short(value: float) -> float:
    return float(f"{value:.4g}")
