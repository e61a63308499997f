"""What the planner said of a run when it was submitted: predicted.json."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hpc_gpt.runs.record import Record
from hpc_gpt.runs.run_folder import PREDICTED, RunFolder
from hpc_gpt.small_files import read_json


def with_prediction(record: Record, run: RunFolder) -> Record:
    """The record with the memory of each stage and the step time as predicted; null where the planner was not asked,
    or the file is damaged."""
    tables = read_json(run.path / PREDICTED)
    sources = dict(record.sources)
    stages = _table(tables.get("memory_gib")).get("stages")
    allocated = [_size(_table(stage).get("allocated")) for stage in (stages if isinstance(stages, list) else [])]
    memory = [figure for figure in allocated if figure is not None]
    step_s = _size(_table(tables.get("step")).get("step_s"))
    if memory and len(memory) == len(allocated):
        record = replace(record, predicted_memory_gib=memory)
        sources["predicted_memory_gib"] = f"{PREDICTED}, allocated at the peak"
    if step_s is not None:
        by = "the profile's calibration" if tables.get("calibrated") is True else "data sheets"
        record = replace(record, predicted_step_s=step_s)
        sources["predicted_step_s"] = f"{PREDICTED}, by {by}"
    return replace(record, sources=sources)


def _table(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _size(value: Any) -> float | None:
    """A figure above 0, as JSON has it."""
    sound = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e15
    return float(value) if sound else None
