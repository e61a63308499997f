"""Runs in a notebook: a table and their curves of the loss, without a script, which notebooks drop."""

from collections.abc import Sequence

import numpy as np

from hpc_gpt.columns import filled, grid
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.loss_curve import LINE_COLOURS, loss_curve
from hpc_gpt.report.svg import element, escaped
from hpc_gpt.report.tables import COLUMNS


def runs_html(runs: Sequence[RunRead]) -> str:
    """The table of the runs' records, and a chart of the loss of the first that have one, in the table's colours."""
    records = [run.record for run in runs]
    table = grid(filled(COLUMNS, records), records)
    drawn = [run for run in runs if np.isfinite(run.steps["loss"]).any()][: len(LINE_COLOURS)]
    colours = {id(run): colour for run, colour in zip(drawn, LINE_COLOURS, strict=False)}
    rows = [element("tr", "".join(element("th", escaped(each) or " ") for each in ("", *table.headings)))]
    for run, cells in zip(runs, table.lines, strict=True):
        key = element("td", "&#9679;", style=f"color:{colours.get(id(run), 'transparent')}")
        rows.append(element("tr", key + "".join(element("td", escaped(cell)) for cell in cells)))
    return element("div", element("table", "".join(rows)) + _curve(drawn), class_="hpc-gpt")


def _curve(runs: Sequence[RunRead]) -> str:
    """The curves of the loss as a drawing that stands still."""
    if not runs:
        return ""
    steps = [(str(run.record.run), run.steps.take(run.steps.counts)) for run in runs]
    curves = [(name, each["step"], each["loss"]) for name, each in steps]
    names = ", ".join(name for name, _ in steps)
    return loss_curve(curves, f"loss by step of {names}", "hpc-gpt-loss").markup
