"""Figures held against what else a log says of the same quantity: what is left out or gives way, and in which words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpc_gpt.core.runs.record import ABSENT, Record
from hpc_gpt.reader.runs.draft import Draft
from hpc_gpt.reader.runs.figures import Figures
from hpc_gpt.reader.runs.log_steps import LogSteps
from hpc_gpt.reader.runs.rules import Known, check_flops, check_rates
from hpc_gpt.reader.runs.times import add_times
from tests.reader.made_logs import run_of

ROW = Record(
    global_batch=16, seq=128, step_s=1.0, gpus=64, micro_batches=5, dp=16, cp=2, sources={"tokens_per_s_gpu": "a.log:7"}
)
FIGURES: Figures = {
    "tokens_per_s": (2048.0, ""),
    "tokens_per_s_gpu": (32.0, ""),
    "tflops_model": (50.0, ""),
    "mfu": (0.4, ""),
}
PRODUCT = "global_batch 16 x seq 128 / step_s 1 = 2,048 tokens/s, but the program prints "


def lines(count: int, **columns: Any) -> LogSteps:
    """So many steady lines, with the same figure on each, or those of a list."""
    found = {name: np.full(count, value) if np.isscalar(value) else np.array(value) for name, value in columns.items()}
    steps = LogSteps(found, np.arange(count), steady=np.ones(count, np.bool_), files={1: "a.log"})
    steps.attempt = np.ones(count, np.int64)
    return steps


def checked(record: Record, steps: LogSteps, figures: Figures = FIGURES) -> tuple[Figures, list[tuple[str, str]]]:
    kept = dict(figures)
    return kept, [(str(flag), flag.kind) for flag in check_rates(record, kept, steps)]


@pytest.mark.parametrize(
    ("factor", "why", "kind"),
    [
        (1.049, "", ""),
        (0.951, "", ""),
        (1.06, "left out", "disagrees"),
        (0.9, "left out", "disagrees"),
        (1 / 5, "it counts one of 5 micro-batches", "disagrees"),
        (5.2, "each of 5 micro-batches counts all tokens", "disagrees"),
        (1 / 16, "it counts one of 16 data-parallel ranks", "disagrees"),
        (16, "each of 16 data-parallel ranks counts all tokens", "disagrees"),
        (1 / 2, "it counts one of 2 context-parallel ranks", "disagrees"),
        (2, "each of 2 context-parallel ranks counts all tokens", "disagrees"),
        (1 / 64, "it counts one of 64 GPUs", "disagrees"),
        (64, "each of 64 GPUs counts all tokens", "disagrees"),
        (99, "left out", "disagrees"),
        (100, "left out", "absurd"),
        (1 / 100, "left out", "absurd"),
    ],
)
def test_a_rate_is_held_against_sizes_and_step_time(factor: float, why: str, kind: str) -> None:
    figures, flags = checked(ROW, lines(10, step_s=1.0, tokens_per_s=2048 * factor))
    printed = f"tokens_per_s {2048 * factor:,.4g} (a.log:5)"
    assert flags == ([(f"{PRODUCT}{printed}: {why}", kind)] if why else [])
    assert {value for value, _ in figures.values()} == ({None} if why == "left out" else {2048.0, 32.0, 50.0, 0.4})


@pytest.mark.parametrize(
    ("columns", "count", "is_wrong"),
    [
        ({"tokens_per_s_gpu": 33.0}, 10, False),
        ({"tokens_per_s_gpu": 40.0}, 10, True),
        ({"samples_per_s": 16.1}, 10, False),
        ({"samples_per_s": 19.0}, 10, True),
        ({"samples_per_s_gpu": 0.25}, 10, False),
        ({"samples_per_s_gpu": 0.3}, 10, True),
        ({"tokens_per_s": 2048.0, "samples_per_s": 19.0}, 10, False),  # the first that is printed counts
        ({"tokens_per_s": 3000.0}, 9, True),
        ({"tokens_per_s": 3000.0}, 8, False),  # too few of the later half
        ({"tokens_per_s": [3000.0] * 5 + [2048.0] * 5}, 10, False),  # a running mean comes near its figure
        ({"tokens_per_s": 0.0}, 10, False),
        ({"tokens_per_s": 3000.0}, 10, True),
    ],
)
def test_which_printed_rate_is_held_against_it(columns: dict[str, Any], count: int, is_wrong: bool) -> None:
    assert bool(checked(ROW, lines(count, step_s=1.0, **columns))[1]) is is_wrong
    assert not checked(ROW, lines(count, **columns))[1], "the rate itself gave step_s"
    assert not checked(replace(ROW, step_s=None), lines(count, step_s=1.0, **columns), {})[1]


def test_a_rate_of_one_gpu_gives_way_to_that_of_all() -> None:
    record, steps = replace(ROW, tokens_per_s_gpu=40.0), lines(3, step_s=1.0)
    figures, flags = checked(record, steps, {"tokens_per_s": (2048.0, "")})
    assert flags == [("tokens_per_s_gpu 40 x gpus 64 = 2,560, but tokens_per_s is 2,048 (a.log:7)", "")]
    assert figures["tokens_per_s_gpu"] == (32.0, "tokens_per_s / gpus")
    assert not checked(replace(ROW, tokens_per_s_gpu=33.5), steps)[1]
    # One flag is enough for one reason.
    record, steps = replace(ROW, tokens_per_s_gpu=64.0), lines(10, step_s=1.0, tokens_per_s_gpu=64.0)
    figures, flags = checked(record, steps, {"tokens_per_s": (2048.0, "")})
    assert (figures["tokens_per_s_gpu"][0], len(flags)) == (32.0, 1)


def test_what_contradicts_a_figure_is_why_it_is_null() -> None:
    said = ["world_size=1 global_batch_size=16", *(f"step {step}: loss 3.1" for step in range(9))]
    rising = [
        f"step {step} | loss {3 - step / 100:.3f} | dt: {500 + step % 3} ms | tokens/s: {700 * step}"
        for step in range(1, 31)
    ]
    for log, name, why in (
        (rising, "tokens_per_s", "tokens_per_s grows with the step"),
        (said, "seq", "no line states"),
    ):
        flags = run_of(log).record.all_flags
        reasons = dict(flag.split(" is null: ") for flag, kind in flags if kind == ABSENT)
        assert why in reasons[name], reasons


@pytest.mark.parametrize(
    ("figures", "printed", "gone", "says"),
    [
        ({"tflops_model": 61_000.0}, {}, ["tflops_model"], "6.1e+04, above the peak of every device"),
        ({"tflops_model": 900.0}, {"device": "a100-80g"}, ["tflops_model"], "900, above the peak of a100-80g"),
        ({"tflops_model": 290.0}, {"tflops_printed": 300.0, "device": "a100-80g"}, [], ""),
        (
            {"tflops_model": 290.0, "tflops_hardware": 260.0},
            {"tflops_printed": 150.0},
            [],
            "prints 150 TFLOP/s a GPU, by",
        ),
        (
            {"tflops_model": 700.0, "mfu": 2.2},
            {"device": "a100-80g"},
            ["tflops_model", "mfu"],
            "mfu would be 2.2, above 1",
        ),
    ],
)
def test_an_impossible_rate_goes_and_a_possible_one_stays(
    figures: dict[str, float], printed: dict[str, Any], gone: list[str], says: str
) -> None:
    kept: Figures = {name: (value, "") for name, value in figures.items()}
    flags = check_flops(Record(**printed), kept)
    assert {name: value for name, (value, _) in kept.items()} == figures | dict.fromkeys(gone)
    assert any(says in flag for flag in flags) is bool(says)


@pytest.mark.parametrize("peak", ["88478.00", "88.5"])
def test_an_impossible_printed_rate_goes(peak: str) -> None:
    """B20: 88,478 TFLOP/s, as bytes are counted for FLOPs; the own figures stay."""
    line = (
        "[rank0]:[titan] 2025-07-21 15:57:{0:02d},242 - root - INFO - step: {0:2d}  loss:  4.6671  grad_norm:  2.5457  "
    )
    line += "memory:  0.50GiB(0.00%)  tps: 900  tflops: " + peak + "  mfu: 0.36%"
    record = run_of([line.format(step) for step in range(1, 9)]).record
    assert record.tflops_printed == (None if peak == "88478.00" else 88.5)
    assert record.tokens_per_s_gpu == 900


@pytest.mark.parametrize(
    ("rates", "step_s", "grows"),
    [
        (900.0 * np.arange(1, 11), 1.0, True),
        (900.0 * np.arange(1, 11) / np.array([1.0, 0.9] * 5), [1.0, 0.9] * 5, True),
        (900.0 * np.arange(1, 11), np.nan, True),
        (900.0 * np.arange(1, 5), 1.0, False),  # too few
        (900.0 * np.arange(9, 19), 1.0, False),  # may be a slow start
        (900.0 * (1 - 0.5 ** np.arange(1, 11)), 1.0, False),
        (np.full(10, 900.0), 1.0, False),
    ],
)
def test_a_rate_that_grows_with_the_step_is_none(rates: Any, step_s: Any, grows: bool) -> None:
    steps = lines(len(rates), step=np.arange(1.0, len(rates) + 1), tokens_per_s=rates, step_s=step_s)
    add_times(known := Known(Draft()), steps, [])
    flags = [flag for flag in known.draft.flags if "grows with the step" in flag]
    assert ("tokens_per_s" not in steps, len(flags)) == (grows, grows)
