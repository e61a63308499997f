"""Logs in the form of public ones, and their true fields, written before they were read: none may be read wrong.

They have the lines of their programs, with each rare form, and values, hosts and paths of our own. `truth/NAME.json`
has `seen` (the public place where the form was seen), `record` (fields that the log prints, or that follow), `within`
(field -> share by which it may differ, beyond rounding) and `absent` (fields that no such log gives).
"""

import functools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.report.gather import gather_paths

TRUTH = sorted((Path(__file__).parent / "truth").glob("*.json"))
_ROUNDED = {"step_s": 0.03, "tflops_printed": 0.03}
_FEWEST_RIGHT = 0.95
_LARGEST = 4096  # bytes of an excerpt


@functools.cache
def read(truth: Path) -> tuple[dict[str, Any], Any]:
    """Return (what is true, the record of the last run in the log)."""
    records = gather_paths([str(truth.with_suffix(".log"))], Path("/nowhere")).records
    return json.loads(truth.read_text()), records[-1] if records else None


def is_right(value: Any, true: Any, share: float) -> bool:
    value = max(value) if isinstance(value, list) else value
    return value == true if isinstance(true, str) else math.isclose(value, true, rel_tol=share, abs_tol=1e-9)


@pytest.mark.parametrize("truth", TRUTH, ids=lambda path: path.stem)
def test_nothing_is_wrong(truth: Path) -> None:
    true, record = read(truth)
    assert truth.with_suffix(".log").stat().st_size < _LARGEST
    assert record is not None
    for name, value in true["record"].items():
        found = getattr(record, name)
        share = true.get("within", {}).get(name, _ROUNDED.get(name, 0.0 if isinstance(value, int) else 0.011))
        assert found in (None, [], "unknown") or is_right(found, value, share), (name, found, record.sources.get(name))
    for name in true["absent"]:
        assert record.to_tables()[name] in (None, []), (name, record.sources.get(name))  # null for NaN


def test_nearly_all_is_read() -> None:
    fields = [(record, name) for true, record in map(read, TRUTH) for name in true["record"]]
    missed = [(record.run, name) for record, name in fields if getattr(record, name) in (None, [])]
    assert len(missed) <= (1 - _FEWEST_RIGHT) * len(fields), missed
