"""What a part says as plain values, for tests that hold two readers to each other."""

import dataclasses
from typing import Any

from hpc_gpt.reader.lines.part import Part
from hpc_gpt.reader.lines.steps import StepTable


def comparable(part: Part) -> dict[str, Any]:
    """Every field of a part; a NaN equals a NaN, and 1 is not 1.0."""
    found = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    found["steps"] = {name: _plain(steps) for name, steps in part.steps.items()}
    return {name: _sorted(value) for name, value in found.items()}


def _plain(steps: StepTable) -> dict[str, Any]:
    columns = {name: column.tolist() for name, column in steps.columns.items()}
    totals = dict(sorted(steps.totals.items()))
    return {"columns": columns, "line": steps.line.tolist(), "stride": steps.stride, "count": steps.count} | totals


def _sorted(value: Any) -> str:
    """Return the value as text, in which NaN equals NaN; a dict in the order of its keys."""
    if isinstance(value, dict):
        return repr(sorted((repr(key), repr(each)) for key, each in value.items()))
    return repr(value)
