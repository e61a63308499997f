"""Two runs side by side: the words, what they rest on, and what is not claimed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.compare_text import as_tables, comparison_text, percent_text, title
from hpc_gpt.report.difference import Interval
from tests.report.any_run import any_run
from tests.report.step_tables import step_table

RECORD = Record(
    run="r1", name="made", device="V100-SXM2-32GB", engine="megatron-lm", gpus=64, tp=4, pp=16, dp=1, micro_batch=1,
    micro_batches=2048, global_batch=2048, seq=2048, hidden=8192, layers=62, heads=64, vocab=50304,
    params=50_000_000_000, ended="done",
)  # fmt: skip


def made(seed: int, step_s: float = 100.0, count: int = 200, losses=None, **record) -> RunRead:
    """A foreign run of `count` steps of 2 % noise; the first is warm-up."""
    generator = np.random.default_rng(seed)
    seconds = np.round(step_s * (1 + 0.02 * generator.standard_normal(count)), 3)
    step = np.arange(1.0, count + 1)
    losses = 2 + 4 / step + 0.01 * generator.standard_normal(count) if losses is None else losses
    curve = step_table(step=step, step_s=seconds, loss=losses, attempt=np.ones(count, np.int64), steady=step > 1)
    given = {"step_s": step_s, "run": f"r{seed}", **record}
    return RunRead(replace(RECORD, **given), curve, files=[Path(f"log{seed}.txt")])


@pytest.mark.parametrize(
    ("interval", "shown"),
    [
        (Interval(4.02, 3.11, 4.94), ("4", "3.1 to 4.9")),
        (Interval(-4.02, -4.94, -3.11), ("4", "3.1 to 4.9")),
        (Interval(0.12, 0.003, 0.9), ("0.12", "0.003 to 0.900")),
        (Interval(0.1, -0.83, 1.07), ("+0", "-0.8 to +1.1")),
        (Interval(130.0, 100.0, 160.0), ("130", "100 to 160")),
        (Interval(2.0, 2.0, 2.0), ("2.0", "2.00 to 2.00")),
    ],
)
def test_percent_have_the_digits_that_the_interval_carries(interval, shown):
    assert percent_text(interval) == shown


def test_of_long_values_the_part_that_differs_is_shown():
    line = "python train.py --data /data/corpus/of/many/texts --seed 3 --batch 64"
    runs = [made(1, settings={"command": {"run": f"{line} --lr {lr} --wd 0.1"}}) for lr in ("1e-4", "3e-4")]
    text = comparison_text(compare_runs(*runs), "A", "B")
    assert "… --lr 1e-4 --wd 0.1 -> … --lr 3e-4 --wd 0.1" in text
    runs = [made(1, settings={"command": {"run": "x" * 90 + end}}) for end in "ab"]
    assert "xxa -> …" in comparison_text(compare_runs(*runs), "A", "B")


def test_nothing_known_makes_no_claim():
    empty = RunRead(Record(run="x"))
    for a, b in ((empty, made(1)), (made(1), empty), (empty, RunRead(Record(run="y")))):
        comparison = compare_runs(a, b)
        assert comparison.verdict == "no_interval"
        assert comparison_text(comparison, "A", "B")
        assert title(a)
        json.dumps(as_tables([comparison], ["a", "b"]), allow_nan=False)


@given(any_run(), any_run())
def test_whatever_a_log_says_it_can_be_compared(a, b):
    comparison = compare_runs(a, b)
    assert comparison.verdict in ("faster", "slower", "no_difference", "no_interval", "same_run", "identical")
    text = title(a) + comparison_text(comparison, "A", "B")
    assert text.replace("\n", "").isprintable()
    json.dumps(as_tables([comparison], ["a", "b"]), allow_nan=False)


def test_the_digits_of_a_log_bound_what_can_be_claimed():
    coarse = [made(seed, step_s=step_s) for seed, step_s in ((1, 1.2), (2, 1.3))]
    coarse = [
        RunRead(
            run.record, replace(run.steps, columns={**run.steps.columns, "step_s": np.round(run.steps["step_s"], 1)})
        )
        for run in coarse
    ]
    interval = compare_runs(*coarse).speeds[0].interval
    assert interval.change < -7
    assert interval.high - interval.low > 7
    # Of our own runs the figures are in full.
    ours = [RunRead(run.record, run.steps, folder=Path(f"run{place}")) for place, run in enumerate(coarse)]
    exact = compare_runs(*ours).speeds[0].interval
    assert exact.high - exact.low < interval.high - interval.low - 5


def test_a_loss_is_compared_where_both_have_one_each_step_once():
    losses = np.full(60, 3.0)
    losses[10] = np.nan
    a = made(1, losses=losses, count=60)
    twice = {
        "step": np.concatenate([np.arange(1.0, 41), np.arange(31.0, 51)]),
        "loss": np.concatenate([np.full(40, 9.0), np.full(20, 3.5)]),
    }
    counts = ~((np.arange(60) >= 30) & (np.arange(60) < 40))
    again = replace(a.steps, columns={**a.steps.columns, **twice}, counts=counts)
    compared = compare_runs(a, RunRead(a.record, again, files=[Path("b")])).losses
    assert compared.common_steps == 49
    assert (compared.last_common_step, compared.a, compared.b) == (50, 3.0, 3.5)


def test_settings_are_shown_in_full():
    a, b = (made(1, settings={"lr": lr}) for lr in (0.00012, 0.0001200001))
    assert "lr  0.00012 -> 0.0001200001" in comparison_text(compare_runs(a, b), "A", "B")


def test_many_settings_are_cut_and_counted():
    a, b = ({f"key{number}": f"{side}{number}" for number in range(40)} for side in "ab")
    text = comparison_text(compare_runs(made(1, settings=a), made(2, settings=b)), "A", "B")
    assert "16 more settings differ: --json lists them" in text


def test_hostile_names_and_settings_are_text():
    wild = {"{a}{0}\x1b[2J": "\x1b]0;x\x07{b}", "k" * 500: "v" * 5000}
    text = comparison_text(compare_runs(made(1, settings=wild), made(2, settings={**wild, "k" * 500: "w"})), "A", "B")
    assert "\x1b" not in text
    text = title(made(1, name="\x1b[2J\n<script>"))
    assert "\x1b" not in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (RECORD, "made/r1, tp4-pp16-dp1, 64 GPUs, V100-SXM2-32GB, megatron-lm"),
        (Record(name="a", tp=4, pp=2, dtype="bf16", gpus=1), "a, tp4-pp2, 1 GPU, bf16"),
        (Record(name="a", gpus=2, dialect="hpc-gpt", pp=2), "a, 2 ranks"),
        (Record(name="a", gpus=2, dialect="hpc-gpt", device="h200"), "a, 2 GPUs, h200"),
    ],
)
def test_a_title_is_what_is_known_of_a_run(record, words):
    assert title(RunRead(record)) == words
