"""The JSON of the curves: what is kept of very many points, what stands beside them, and that no text ends it."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.lines.part import Failure, Place
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.loss_curve import extremes
from hpc_gpt.report.page.curves import ALL_POINTS, POINTS, curves_json
from hpc_gpt.report.page.groups import RunGroup, groups_of, varied_keys
from tests import examples
from tests.report.page.page_runs import HOSTILE, curve, megatron, swept_runs
from tests.report.step_tables import step_table

FIGURES = st.one_of(st.floats(-1e9, 1e9), st.floats(allow_nan=False), st.just(math.nan), st.just(math.inf))
# What ends a script element, begins a comment in one, or ends a line of JavaScript.
WORDS = (*HOSTILE, "</script>", "<!--<script>", "\u2028\u2029", "a\ud800b", "&lt;/script&gt;", "\\u003c/script>")


def data_of(runs, names=None):
    return json.loads(curves_json(runs, names or [f"run {at}" for at in range(len(runs))], groups_of(runs)).markup)


def test_a_short_array_is_whole_and_a_huge_spike_is_kept():
    assert extremes(np.arange(300.0), 150).tolist() == list(range(300))
    y = np.ones(1_000_000)
    y[123_456], y[777_777] = 99.0, -5.0
    kept = extremes(y, 150)
    assert len(kept) <= 300
    assert {123_456, 777_777} <= set(kept.tolist())


@given(arrays(float, st.integers(1, 400), elements=FIGURES), st.integers(1, 40))
def test_what_is_kept_has_the_extremes_in_order_and_gaps(y, buckets):
    kept = extremes(y, buckets)
    assert len(kept) <= max(2 * buckets, 1)
    level = np.ones(2 * buckets)  # as many as may be drawn, none of them an extreme
    assert extremes(level, buckets).tolist() == list(range(len(level)))
    assert (np.diff(kept) > 0).all()
    finite, drawn = y[np.isfinite(y)], y[kept][np.isfinite(y[kept])]
    if len(finite):
        assert (drawn.min(), drawn.max()) == (finite.min(), finite.max())
    gap = np.ones(30_000)
    gap[12_000:18_000] = np.nan
    assert np.isnan(gap[extremes(gap, 100)]).any()


def test_a_long_run_has_its_points_and_very_many_runs_fewer():
    (one,) = data_of([RunRead(megatron(), curve(20_000))])["runs"]
    assert POINTS / 2 < len(one["step"]) <= POINTS + 20
    assert len(one["loss"]) == len(one["step_s"]) == len(one["seconds"]) == len(one["step"])
    assert sum(one["step"]) == 20_000
    many = data_of([RunRead(megatron(), curve(2000))] * 200)["runs"]
    assert sum(len(each["step"]) for each in many) < 1.3 * ALL_POINTS


@pytest.mark.long
def test_a_thousand_runs_with_all_that_is_drawn_stay_small():
    steps, noise = np.arange(1.0, 5001), np.random.default_rng(0).random((6, 5000))
    table = step_table(
        step=steps, loss=noise[0], step_s=noise[1], memory_gib=noise[2], attempt=1 + (steps > 2500),
        eval_step=steps[::25], eval_loss=noise[3][::25], skipped=noise[4] < 0.1,
    )  # fmt: skip
    runs = [RunRead(megatron(), table)] * 1000
    assert len(curves_json(runs, ["run"] * 1000, groups_of(runs)).markup) < 5_000_000, "of the page's 8 MB"


def test_marks_are_few_and_a_missing_loss_is_no_nan():
    run = RunRead(megatron(nan_steps=3), curve(nan=(40, 60, 80), skipped=(4, 5)))
    (one,) = data_of([run])["runs"]
    assert (one["nan"], one["skipped"]) == ([40, 60, 80], [4, 5])
    assert one["evals"][0] == [20, 40, 60, 80, 100]
    assert "nan" not in data_of([replace(run, record=megatron(nan_steps=0))])["runs"][0]
    (long,) = data_of([RunRead(megatron(), curve(5000, skipped=tuple(range(1, 4000))))])["runs"]
    assert len(long["skipped"]) == 200


def test_memory_and_a_rate_the_script_cannot_compute_are_there():
    steps = step_table(step=np.arange(1.0, 4), loss=np.ones(3), memory_gib=np.array([1.0, 2, 3]),
                       tokens_per_s=np.full(3, 800.0))  # fmt: skip
    (one,) = data_of([RunRead(Record(gpus=8), steps)])["runs"]
    assert (one["memory"], one["rate"]) == ([1, 2, 3], [100, 100, 100])
    # Seconds are to the millisecond, whole ones beyond some hours, so that the last is right.
    for step_s, seconds in ((0.12345, [0.123, 0.124, 0.123]), (6000.4, [6000, 6001, 6000])):
        (one,) = data_of([RunRead(Record(), replace(steps, columns={**steps.columns, "step_s": np.full(3, step_s)}))])[
            "runs"
        ]
        assert one["seconds"] == seconds


def test_groups_are_models_sweeps_experiments_most_runs_first():
    """Not those of one run, nor what differs in runs of several sweeps; of what a sweep varies at most three keys."""
    runs = []
    of_each = ((1e6, "a", 0, "1"), (1e6, "b", 1, "3"), (2e6, "b", 1, "2"), (None, "c", 0, "4"), (2e6, "c", 0, "0"))
    for params, name, sweep, started in (*of_each, (2e6, "d", 2, "")):
        place = len(runs)
        varied = {
            "train": {"lr": place, "seed": place, "wd": place, "beta": place},
            "environment": {"x": place},
            "list": [place],
        }
        settings = (
            {"sweep": {"name": f"s{sweep}", "row": str(place)}, "name": str(place), "one": 1, **varied} if sweep else {}
        )
        runs.append(RunRead(Record(params=params, seq=8, name=name, started=started, settings=settings)))
    sizes = [f"{size}.0M parameters, sequence 8" for size in (1, 2)]
    assert groups_of(runs) == [
        RunGroup("model", sizes[1], (2, 4, 5)), RunGroup("model", sizes[0], (0, 1)),
        RunGroup("model", "runs of an unknown model", (3,)),
        RunGroup("sweep", "sweep s1", (1, 2), ("train.lr", "train.seed", "train.wd")),
        RunGroup("experiment", "experiment c", (3, 4)),
        RunGroup("all", "all runs", (0, 1, 2, 3, 4, 5)),
    ]  # fmt: skip
    values = [
        replace(run.record, settings={"a": at % 2, "b": at, "c": at // 3, "d": at}) for at, run in enumerate(runs)
    ]
    assert varied_keys(values) == ("b", "d", "a")
    assert data_of([*swept_runs(), swept_runs()[1]])["groups"][0]["rows"] == [], "two runs of a row keep their names"


def test_a_sweep_without_curves_has_figures_over_what_it_varies():
    swept = [RunRead(run.record) for run in swept_runs()[1:]]
    data = data_of([*swept, RunRead(megatron())])
    assert [(group["title"], group["runs"]) for group in data["groups"]] == [("sweep lr-demo", [0, 1, 2, 3])]
    assert [run["varied"] for run in data["runs"]] == [{"train.lr": rate} for rate in (1e-4, 3e-4, 1e-3, 3e-3)]
    assert data["runs"][0]["last"] == {"loss": 2.99, "step_s": 0.2, "rate": 2500, "memory": 24.9}
    assert "step" not in data["runs"][0]
    waits = [RunRead(replace(run.record, step_s=None, tokens_per_s=None, loss_last=None, memory_allocated_gib=None))
             for run in swept]  # fmt: skip
    assert data_of(waits) == {"per": "device", "groups": [], "runs": []}, "nothing of them is known yet"


@pytest.mark.parametrize("figures", [[1e300, -1e300], [5e-324, 1e308], [math.inf, 1.0]])
def test_absurd_figures_are_json(figures):
    steps = step_table(step=np.array([1.0, 1e300]), loss=np.array(figures), step_s=np.array(figures))
    json.loads(curves_json([RunRead(megatron(), steps)], ["a"], []).markup)


@settings(max_examples=examples(50))
@given(st.one_of(st.text(max_size=60), st.sampled_from(WORDS)))
def test_no_text_of_a_log_ends_the_json_or_begins_markup(text):
    attempts = [{"attempt": 1, "ended": text, "cause": text}, {"attempt": 2}]
    record = megatron(name=text, run=text, attempts=attempts, settings={"sweep": {"name": text or "x", "row": "1"}})
    runs = [RunRead(record, curve(20, 2), [Failure("error", text, Place(text, 1))], [Path("a")])] * 2
    markup = curves_json(runs, [text, text], groups_of(runs)).markup
    assert markup.isascii()
    assert not set("<>&\n") & set(markup)
    assert json.loads(markup)["runs"][0]["place"] == 0
