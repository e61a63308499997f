"""Runs in a notebook: a table and their curves of the loss, without a script, which notebooks drop."""

from collections.abc import Sequence

import numpy as np

from hpc_gpt.columns import filled, grid
from hpc_gpt.readers.runs import RunRead
from hpc_gpt.report.page.charts import ChartSeries, has_curve, line_chart
from hpc_gpt.report.page.svg import element, escaped
from hpc_gpt.report.tables import COLUMNS

_STYLE = (
    ".hpc-gpt text{font:11px sans-serif;fill:currentColor}.hpc-gpt path{fill:none;stroke:#888}"
    ".hpc-gpt svg{max-width:40em}.hpc-gpt .grid{opacity:.3}.hpc-gpt .line{stroke-width:1.5}"
)
_COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#bf3989", "#0a7ea4", "#57606a")


def runs_html(runs: Sequence[RunRead]) -> str:
    """The table of the runs' records, and a chart of the loss of the first that have one, in the table's colours."""
    records = [run.record for run in runs]
    table, drawn = grid(filled(COLUMNS, records), records), [run for run in runs if has_curve(run)][: len(_COLOURS)]
    colours = {id(run): colour for run, colour in zip(drawn, _COLOURS, strict=False)}
    rows = [element("tr", "".join(element("th", escaped(each) or " ") for each in ("", *table.headings)))]
    for run, cells in zip(runs, table.lines, strict=True):
        key = element("td", "&#9679;", style=f"color:{colours.get(id(run), 'transparent')}")
        rows.append(element("tr", key + "".join(element("td", escaped(cell)) for cell in cells)))
    style = _STYLE + "".join(f".hpc-gpt .s{place}{{stroke:{colour}}}" for place, colour in enumerate(_COLOURS))
    return element("div", element("style", style) + element("table", "".join(rows)) + _curve(drawn), class_="hpc-gpt")


def _curve(runs: Sequence[RunRead]) -> str:
    """The curves of the loss as a drawing that stands still; the only place that asks the page's charts for one."""
    series = []
    for place, run in enumerate(runs):
        steps = run.steps.take(np.isfinite(run.steps["step"]))
        series.append(ChartSeries(steps["step"], steps["loss"], steps.attempt, ~steps.counts, place))
    names = ", ".join(str(run.record.run) for run in runs)
    return line_chart("loss", f"loss by step of {names}", "loss", series, "hpc-gpt-loss").markup if series else ""
