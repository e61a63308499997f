"""Step tables, made from columns and marks."""

from typing import Any

import numpy as np

from hpc_gpt.reader.lines.steps import STEP_COLUMNS, StepTable


def step_table(**given: Any) -> StepTable:
    """A table of the columns and the other arrays named; `skipped` may be a mask."""
    columns = {name: np.asarray(given.pop(name), np.float64) for name in STEP_COLUMNS if name in given}
    return StepTable(columns, **given)
