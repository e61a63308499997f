"""Predicted beside measured, run by run: how good the planner's predictions turned out.

An error is predicted / measured - 1. The step time is the record's, the memory the peak that PyTorch allocated on the
stage that holds most, as predicted.json and the ranks have them.
"""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields

from hpc_gpt.report.columns import NOTHING, share_off, show_digits, show_name, show_seconds, show_share
from hpc_gpt.report.grid import Grid
from hpc_gpt.report.tables import csv_cell
from hpc_gpt.runs.record import SCHEMA, Record, finite


@dataclass(frozen=True)
class Prediction:
    """One run's figures; None where there is none."""

    name: str | None
    run: str | None
    layout: str | None
    device: str | None
    step_s: float | None
    predicted_step_s: float | None
    step_error: float | None
    memory_gib: float | None
    predicted_memory_gib: float | None
    memory_error: float | None


@dataclass(frozen=True)
class Mean:
    """Mean absolute errors, and over how many runs each is taken."""

    step_error: float | None
    step_runs: int
    memory_error: float | None
    memory_runs: int


def predictions_of(records: Sequence[Record]) -> list[Prediction]:
    """A line for each record of which anything was predicted."""
    return [_prediction(each) for each in records if each.predicted_step_s or each.predicted_memory_gib]


def mean_of(lines: Sequence[Prediction]) -> Mean:
    """Over the runs that measured what was predicted."""
    steps = [abs(line.step_error) for line in lines if line.step_error is not None]
    memory = [abs(line.memory_error) for line in lines if line.memory_error is not None]
    return Mean(_mean(steps), len(steps), _mean(memory), len(memory))


def _prediction(record: Record) -> Prediction:
    layout = "-".join(f"{axis}{getattr(record, axis)}" for axis in ("tp", "pp", "dp") if getattr(record, axis))
    memory, planned = _most(record.memory_allocated_gib), _most(record.predicted_memory_gib)
    # A CPU's steps say nothing of what was predicted of a GPU.
    step_s = record.step_s if record.device is not None else None
    return Prediction(
        name=record.name,
        run=record.run,
        layout=layout or None,
        device=record.device,
        step_s=record.step_s,
        predicted_step_s=record.predicted_step_s,
        step_error=share_off(record.predicted_step_s, step_s),
        memory_gib=memory,
        predicted_memory_gib=planned,
        memory_error=share_off(planned, memory),
    )


def _most(figures: Sequence[float | None] | None) -> float | None:
    known = [figure for figure in figures or () if figure is not None and math.isfinite(figure)]
    return max(known) if known else None


def _mean(errors: Sequence[float]) -> float | None:
    return sum(errors) / len(errors) if errors else None


_HEADINGS = ("run", "layout", "device", "s/step", "predicted", "error", "GiB", "predicted", "error")


def _grid(lines: Sequence[Prediction]) -> Grid:
    mean = mean_of(lines)
    cells = [
        (
            show_name(Record(name=line.name, run=line.run)),
            line.layout or NOTHING,
            line.device or NOTHING,
            show_seconds(line.step_s),
            show_seconds(line.predicted_step_s),
            show_share(line.step_error, "+"),
            show_digits(line.memory_gib),
            show_digits(line.predicted_memory_gib),
            show_share(line.memory_error, "+"),
        )
        for line in lines
    ]
    words = f"mean of {mean.step_runs} and {mean.memory_runs}, without sign"
    last = (words, "", "", "", "", show_share(mean.step_error), "", "", show_share(mean.memory_error))
    return Grid(_HEADINGS, [heading not in ("run", "layout", "device") for heading in _HEADINGS], [*cells, last])


def as_table(lines: Sequence[Prediction]) -> str:
    """Aligned, the mean last; nothing where nothing was predicted."""
    return _grid(lines).aligned() if lines else ""


def as_markdown(lines: Sequence[Prediction]) -> str:
    """The same as a markdown table."""
    return _grid(lines).markdown()


def as_csv(lines: Sequence[Prediction]) -> str:
    """A heading per key, figures in full; an empty cell where there is none, and no mean."""
    text = io.StringIO()
    keys = [entry.name for entry in fields(Prediction)]
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([[csv_cell(getattr(line, key)) for key in keys] for line in lines])
    return text.getvalue()


def as_json(lines: Sequence[Prediction]) -> str:
    """`{"schema": 1, "predictions": [...], "mean": {...}}`."""
    page = {"schema": SCHEMA, "predictions": [asdict(line) for line in lines], "mean": asdict(mean_of(lines))}
    return json.dumps(finite(page), indent=1, allow_nan=False) + "\n"


def as_jsonl(lines: Sequence[Prediction]) -> str:
    """One JSON object a line, and no mean."""
    return "".join(json.dumps(finite(asdict(line)), allow_nan=False) + "\n" for line in lines)


PREDICTION_FORMATS: dict[str, Callable[[Sequence[Prediction]], str]] = {
    "table": as_table,
    "csv": as_csv,
    "md": as_markdown,
    "json": as_json,
    "jsonl": as_jsonl,
}
