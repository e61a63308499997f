"""The drawings: what they mark, what they say of themselves, and that they are whole."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import numpy as np

from hpc_gpt.readers.runs import RunRead
from hpc_gpt.readers.steps import StepTable
from hpc_gpt.report.page.anomalies import trained_again
from hpc_gpt.report.page.details import overlaid, run_figures, samples
from hpc_gpt.runs.record import Record
from tests.report.page.page_runs import HOSTILE, curve, megatron
from tests.report.step_tables import step_table


def drawn(figure):
    return ElementTree.fromstring(figure.chart.markup)


def found(figure, name):
    return [one for one in drawn(figure).iter() if name in one.get("class", "").split()]


def legend(figure):
    return [words for _, words in figure.legend]


def test_a_run_gives_its_loss_and_its_step_time():
    loss, seconds = run_figures(RunRead(megatron(), curve()), "demo", "run-1")
    assert drawn(loss).find("title").text == "Loss over steps, demo"
    assert drawn(seconds).find("title").text == "Step time over steps, demo"
    assert "from 11.77 at step 1 to 6.0" in drawn(loss).find("desc").text
    assert "12 evaluation" not in legend(loss)
    assert "evaluation" in legend(loss)
    assert len(found(loss, "point")) == 5
    assert "median of the steady steps 129 s, band: 10th to 90th percentile 127 to 131 s" in legend(seconds)
    assert len(found(seconds, "band")) == 1


def test_restarts_are_lines_with_their_attempts_and_what_was_trained_again_is_another_line():
    run = RunRead(megatron(), curve(attempts=3))
    loss, _ = run_figures(run, "demo", "run-1")
    assert len(found(loss, "restart")) == 2
    assert [one.text for one in drawn(loss).iter("text") if (one.text or "").startswith("attempt")] == [
        "attempt 2",
        "attempt 3",
    ]
    assert "Attempt 2 starts at step 29; attempt 3 starts at step 62." in drawn(loss).find("desc").text
    assert len(found(loss, "line")) == 5
    assert len(found(loss, "again")) == 2
    assert trained_again(run.steps) == 10


def test_skipped_and_nan_steps_are_marked_and_told():
    run = RunRead(megatron(nan_steps=3), curve(nan=(40, 60, 80), skipped=(4, 5)))
    loss, seconds = run_figures(run, "demo", "run-1")
    assert {"skipped steps (2)", "steps with no finite loss (3)"} <= set(legend(loss))
    assert len(found(loss, "skipped")) == 1
    assert found(loss, "nan")[0].get("d").count("M") == 3
    assert found(loss, "line")[0].get("d").count("M") == 4, "the line is broken at the NaN"
    assert "3 steps with no finite loss, the first at step 40." in drawn(loss).find("desc").text
    assert not found(seconds, "nan")


def test_a_loss_that_is_only_missing_is_a_gap_and_no_nan():
    loss, _ = run_figures(RunRead(megatron(nan_steps=0), curve(nan=(40,))), "demo", "run-1")
    assert not found(loss, "nan")


def test_a_long_path_is_whole():
    loss, _ = run_figures(RunRead(megatron(), curve(5000)), "demo", "run-1")
    path = found(loss, "line")[0].get("d")
    assert 250 < path.count(" ") <= 300
    assert re.fullmatch(r"M[\d. L]+", path)
    assert float(path.rpartition("L")[2].split()[0]) > 380, "it goes to the end of the axis"


def test_several_runs_stand_over_one_another_with_words_and_dashes_apart():
    runs = [RunRead(megatron(), curve(seed=seed)) for seed in range(3)]
    loss, seconds = overlaid(runs, ["a", "b", "c"], "all")
    assert legend(loss) == legend(seconds) == ["a", "b", "c"]
    assert [one.get("class") for one in found(loss, "line")] == ["line s0", "line s1", "line s2"]
    assert overlaid(runs[:1], ["a"], "all") == []


def test_runs_of_very_different_length_get_a_logarithmic_axis_of_steps():
    runs = [RunRead(megatron(), curve(steps)) for steps in (50, 5000)]
    assert "step, log scale" in overlaid(runs, ["a", "b"], "all")[0].chart.markup


def test_hostile_words_stay_words():
    for text in HOSTILE:
        for figure in run_figures(RunRead(megatron(), curve()), text, "run-1"):
            assert drawn(figure).find("title").text == f"{figure.caption}, {text}"
            assert {one.tag for one in drawn(figure).iter()} <= {
                "svg",
                "title",
                "desc",
                "path",
                "text",
                "rect",
                "circle",
            }


def test_ten_steps_of_the_curve_stand_in_for_it():
    told = samples(curve(attempts=2, skipped=(1,)))
    assert told["headings"] == ("Step", "Attempt", "Loss", "Step s", "Gradient norm", "Skipped")
    assert len(told["lines"]) == 10
    assert told["lines"][0][0] == "1"
    assert told["lines"][-1][0] == "100"
    assert samples(StepTable())["lines"] == []


def test_a_curve_of_steps_alone_or_of_nothing_draws_nothing():
    assert run_figures(RunRead(Record(), step_table()), "demo", "run-1") == []
    assert run_figures(RunRead(Record(), step_table(step=np.arange(5.0))), "demo", "run-1") == []


def test_a_curve_of_loss_alone_draws_it_whatever_else_is_missing():
    line = step_table(step=np.arange(1.0, 4), loss=np.array([3.0, np.inf, 1.0]))
    (loss,) = run_figures(RunRead(Record(nan_steps=1), line), "demo", "run-1")
    assert "steps with no finite loss (1)" in legend(loss)
    assert len(found(loss, "dot")) == 1
    absurd = step_table(step=np.array([1.0, 1e300, np.nan]), loss=np.array([1e300, -1e300, 1.0]))
    assert run_figures(RunRead(Record(), absurd), "demo", "run-1")


def test_a_mean_over_the_whole_run_is_not_called_a_median_of_steady_steps():
    _, seconds = run_figures(RunRead(megatron(step_s_p10=None, step_s_p90=None), curve()), "demo", "run-1")
    assert "step_s, 129 s" in legend(seconds)


def test_steps_are_counted_in_whole_numbers():
    loss, _ = run_figures(RunRead(megatron(), curve(3)), "demo", "run-1")
    assert [one.text for one in drawn(loss).iter("text") if one.get("text-anchor") == "middle"] == ["1", "2", "3"]


def test_a_log_of_very_many_attempts_stays_a_small_drawing():
    line = curve(100_000)
    mixed = replace(line, attempt=np.arange(len(line)) % 7 + 1)
    loss, seconds = run_figures(RunRead(megatron(), mixed), "demo", "run-1")
    assert len(loss.chart.markup) + len(seconds.chart.markup) < 60_000
    several = curve(100_000, attempts=90)
    loss, seconds = run_figures(RunRead(megatron(), several), "demo", "run-1")
    assert len(loss.chart.markup) + len(seconds.chart.markup) < 90_000
    assert max(float(spot) for spot in re.findall(r"L([\d.]+) ", loss.chart.markup)) > 380
