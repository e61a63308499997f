"""Figures of a step on the lines after it, many lines at once: OLMo prints each figure on a line of its own."""

import numpy as np

from hpc_gpt.reader.lines.line_kinds import LineBlock
from hpc_gpt.reader.lines.steps import NOT_FINITE, Places, StepColumn


def belong(block: LineBlock, steps: Places, more: Places) -> bool:
    """Whether lines of further figures all belong to the lines of steps before them, which one rank prints."""
    dialects = {kind.rule.dialect.name for kind in (*block.kinds_of(steps), *block.kinds_of(more))}
    plain = len(steps) and len(dialects) == 1 and block.rank is None
    return bool(plain and not any(len(block.not_finite(name, more)) for name in NOT_FINITE))


def further_figures(block: LineBlock, lines: Places, more: Places) -> dict[str, StepColumn]:
    """The figures of the lines `more` by field, each in the row of the step before it, of which the first counts."""
    columns: dict[str, StepColumn] = {}
    for field in {field for kind in block.kinds_of(more) for field in kind.fields if field != "at"}:
        having = more[block.table.has(field)[block.kinds[more]]][::-1]
        columns[field] = np.full(len(lines), np.nan)
        columns[field][np.searchsorted(lines, having, side="right") - 1] = block.column(field, having)
    return columns
