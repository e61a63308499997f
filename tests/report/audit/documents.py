"""Documents and runs that the audit's tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.audit import audit
from hpc_gpt.runs.record import Record
from tests.report.step_tables import step_table

EXCERPT = Path(__file__).with_name("excerpt.md")
FORMULA = "TFLOPs: `8 * model_size_in_B * seq * global_batch_size / (step_time * gpus * 1e3)`"


def audited(tmp_path, text, name="paper.md", **options):
    """The audit of a document of that text."""
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return audit(path, **options)


def findings(found):
    """Every contradiction as (line, kind, what the table says, what comes out)."""
    return [(finding.line, finding.kind, finding.said, finding.found) for finding in found.findings]


def cell(found, column, line=None):
    """How the one cell of a column ended, or that of a line."""
    cells = [each for each in found.cells if each.column == column and line in (None, each.line)]
    assert len(cells) == 1, cells
    return cells[0].outcome, cells[0].why


def table(headings, *rows):
    """A markdown table."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(each) for each in line) + " |" for line in lines) + "\n"


def run(times=(), name="run.out", **record):
    """A run whose steps took `times`, the first of them warm-up."""
    seconds = np.array(times, np.float64)
    steady = np.arange(len(seconds)) > 0
    if len(seconds) > 1:
        record.setdefault("step_s", float(np.median(seconds[1:])))
    curve = step_table(
        step=np.arange(1.0, len(seconds) + 1),
        step_s=seconds,
        attempt=np.ones(len(seconds), np.int64),
        steady=steady,
        counts=np.ones(len(seconds), np.bool_),
    )
    return RunRead(Record(**record), curve, files=[Path(name)])
