"""A cell's row from the records of its rounds."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.launcher.bench.bench_run import bench_text
from hpc_gpt.launcher.bench.measurement import BenchRow, Measurement, measurement_row
from hpc_gpt.reader.readers.runs import add_figures
from hpc_gpt.reader.report.bench_table import MeasuredRow

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


def test_memory_is_the_highest_and_the_rest_is_of_all_rounds():
    rounds = [
        good(0.030, memory_allocated_gib=[10.0], power_w=600.0, compile_s=40.0, matmul_tflops_before=750.0),
        good(0.031, memory_allocated_gib=[11.0], power_w=680.0, compile_s=5.0, matmul_tflops_before=760.0),
        good(0.035, memory_allocated_gib=[10.5], power_w=None, compile_s=5.0, matmul_tflops_before=740.0),
    ]
    record = measurement_row("ddp", "id#1", rounds).record
    assert record.step_s == pytest.approx(0.031)
    assert record.memory_allocated_gib == [11.0]
    assert record.power_w == 640.0
    assert record.compile_s == 40.0
    assert record.matmul_tflops_before == 750.0
    assert record.tokens_per_s_spread == pytest.approx(0.031 / 0.030 - 0.031 / 0.035)


def test_a_cached_compilers_tenth_step_is_a_later_rounds():
    def row(*seconds: float | None) -> BenchRow:
        return measurement_row("ddp", "id#1", [good(0.03, attempts=[{"tenth_step_s": each}]) for each in seconds])

    def shown(*seconds: float | None) -> float | None:
        return MeasuredRow(Record(), {"tenth_step_s": row(*seconds).tenth_step_s}).tenth_step_s

    assert shown(70.0) == 70.0
    assert shown(70.0, 18.0, 20.0) == 19.0
    assert row(70.0, 18.0, 20.0).tenth_step_s == (70.0, 18.0, 20.0)
    assert shown(None) is None
    assert "18.0" in bench_text([row(70.0, 18.0)])


def test_a_row_without_memory_has_no_speed():
    row = measurement_row("ddp mbs 64", "id#7", [bad(step_s=0.1, tokens_per_s=1.0)])
    assert row.is_out_of_memory
    assert not row.is_measured
    assert (row.record.ended, row.record.tokens_per_s, row.record.step_s) == ("gpu_memory", None, None)
    assert row.record.micro_batch == 16


def test_a_round_that_failed_is_reported_and_not_counted():
    row = measurement_row("ddp", "id#1", [good(0.03), bad("error")])
    assert row.is_measured
    assert row.record.ended == "done"
    assert row.record.rounds == 1
    assert row.record.flags == ["round 2: ended as error: too large"]


def test_a_drift_of_the_device_is_said_from_3_percent_on():
    def flags(*rates: tuple[float, float]) -> list[str]:
        rounds = [good(0.03, matmul_tflops_before=before, matmul_tflops_after=after) for before, after in rates]
        return measurement_row("ddp", "id#1", rounds).record.flags

    assert flags((100.0, 97.1), (100.0, 102.9)) == []
    assert flags((100.0, 96.0)) == ["the device's own matmul rate moved by -4.0 %, from 100 to 96 TFLOP/s"]
    (flag,) = flags((100.0, 100.0), (100.0, 105.0))
    assert flag.startswith("round 2: the device's own matmul rate moved by +5.0 %")


def test_allocator_retries_are_reported():
    row = measurement_row("ddp", "id#1", [good(0.03, allocator_retries=0), good(0.06, allocator_retries=4)])
    assert row.record.allocator_retries == 4
    assert any("tried again 4 times" in flag for flag in row.record.flags)
    assert not measurement_row("ddp", "id#1", [good(0.03, allocator_retries=0)]).record.flags


def test_random_tokens_need_not_be_learnt():
    flags = [Flag("the loss did not fall", "loss"), "step_s rests on 2 steps"]
    assert measurement_row("ddp", "id#1", [good(0.03, flags=flags)]).record.flags == ["step_s rests on 2 steps"]


def test_an_unknown_device_has_mfu_only_by_the_profiles_peak():
    measured = [good(0.03, device="tpu-9")]
    without = measurement_row("ddp", "id#1", measured).record
    assert without.tokens_per_s
    assert without.tflops_model
    assert without.mfu is None
    assert any("mfu" in flag for flag in without.flags)
    given = measurement_row("ddp", "id#1", measured, {"bf16": 500.0}).record
    assert given.mfu == pytest.approx(given.tflops_model / 500)
    assert not any("mfu" in flag for flag in given.flags)


def test_a_peer_that_tells_tokens_per_second_alone():
    row = measurement_row(
        "nanogpt", "id#2", [Measurement(Record(ended="done", tokens_per_s=speed), Path("log")) for speed in (2, 4, 3)]
    )
    assert row.record.tokens_per_s == 3
    assert row.record.step_s is None
