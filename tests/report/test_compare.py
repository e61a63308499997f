"""Two runs side by side: the words, what they rest on, and what is not claimed."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given

from hpc_gpt.core.runs.record import Record
from hpc_gpt.reader.readers.runs import RunRead
from hpc_gpt.reader.report.compare import VERDICTS, compare_runs
from hpc_gpt.reader.report.compare_text import as_tables, comparison_text, percent_text, title, verdict_text
from hpc_gpt.reader.report.difference import Interval
from tests.report.any_run import any_run
from tests.report.step_tables import step_table

RECORD = Record(
    run="r1",
    name="made",
    device="V100-SXM2-32GB",
    engine="megatron-lm",
    gpus=64,
    tp=4,
    pp=16,
    dp=1,
    micro_batch=1,
    micro_batches=2048,
    global_batch=2048,
    seq=2048,
    hidden=8192,
    layers=62,
    heads=64,
    vocab=50304,
    params=50_000_000_000,
    ended="done",
)


def made(seed: int, step_s: float = 100.0, count: int = 200, losses=None, steady=None, **record) -> RunRead:
    """A foreign run of `count` steps of 2 % noise; the first is warm-up."""
    generator = np.random.default_rng(seed)
    seconds = np.round(step_s * (1 + 0.02 * generator.standard_normal(count)), 3)
    step = np.arange(1.0, count + 1)
    curve = step_table(
        step=step,
        step_s=seconds,
        loss=2 + 4 / step + 0.01 * generator.standard_normal(count) if losses is None else losses,
        attempt=np.ones(count, np.int64),
        steady=step > 1 if steady is None else steady,
        counts=np.ones(count, np.bool_),
        skipped=np.zeros(count, np.bool_),
    )
    given = {"step_s": step_s, "run": f"r{seed}", **record}
    return RunRead(replace(RECORD, **given), curve, files=[Path(f"log{seed}.txt")])


def words(a: RunRead, b: RunRead) -> str:
    return verdict_text(compare_runs(a, b), "A", "B")


def test_faster_in_plain_words():
    comparison = compare_runs(made(1), made(2, step_s=100 / 1.04))
    assert (comparison.verdict, comparison.speeds[0].name) == ("faster", "step_s")
    interval = comparison.speeds[0].interval
    assert interval.low < 4 < interval.high
    assert verdict_text(comparison, "A", "B").startswith("faster by 4.0 % (3.6")
    assert "step time  100.0 -> 96.1 s, medians of 199 and 199 steady steps" in comparison_text(comparison, "A", "B")


def test_slower_is_of_speed_too():
    text = words(made(1), made(2, step_s=200))
    assert text.startswith("slower by 50")


def test_no_difference_shown_has_both_ends():
    comparison = compare_runs(made(1), made(2))
    assert comparison.verdict == "no_difference"
    text = verdict_text(comparison, "A", "B")
    assert text.startswith("no difference shown (-0.")
    assert " to +0." in text


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


def test_too_few_steps_make_no_claim():
    comparison = compare_runs(made(1), made(2, step_s=50, count=6))
    assert comparison.verdict == "no_interval"
    text = comparison_text(comparison, "A", "B")
    assert text.startswith("B against A: no interval can be given: B has 5 steady steps, but an interval needs 8\n")
    assert "faster by" not in text


def test_a_total_makes_no_claim_and_says_why():
    total = RunRead(replace(RECORD, run="hf", step_s=57.44), files=[Path("hf.txt")])
    comparison = compare_runs(made(1), total)
    assert comparison.verdict == "no_interval"
    assert "B has no times of single steps, only step_s" in verdict_text(comparison, "A", "B")
    assert comparison.speeds[0].b == 57.44


def test_nothing_known_makes_no_claim():
    empty = RunRead(Record(run="x"))
    for a, b in ((empty, made(1)), (made(1), empty), (empty, RunRead(Record(run="y")))):
        comparison = compare_runs(a, b)
        assert comparison.verdict == "no_interval"
        assert comparison_text(comparison, "A", "B")
        assert title(a)
        json.dumps(as_tables([comparison], ["a", "b"]), allow_nan=False)


def test_the_same_run_and_copies_of_a_log():
    run = made(1)
    assert words(run, run) == "the same run as A"
    copy = RunRead(run.record, run.steps, files=[Path("copy.txt")])
    assert words(run, copy) == "the same steps with the same figures as A: two copies of one log"


def test_another_batch_is_compared_by_tokens():
    comparison = compare_runs(made(1), made(2, step_s=190, global_batch=4096, micro_batches=4096))
    assert [speed.name for speed in comparison.speeds] == ["tokens_per_s"]
    assert comparison.speeds[0].interval.change == pytest.approx(100 * (200 / 190 - 1), abs=0.6)
    assert comparison.speeds[0].a == pytest.approx(2048 * 2048 / 100, rel=0.01)
    text = comparison_text(comparison, "A", "B")
    assert "B against A: faster by 5" in text
    assert "global_batch is not the same, so a step is not the same work: tokens/s are compared" in text
    assert comparison.losses is None
    assert "a step of A has 4,194,304 tokens, one of B 8,388,608" in text


def test_other_gpus_are_compared_by_tokens_and_per_gpu():
    comparison = compare_runs(made(1), made(2, step_s=60, gpus=128, dp=2))
    per_s, per_gpu = comparison.speeds
    assert (per_s.name, per_gpu.name) == ("tokens_per_s", "tokens_per_s_gpu")
    assert comparison.verdict == "faster"
    assert per_s.interval.low > 60
    assert per_gpu.interval.high < -14
    line = next(line for line in comparison_text(comparison, "A", "B").splitlines() if "per GPU" in line)
    assert "655 -> 547, lower by 16.7 % (16.36 to " in line


def test_another_model_is_compared_by_its_flops_beside_tokens():
    comparison = compare_runs(made(1, tflops_model=40.0), made(2, params=25_000_000_000, layers=31, tflops_model=20.0))
    assert [speed.name for speed in comparison.speeds] == ["tokens_per_s", "tflops_model"]
    flops = comparison.speeds[1]
    assert flops.b == pytest.approx(flops.a / 2, rel=0.01)
    assert flops.interval.change == pytest.approx(-50, abs=1)
    assert not any("count other parameters" in note for note in comparison.notes)


@given(any_run(), any_run())
def test_whatever_a_log_says_it_can_be_compared(a, b):
    comparison = compare_runs(a, b)
    assert comparison.verdict in VERDICTS
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


def test_losses_that_part_are_said_to_diverge():
    step = np.arange(1.0, 201)
    noise = 0.01 * np.random.default_rng(0).standard_normal((2, 200))
    a, b = 2 + 4 / step + noise[0], 2 + 4 / step + noise[1] + np.where(step > 50, 0.1, 0)
    a[:20] = b[:20]
    losses = compare_runs(made(1, losses=a), made(2, losses=b)).losses
    assert losses.alike_steps == 20
    assert losses.diverge
    assert losses.tail.low < 0.1 < losses.tail.high
    assert (losses.last_common_step, losses.common_steps, losses.tail_steps) == (200, 200, 20)


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
    text = comparison_text(
        compare_runs(made(1, settings={"lr": 0.00012}), made(2, settings={"lr": 0.0001200001})), "A", "B"
    )
    assert "lr  0.00012 -> 0.0001200001" in text


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


def test_the_title_names_no_size_that_is_not_known():
    from hpc_gpt.reader.readers.runs import RunRead
    from hpc_gpt.reader.readers.steps import StepTable
    from hpc_gpt.reader.report.compare_text import title

    shown = title(RunRead(Record(name="a", tp=4, pp=2), StepTable()))
    assert "tp4-pp2" in shown
    assert "None" not in shown
