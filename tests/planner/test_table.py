"""A search in words: reasons that hold, bars that add up, nothing wider than the terminal."""

from dataclasses import replace

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.format import wrapped
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.presets import preset
from hpc_gpt.planner.figures import figures_of, plan_figures, summary
from hpc_gpt.planner.memory import Memory, StageMemory
from hpc_gpt.planner.search import Candidate
from hpc_gpt.planner.step_time import StepTime, predict_step
from hpc_gpt.planner.table import (
    LINES,
    does_not_fit,
    heading,
    left_out_text,
    legend,
    search_table,
    slow_text,
    unchecked,
    why_slower,
)
from tests.planner.machines import machine_named
from tests.report.plan_searches import searched_for

STEP = StepTime(70, 10, 8, 6, 1, 3, 1, 1, 0.1)


def candidate(step=STEP, need=20.0, **fields):
    stage = StageMemory(5, 5, 5, 2, 0, 0, 18, need)
    lower = replace(stage, nvidia_smi=need - 1)
    training = Training(ModelShape(1024, 8, 8), tp=2, pp=2, dp=2, micro_batches=4, **fields)
    return Candidate(training, Memory((stage, lower)), 32.0, step)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"bubble_s": 26}, "bubble 22 % against 6 %"),
        ({"recompute_s": 30, "bubble_s": 5}, "recompute 25 % against 10 %"),
        ({"tp_s": 40, "dp_s": 4}, "tp 30 % against 8 %"),
        ({"compute_s": 90}, "compute 90.0 s against 70.0 s"),
        ({"compute_s": 20, "bubble_s": 80}, "bubble 65 % against 6 %"),
        # A larger share of a faster step is no reason, seconds are.
        ({"offload_s": 1.002, "compute_s": 74.5}, "compute 74.5 s against 70.0 s"),
    ],
)
def test_the_reason_is_the_part_that_costs_most(changed, reason):
    assert why_slower(candidate(replace(STEP, **changed)), candidate()) == reason


def test_near_ones_tight_ones_and_the_best_say_so():
    best = candidate()
    assert why_slower(best, best) == "best"
    near = candidate(replace(STEP, compute_s=72.5), recompute="full")
    assert why_slower(near, best) == "equal, 2.50 % slower"
    assert why_slower(candidate(recompute="full"), best) == "equal, less simple"
    assert why_slower(candidate(replace(STEP, compute_s=73.5)), best) == "compute 73.5 s against 70.0 s"
    assert why_slower(candidate(need=26.0), best) == "equal, 18.8 % less memory to spare"
    exposed = candidate(replace(STEP, compute_s=66, dp_s=7))
    assert why_slower(exposed, best) == "equal, exposed communication 16 % against 12 %"
    tight = candidate(replace(STEP, compute_s=65), need=31.0)
    assert why_slower(tight, best) == "tight: 31.0 of 32.0 GiB on stage 0"
    assert why_slower(candidate(replace(STEP, compute_s=72.5), need=31.0), best) == "compute 72.5 s against 70.0 s"
    filled = candidate(replace(STEP, compute_s=72.5), need=31.5)
    assert why_slower(filled, best) == "tight: 31.5 of 32.0 GiB on stage 0"
    assert why_slower(tight, tight) == "best, but tight"
    assert does_not_fit(candidate(None, 34.1)) == "does not fit: 34.1 of 32.0 GiB on stage 0"


@pytest.mark.parametrize("width", [40, None])
def test_no_line_is_wider_than_the_terminal(width):
    searched, model = searched_for()
    text = search_table(searched, width, blocks=True)
    assert searched.too_large
    for part in (
        heading(searched, "48b", model.params),
        legend(searched),
        left_out_text(searched),
        unchecked(searched),
    ):
        text += "\n".join(wrapped(part, width)) + "\n"
    assert width is None or max(map(len, text.splitlines())) <= width
    assert all(str(each.layout) in text for each in searched.best_of_layouts[:LINES])


def test_a_layout_that_needs_an_unknown_host_is_not_the_best():
    best, moved = candidate(), replace(candidate(replace(STEP, compute_s=20), offload="optimizer"), host_gib=80.0)
    assert moved.tokens_per_s > best.tokens_per_s
    assert sorted((moved, best), key=lambda each: each.rank)[0] is best
    assert why_slower(moved, best) == "offload needs 80.0 GiB of host memory (its size is unknown)"
    known = replace(moved, host_memory_gib=100.0)
    assert sorted((known, best), key=lambda each: each.rank)[0] is known
    assert replace(known, host_memory_gib=82.0).is_tight


def test_offload_that_is_twenty_times_slower_is_said():
    slow = candidate(replace(STEP, offload_s=1901))
    text = slow_text(slow, candidate(), "without offload the best layout")
    assert text == "slow: without offload the best layout has 82 tokens/s, 20 times as many"
    assert not slow_text(candidate(replace(STEP, offload_s=1890)), candidate(), "the best")
    assert not slow_text(slow, None, "the best")


@pytest.mark.parametrize("matmul", ["none", "fp8-tensor", "nvfp4"])
def test_without_recomputation_hardware_does_the_models_work(matmul):
    """Tables that are looked up multiply nothing, in neither figure; both are shares of the products' own units."""
    machine = machine_named("b200", 8, "infiniband 8x400G")
    run = Training(preset("llama3.1-8b"), dp=8, micro_batches=4, flash=True, engine="fsdp", matmul=matmul)
    found = figures_of(run, predict_step(run, machine), machine, 1e9)
    assert found.mfu == pytest.approx(found.hfu)
    again = replace(run, recompute="full")
    assert figures_of(again, predict_step(again, machine), machine, 1e9).hfu > found.mfu / 2
    units = {"none": "bf16", "fp8-tensor": "fp8", "nvfp4": "fp4"}[matmul]
    assert (found.units, found.peak_tflops) == (units, machine.peak_tflops[units])
    peak = plan_figures(candidate(), found)["peak"]
    assert str(peak) == f"peak {machine.peak_tflops[units]:g} TFLOP/s of {units}"


def test_causal_attention_counted_whole_is_said_where_it_matters():
    machine = machine_named("h100-80g", 8, "infiniband 8x400G")
    run = Training(replace(preset("llama3.1-8b"), seq=131072), cp=8, micro_batches=4, flash=True, engine="fsdp")
    long, short = (
        figures_of(each, predict_step(each, machine), machine, 1e9)
        for each in (run, replace(run, shape=replace(run.shape, seq=2048), cp=1, dp=8))
    )
    shape = run.shape
    weights, attention = 6 * shape.multiplied, 12 * shape.layers * shape.query_width * shape.seq
    assert long.mfu_as_done / long.mfu == pytest.approx((weights + attention / 2) / (weights + attention))
    assert any("mfu as done " in line for line in summary(plan_figures(candidate(), long)))
    assert not any("as done" in line for line in summary(plan_figures(candidate(), short)))
