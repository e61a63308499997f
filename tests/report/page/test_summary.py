"""The summary: which run is best among which others, the GPU hours, the failures by cause; and the layouts compared."""

from dataclasses import replace

import numpy as np
import pytest

from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.reader.records import RunRead
from hpc_gpt.report.page import build_page
from hpc_gpt.report.page.anomalies import rank_anomalies
from hpc_gpt.report.page.run_table import layouts_of
from hpc_gpt.report.page.summary import best_runs, failures_by_cause, gpu_hours_of, seconds_of_lines
from tests.report.page.page_runs import curve, megatron, swept_runs, usual_runs
from tests.report.step_tables import step_table


def best(*runs):
    return best_runs(runs, rank_anomalies(runs))


def test_the_best_by_mfu_and_by_rate_of_one_model_and_sequence():
    fast = RunRead(megatron(tokens_per_s=9000.0, mfu=0.31, pp=8, dp=2))
    groups, notes = best(RunRead(megatron()), fast)
    (group,) = groups
    assert (group["title"], group["runs"]) == ("52.0B parameters, sequence 1,024", 2)
    assert (group["by_mfu"]["place"], group["by_mfu"]["figure"]) == (0, "32.7%")
    assert (group["by_tokens"]["place"], group["by_tokens"]["figure"]) == (1, "141")
    assert group["by_tokens"]["about"] == "tp4-pp8-dp2, 64 v100-32g, fp16"
    assert notes == []
    assert best(fast, fast)[0][0]["by_mfu"]["place"] == 0, "the first of equals"


@pytest.mark.parametrize("change", [{"params": 7_000_000_000}, {"seq": 2048}])
def test_runs_that_are_not_comparable_are_not_ranked_together(change):
    groups, _ = best(RunRead(megatron()), RunRead(megatron(**change, tokens_per_s=1e5)))
    assert len(groups) == 2
    assert {group["runs"] for group in groups} == {1}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"seq": None}, "1 run whose model size or sequence length is not known"),
        ({"mfu": 1.4, "flags": [Flag("faster than the peak of v100-32g", "above_peak")]},
         "1 run with figures in doubt"),
    ],
)  # fmt: skip
def test_a_run_that_cannot_be_ranked_is_not_the_best(change, why):
    groups, notes = best(RunRead(megatron()), RunRead(megatron(**change, tokens_per_s=1e6)))
    assert [group["by_tokens"]["place"] for group in groups] == [0]
    assert notes == [why]
    page = build_page([RunRead(megatron(**change))])
    assert f"No runs are ranked: {why}." in page


def test_scripts_of_unknown_size_are_ranked_by_what_is_known():
    def script(name: str, step_s: float | None, **more) -> RunRead:
        sizes = {"params": None, "seq": None, "mfu": None, "tokens_per_s": None, "tokens_per_s_gpu": None}
        return RunRead(megatron(name=name, step_s=step_s, **(sizes | more)))

    runs = [script("a", 2.0), script("a", 0.5), script("a", 0.1, gpus=8), script("b", 0.2), script("a", None)]
    (group,), notes = best(*runs)
    assert (group["title"], group["runs"], notes) == ("runs of a, 64 v100-32g", 2, [])
    assert (group["by_step"]["place"], group["by_step"]["figure"], group["by_tokens"]) == (1, "0.500 s a step", None)
    assert "Shortest step</dt><dd><strong>0.500 s a step</strong>" in build_page(runs)
    groups, notes = best(*runs, RunRead(megatron()), script("c", 1.0, seq=1024, tokens_per_s=9e5))
    assert [each["title"] for each in groups] == ["52.0B parameters, sequence 1,024", "runs of a, 64 v100-32g"]
    assert notes == ["1 run whose model size or sequence length is not known"]
    page = build_page([*runs, RunRead(megatron(mfu=0.2, tokens_per_s=9e3)), RunRead(megatron())])
    tiles = page.split('<dl class="tiles">')[1].split("</dl>")[0]
    assert tiles.count("52.0B parameters, sequence 1,024</span>") == 2, "each tile says of which group its best is"


def test_runs_are_ranked_on_any_device_and_by_rate_without_peak():
    other = RunRead(megatron(device="mi300x", mfu=None, tokens_per_s=9000.0))
    (group,), notes = best(RunRead(megatron()), other)
    assert (group["by_tokens"]["place"], group["by_mfu"]["place"], notes) == (1, 0, [])
    groups, notes = best(*swept_runs())
    assert [group["by_tokens"]["place"] for group in groups] == [4, 0], "the newest model first"
    assert (groups[0]["by_tokens"]["about"], groups[0]["by_mfu"], notes) == ("tp4-pp16-dp1, 2 CPU, fp16", None, [])


def test_hours_of_cpus_are_none_of_gpus():
    page = build_page(swept_runs()[2:])
    assert "GPU hours</dt>" not in page
    assert ">0.0100<" not in page
    assert "<th>gpu_hours</th>" not in page
    assert "<th>gpu_hours</th>" in build_page(usual_runs())
    failed = [RunRead(replace(run.record, ended=ended, gpu_hours=hours)) for run, ended, hours in
              zip(swept_runs()[1:3], ("hang", "nan"), (1.0, 9.0), strict=True)]  # fmt: skip
    assert [anomaly.runs for anomaly in rank_anomalies(failed)] == [(0,), (1,)], "one of a GPU costs more"
    assert gpu_hours_of(swept_runs())["known"] == 2


def test_the_ranks_of_a_cpu_are_no_gpus():
    runs = [RunRead(replace(run.record, pp=place)) for place, run in enumerate(swept_runs()[2:])]
    (group,), _ = layouts_of(runs)
    assert group["size"].endswith("batch 1024, CPU")
    assert {line["devices"] for line in group["lines"]} == {"2 CPU"}


def test_what_is_best_is_said_once_on_a_page_of_one_model():
    page = build_page(usual_runs()[:2])
    assert 'id="best"' not in page
    assert page.count("tp4-pp16-dp1, 64 v100-32g, fp16") == 1, "the best run by both figures"
    assert 'id="best"' in build_page(usual_runs())


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


def test_layouts_are_compared_within_one_model_batch_and_device():
    groups, _ = layouts_of(usual_runs())
    assert [group["size"] for group in groups] == [
        "52.0B parameters, sequence 1024, batch 1024, v100-32g",
        "124M parameters, sequence 1024, batch 480, h100-80g",
    ]
    assert "1.5B" not in str(groups), "its one layout compares nothing"
    one = RunRead(megatron())
    for change in ({"seq": 2048}, {"global_batch": 512}, {"device": "a100-80g"}, {"params": 7_000_000_000}):
        assert layouts_of([one, RunRead(megatron(**change, pp=8, dp=2))]) == ([], 0)
    assert 'id="layouts"' not in build_page([one])


def test_layouts_beyond_sixty_lines_are_counted():
    def runs(params, rate, count):
        of = Record(params=params, seq=8, global_batch=8, gpus=1)
        return [RunRead(replace(of, tp=tp, tokens_per_s=rate - tp)) for tp in range(count)]

    large, small = runs(2 * 10**9, 100.0, 58), runs(10**9, 200.0, 5)
    shown, left = layouts_of([*small, *large])
    assert ([(group["size"][:4], len(group["lines"])) for group in shown], left) == ([("2.0B", 58), ("1.0B", 2)], 3)
    assert [line["tokens"] for line in shown[1]["lines"]] == ["200", "199"], "the fastest first"
    twice = [*large, *(replace(run, record=replace(run.record, tokens_per_s=10.0)) for run in large[:2])]
    lines = {line["layout"]: (line["runs"], line["tokens"]) for line in layouts_of(twice)[0][0]["lines"]}
    assert [lines[f"tp{tp}"] for tp in range(3)] == [("2", "55.0"), ("2", "54.5"), ("1", "98.0")]
