"""The summary: the GPU hours, and the failures by cause."""

from dataclasses import replace

import numpy as np

from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.notes import notes_of_page
from hpc_gpt.report.page import build_page
from hpc_gpt.report.page.summary import failures_by_cause, gpu_hours_of, seconds_of_lines
from tests.report.page.page_runs import curve, megatron, swept_runs, usual_runs
from tests.report.step_tables import step_table


def test_hours_of_cpus_are_none_of_gpus():
    page = build_page(swept_runs()[2:])
    assert "GPU hours</dt>" not in page
    assert ">0.0100<" not in page
    assert "<dt>GPU hours</dt>" in build_page(usual_runs())
    failed = [RunRead(replace(run.record, ended=ended, gpu_hours=hours)) for run, ended, hours in
              zip(swept_runs()[1:3], ("hang", "nan"), (1.0, 9.0), strict=True)]  # fmt: skip
    assert [anomaly.runs for anomaly in notes_of_page(failed)] == [(0,), (1,)], "one of a GPU costs more"
    assert gpu_hours_of(swept_runs())["known"] == 2


def test_hours_are_lost_by_failures_and_by_steps_trained_again():
    again = RunRead(megatron(gpu_hours=100.0), curve(attempts=2))
    repeated = again.steps["step_s"][~again.steps.counts].sum() * 64 / 3600
    failed = RunRead(megatron(ended="hang", gpu_hours=20.0))
    hours = gpu_hours_of([again, failed, RunRead(megatron(gpu_hours=None))])
    assert (hours["spent"], hours["known"]) == ("120", 2)
    assert hours["lost"] == f"{20 + repeated:.1f}"
    assert hours["parts"] == f"20.0 in failed runs, {repeated:.1f} in steps trained again"
    assert gpu_hours_of([RunRead(megatron(gpu_hours=None))]) is None
    assert "<strong>228</strong> spent; none lost" in build_page([RunRead(megatron(), curve())])


def test_a_line_stands_for_the_steps_since_the_one_before_it():
    steps = step_table(step=np.array([10.0, 20, 30, 25, 35]), step_s=np.array([2.0, 2, np.nan, 2, 2]),
                       attempt=np.array([1, 1, 1, 2, 2]))  # fmt: skip
    assert seconds_of_lines(steps, 3.0).tolist() == [20, 20, 30, 20, 20]


def test_failures_are_counted_by_cause_the_costliest_first():
    runs = [RunRead(megatron(ended=ended, gpu_hours=hours)) for ended, hours in
            (("nan", 1.0), ("gpu_memory", 4.0), ("nan", 2.5), ("done", 900.0), ("walltime", 5.0))]  # fmt: skip
    assert failures_by_cause(runs) == [
        {"cause": "out of GPU memory", "runs": "1", "hours": "4.00"},
        {"cause": "NaN loss", "runs": "2", "hours": "3.50"},
    ]
