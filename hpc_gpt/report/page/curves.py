"""The curves of all runs as one JSON, which the page's script draws: thinned, so that a page of many runs stays small.

    {"per": "GPU",
     "groups": [{"title", "runs": [0, 2], "models": 1, "varied": ["train.lr"], "rows": ["lr=0.001", "lr=0.003"]}],
     "runs": [{"name", "place", "tokens", "gpus", "step": [...], "loss": [...], …}]}

`rows`: the names of a sweep's rows, if no two are alike. `step` and `seconds` are differences from one point to the
next; all others are figures, null for none. The text in it comes from anybody's logs: no character of it can end the
element that holds it, or begin markup.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines.steps import StepTable
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.loss_curve import Points, extremes
from hpc_gpt.report.notes import ended_text
from hpc_gpt.report.page.groups import RunGroup, model_of, switches_of
from hpc_gpt.report.page.run_table import rate_per, tokens_per_s_gpu
from hpc_gpt.report.page.summary import seconds_of_lines
from hpc_gpt.report.published_tables import sweep_of
from hpc_gpt.report.svg import Svg, number, safe
from hpc_gpt.report.tables import peak_memory_gib

POINTS, LEAST_POINTS, ALL_POINTS = 2000, 60, 100_000  # per run, per run among very many, of all runs together
MOST_MARKS = 200  # evaluations, skipped steps and NaN steps per run; fewer if there are many runs
_EARLY = 20
_FARTHEST = 1e15


def curves_json(
    runs: Sequence[RunRead], names: Sequence[str], groups: Sequence[RunGroup], shown: Callable[[str], str] = str
) -> Svg:
    """The JSON of the runs that have a curve, or a figure to draw over a key that a sweep varies.

    `shown` turns a text into its form on the page.
    """
    keys: dict[int, dict[str, None]] = defaultdict(dict)
    for group in groups:
        for place in group.places:
            keys[place] |= dict.fromkeys(group.varied)
    varied = {place: _figures_of(runs[place].record, of_run) for place, of_run in keys.items()}
    curved = [has_curve(run) for run in runs]
    places = [at for at, run in enumerate(runs) if curved[at] or (varied.get(at) and _last(run.record))]
    most = max(LEAST_POINTS, min(POINTS, ALL_POINTS // max(1, len(places))))
    number_of = {place: at for at, place in enumerate(places)}
    drawn = []
    for group in groups:
        if of_group := [at for at in group.places if curved[at] or (group.varied and at in number_of)]:
            about = _group(group, [runs[place].record for place in of_group], shown)
            drawn.append({**about, "runs": [number_of[place] for place in of_group]})
    tables = {
        "per": rate_per(run.record for run in runs),
        "groups": drawn,
        "runs": [_curve(runs[at], shown(names[at]), at, most, varied.get(at, {}), shown) for at in places],
    }
    text = json.dumps(tables, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return Svg(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def has_curve(run: RunRead) -> bool:
    """Whether the run has a loss or a step time of a numbered step."""
    numbered = np.isfinite(run.steps["step"])
    return bool((numbered & (np.isfinite(run.steps["loss"]) | np.isfinite(run.steps["step_s"]))).any())


def drawable(steps: StepTable) -> StepTable:
    """Only the lines whose step is a number."""
    return steps.take(np.isfinite(steps["step"]) & (abs(np.nan_to_num(steps["step"])) < _FARTHEST))


def attempt_starts(run: RunRead, steps: StepTable) -> list[tuple[int, str]]:
    """Returns (index of the first line, "attempt 2 after node failure: …") of every attempt after the first."""
    ends = {attempt.get("attempt"): attempt for attempt in run.record.attempts or ()}
    starts = []
    for at in (np.flatnonzero(steps.attempt[1:] != steps.attempt[:-1]) + 1).tolist():
        before, text = ends.get(int(steps.attempt[at - 1]), {}), f"attempt {steps.attempt[at]}"
        if before.get("ended"):
            text += f" after {ended_text(str(before['ended']))}"
        if before.get("cause"):
            text += f": {safe(before['cause'], 200)}"
        starts.append((at, text))
    return starts


def _group(group: RunGroup, records: Sequence[Record], shown: Callable[[str], str]) -> dict[str, Any]:
    rows = [shown(safe(row[1], 60)) for record in records if group.varied and (row := sweep_of(record))]
    about = {"title": shown(group.title), "models": len({model_of(record) for record in records})}
    return {**about, "varied": list(group.varied), "rows": rows if len(set(rows)) == len(records) else []}


def _curve(
    run: RunRead, name: str, place: int, most: int, varied: dict[str, float], shown: Callable[[str], str]
) -> dict[str, Any]:
    record, steps = run.record, drawable(run.steps)
    batch, seq, gpus = number(record.global_batch), number(record.seq), number(record.gpus)
    figures = {"loss": steps["loss"], "step_s": steps["step_s"], "memory": steps["memory_gib"]}
    if not (batch and seq and gpus and np.isfinite(steps["step_s"]).any()):  # else the script computes it
        rates = steps["tokens_per_s"] / gpus if gpus else np.full(len(steps), np.nan)
        figures["rate"] = np.where(np.isfinite(steps["tokens_per_s_gpu"]), steps["tokens_per_s_gpu"], rates)
    figures = {key: values for key, values in figures.items() if np.isfinite(values).any()}
    marks = min(MOST_MARKS, most // 3)
    starts = attempt_starts(run, steps)[:marks]
    # A logarithmic axis shows more of the beginning.
    indexes = np.unique(np.geomspace(1, len(steps), _EARLY).astype(int) - 1) if len(steps) else np.zeros(0, int)
    for values in figures.values():
        indexes = np.union1d(indexes, extremes(values, max(1, most // (2 * len(figures)))))
    indexes = np.union1d(indexes, np.array([at for at, _ in starts], int)).astype(int)
    evaluated = np.flatnonzero(np.isfinite(steps.eval_loss) & (abs(steps.eval_step) < _FARTHEST))
    nan = steps["step"][~np.isfinite(steps["loss"]) & ~steps.is_skipped] if number(record.nan_steps) else np.zeros(0)
    curve_json: dict[str, Any] = {
        "name": name,
        "place": place,
        "tokens": batch * seq if batch and seq else None,
        "gpus": gpus,
        "step": _differences(steps["step"][indexes]),
        "seconds": _differences(_elapsed(steps, number(record.step_s))[indexes]),
        **{key: _rounded(values[indexes]) for key, values in figures.items()},
        "starts": [[int(np.searchsorted(indexes, at)), shown(text)] for at, text in starts],
        "evals": [_rounded(values[_few(evaluated, marks)], 10) for values in (steps.eval_step, steps.eval_loss)],
        "skipped": _rounded(_few(steps["step"][steps.is_skipped], marks), 10),
        "nan": _rounded(_few(nan, marks), 10),
        "last": _last(record),
        "varied": varied,
    }
    return {key: value for key, value in curve_json.items() if value not in (None, [], {}, [[], []])}


def _last(record: Record) -> dict[str, float]:
    """The figures of the whole run by kind of chart."""
    last = {"loss": record.loss_last, "step_s": record.step_s, "rate": tokens_per_s_gpu(record),
            "memory": peak_memory_gib(record)[0]}  # fmt: skip
    return {kind: figure for kind, value in last.items() if (figure := number(value)) is not None}


def _figures_of(record: Record, keys: Iterable[str]) -> dict[str, float]:
    """The values of those settings that are numbers."""
    settings = switches_of(record) if keys else {}
    return {key: figure for key in keys if (figure := number(settings.get(key))) is not None}


def _few(values: NDArray[Any], most: int) -> NDArray[Any]:
    """At most `most` of the values, evenly spread."""
    return values if len(values) <= most else values[np.linspace(0, len(values) - 1, most).astype(int)]


def _elapsed(steps: StepTable, usual: float | None) -> Points:
    """Seconds of training up to every line, (n,), with the steps trained again; all NaN if no time is known."""
    seconds = seconds_of_lines(steps, usual) if len(steps) else np.zeros(0)
    timed = np.isfinite(seconds)
    if not timed.any():
        return np.full(len(steps), np.nan)
    elapsed: Points = np.cumsum(np.where(timed, seconds, float(np.median(seconds[timed]))))
    return elapsed


def _rounded(values: Points, digits: int = 4) -> list[float | None]:
    """The figures rounded to so many digits, whole ones as int; None for one that is not finite."""
    rounded = [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values.tolist()]
    return [
        int(figure) if figure is not None and figure.is_integer() and abs(figure) < _FARTHEST else figure
        for figure in rounded
    ]


def _differences(values: Points) -> list[float | None]:
    """The first value, then the differences, in whole numbers or thousandths; empty if a value is not finite."""
    if not np.isfinite(values).all() or not len(values) or abs(values).max() > _FARTHEST:
        return []
    digits = 0 if float(values.max()) >= 10_000 or (values % 1 == 0).all() else 3
    return _rounded(np.diff(np.round(values, digits), prepend=0.0), 12)
