"""Figures held against what else the log says of them, and a start-up memory that is no peak."""

from __future__ import annotations

import pytest

from tests.readers.made_logs import run_of


def megatron(step: int, ms: float, second: float, rate: float | None = None) -> str:
    clock = f"{int(second) // 60:02d}:{int(second) % 60:02d}"
    columns = [f" [2026-01-16 07:{clock}] iteration {step:8d}/     100", f"consumed samples: {step * 128:12d}"]
    columns += [f"elapsed time per iteration (ms): {ms}", "global batch size:   128", "lm loss: 1.1E+01"]
    columns += ["number of skipped iterations:   0", *([f"samples per second: {rate:.3f}"] if rate else []), ""]
    return " | ".join(columns)


@pytest.mark.parametrize(("ms", "right"), [(5800.0, True), (5.8, False), (15800.0, False)])
def test_a_step_time_in_another_unit_is_left_out(ms, right):
    record = run_of(*[megatron(n, ms, 5.9 * n) for n in range(1, 40)]).record
    assert (record.step_s is not None) is right
    flags = [flag for flag in record.flags if "the lines' times of day give" in flag]
    assert bool(flags) is not right


@pytest.mark.parametrize(
    ("rate", "flag"), [(22.07, ""), (11.03, "it counts one of 2 micro-batches"), (30.0, "left out")]
)
def test_a_rate_is_held_against_batch_sequence_and_step_time(rate, flag):
    """11.03 is a fork's arithmetic: the samples of one of two micro-batches over the time of the step."""
    world = (
        "using world size: 8, data-parallel-size: 8, tensor-model-parallel size: 1, pipeline-model-parallel size: 1 "
    )
    sizes = [f"  {name} {'.' * 40} {size}" for name, size in (("micro_batch_size", 8), ("seq_length", 2048))]
    record = run_of(world, *sizes, *[megatron(n, 5800.0, 5.8 * n, rate) for n in range(1, 30)]).record
    assert record.micro_batches == 2
    said = [each for each in record.flags if "tokens/s, but batch, sequence and step time give" in each]
    assert [each.endswith(flag) for each in said] == ([True] if flag else [])
    assert record.tokens_per_s == (None if flag == "left out" else pytest.approx(128 * 2048 / 5.8))


def test_memory_at_the_start_is_no_peak_once_a_later_line_has_one():
    """DeepSpeed's see_memory_usage while fp32 weights are loaded, then its throughput timer."""
    start = (
        "[2021-06-10 20:47:51,721] [INFO] [utils.py:628:see_memory_usage] MA 1.73 GB         Max_MA 70.5 GB         "
    )
    start += "CA 1.75 GB         Max_CA 72 GB "
    step = "[2023-07-25 21:03:{:02d},269] [INFO] [timer.py:215:stop] epoch=0/micro_step={}/global_step={}, "
    step += "RunningAvgSamplesPerSec=7.86, CurrSamplesPerSec=8.009, MemAllocated=59.65GB, MaxMemAllocated=63.31GB"
    record = run_of(start, *[step.format(n, n, n) for n in range(1, 8)]).record
    assert record.memory_allocated_gib == [63.31]
    assert not [flag for flag in record.flags if "before the first step" in flag]
    assert run_of(start).record.memory_allocated_gib == [70.5]


def test_memory_after_an_iteration_is_of_training_wherever_the_line_is():
    memory = "after 1 iterations memory (MB) | allocated: 10857.5 | max allocated: 26118.2 | reserved: 28560.0 | "
    memory += "max reserved: 28560.0"
    record = run_of(memory, *[megatron(n, 5800.0, 5.8 * n) for n in range(1, 9)]).record
    assert record.memory_reserved_gib == [28560 / 1024]
    assert not [flag for flag in record.flags if "before the first step" in flag]
