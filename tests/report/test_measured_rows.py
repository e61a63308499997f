"""A row from the records of its rounds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.reader.runs.figures import add_figures
from hpc_gpt.report.measured_rows import Measurement, measurement_row

SHAPE = Record(
    ended="done",
    gpus=1,
    device="h200",
    dtype="bf16",
    micro_batch=16,
    micro_batches=1,
    global_batch=16,
    seq=1024,
    hidden=768,
    layers=12,
    heads=12,
    vocab=50304,
    params=124_475_904,
    recompute="none",
    config_hash="0123",
)


def good(step_s: float, **more) -> Measurement:
    return Measurement(add_figures(replace(SHAPE, step_s=step_s, **more)), Path("run"))


def bad(ended: str = "gpu_memory", **more) -> Measurement:
    return Measurement(replace(SHAPE, ended=ended, cause="too large", **more), Path("run"))


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=7))
def test_the_median_of_the_rounds_and_what_follows_from_it(steps_s):
    row = measurement_row("ddp", "id#1", [good(step_s) for step_s in steps_s])
    record = row.record
    assert record.run == "id#1"
    assert record.rounds == len(row.tokens_per_s) == len(steps_s)
    assert min(row.tokens_per_s) <= record.tokens_per_s <= max(row.tokens_per_s)
    assert record.step_s * record.tokens_per_s == pytest.approx(16 * 1024)
    again = add_figures(record)
    assert record.tflops_model == pytest.approx(again.tflops_model)
    assert record.mfu == pytest.approx(again.mfu)
    assert (record.tokens_per_s_spread is None) == (len(steps_s) == 1)


# A round's figures but for its steps, which are 32, 16 and 20 ms; the third lacks some.
ROUNDS = (
    {
        "memory_allocated_gib": [10.0, 7.0], "memory_reserved_gib": [12.0, 9.0], "power_w": 600.0,
        "gpu_util_mean": 90.0, "gpu_util_spread": 1.0, "sm_clock_mhz": 1500.0, "compile_s": 40.0,
        "allocator_retries": 4, "step_s_p10": 0.03, "step_s_p90": 0.04, "step_s_mean": 0.0325,
    },
    {
        "memory_allocated_gib": [9.0, 8.0], "memory_reserved_gib": [13.0, 8.0], "power_w": 640.0,
        "gpu_util_mean": 96.0, "gpu_util_spread": 3.0, "sm_clock_mhz": 1600.0, "compile_s": 5.0,
        "allocator_retries": 0, "step_s_p10": 0.01, "step_s_p90": 0.05, "step_s_mean": 0.0175,
    },
    {"power_w": 680.0, "compile_s": 6.0, "step_s_p10": 0.019, "step_s_p90": 0.021, "step_s_mean": 0.0205},
)  # fmt: skip
MERGED = {
    "run": "id#1", "rounds": 3, "tokens_per_s_spread": pytest.approx(0.625), "compile_s": 40.0, "allocator_retries": 4,
    "memory_allocated_gib": [10.0, 8.0], "memory_reserved_gib": [13.0, 9.0], "power_w": 640.0, "gpu_util_mean": 93.0,
    "gpu_util_spread": 2.0, "sm_clock_mhz": 1550.0, "step_s_p10": 0.019, "step_s_p90": 0.04, "step_s_mean": 0.0205,
    "flags": ["round 4: ended as error: too large", "the allocator gave its cache back and tried again 4 times: "
              "a smaller micro-batch may be faster"],
}  # fmt: skip
SOURCES = {
    **dict.fromkeys(("power_w", "gpu_util_mean", "gpu_util_spread", "sm_clock_mhz"), "mean over 3 rounds"),
    **dict.fromkeys(("step_s_p10", "step_s_p90", "step_s_mean"), "median over 3 rounds"),
    **dict.fromkeys(("memory_allocated_gib", "memory_reserved_gib"), "the highest over 3 rounds"),
    "step_s": "global_batch x seq / tokens_per_s, the median over 3 rounds",
    "tokens_per_s": "median over 3 rounds: 5.12e+05, 1.024e+06, 8.192e+05",
    "tokens_per_s_spread": "(largest - smallest) / median of the rounds",
    "compile_s": "from the first round: later ones find the compiler's cache",
}


def test_a_row_is_the_middle_round_with_figures_of_all_rounds():
    first, fast, middle = (good(step_s, **more) for step_s, more in zip((0.032, 0.016, 0.02), ROUNDS, strict=True))
    row = measurement_row("ddp", "id#1", [first, fast, middle, bad("error")])
    sources = {**middle.record.sources, **SOURCES}
    assert row.record == replace(middle.record, **MERGED, sources=sources)
    assert row.tokens_per_s == (512_000.0, 1_024_000.0, 819_200.0)
    assert row.places == (Path("run"),) * 4
    alone = measurement_row("ddp", "id#1", [fast]).record
    assert alone == replace(fast.record, run="id#1", rounds=1)


def test_the_seconds_to_the_tenth_step_are_of_each_round():
    rounds = [good(0.03, attempts=[{"tenth_step_s": each}]) for each in (70.0, None, 20.0)]
    assert measurement_row("ddp", "id#1", rounds).tenth_step_s == (70.0, 20.0)


def test_a_row_without_memory_has_no_speed():
    row = measurement_row("ddp mbs 64", "id#7", [bad(step_s=0.1, tokens_per_s=1.0)])
    assert row.tokens_per_s == ()
    assert (row.record.ended, row.record.tokens_per_s, row.record.step_s) == ("gpu_memory", None, None)
    assert row.record.micro_batch == 16


def test_nothing_need_be_learnt():
    flags = [Flag("the loss did not fall", "loss"), "step_s rests on 2 steps"]
    assert measurement_row("ddp", "id#1", [good(0.03, flags=flags)]).record.flags == ["step_s rests on 2 steps"]


def test_a_program_that_tells_tokens_per_second_alone():
    row = measurement_row(
        "nanogpt", "id#2", [Measurement(Record(ended="done", tokens_per_s=speed), Path("log")) for speed in (2, 4, 3)]
    )
    assert row.record.tokens_per_s == 3
    assert row.record.step_s is None
