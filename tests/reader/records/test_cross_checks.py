"""Figures held against what else a log says of the same quantity: what is left out or gives way, and in which words."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hpc_gpt.core.runs.record import ABSENT, Flag, Record
from hpc_gpt.reader.records.cross_checks import doubt_flops, doubt_rates, drop_growing_rates, flag_absent
from hpc_gpt.reader.records.draft import Draft
from hpc_gpt.reader.records.log_steps import LogSteps

ROW = Record(
    global_batch=16, seq=128, step_s=1.0, tokens_per_s=2048.0, tokens_per_s_gpu=2048 / 64, gpus=64, micro_batches=5,
    dp=16, cp=2, tflops_model=50.0, mfu=0.4, sources={"tokens_per_s_gpu": "tokens_per_s / gpus", "mfu": "", "seq": "y"},
)  # fmt: skip
OTHER = "the program prints {} tokens/s, but batch, sequence and step time give 2,048: {}"


def lines(count: int, **columns: Any) -> LogSteps:
    """So many steady lines, with the same figure on each, or those of a list."""
    found = {name: np.full(count, value) if np.isscalar(value) else np.array(value) for name, value in columns.items()}
    return LogSteps(found, np.arange(count), steady=np.ones(count, np.bool_))


@pytest.mark.parametrize(
    ("factor", "says", "kind"),
    [
        (1.049, "", ""),
        (0.951, "", ""),
        (1.06, "2,171 left out", "disagrees"),
        (0.9, "1,843 left out", "disagrees"),
        (1 / 5, "410 it counts one of 5 micro-batches", "disagrees"),
        (5.2, "10,650 each of 5 micro-batches counts all tokens", "disagrees"),
        (1 / 16, "128 it counts one of 16 data-parallel ranks", "disagrees"),
        (16, "32,768 each of 16 data-parallel ranks counts all tokens", "disagrees"),
        (1 / 2, "1,024 it counts one of 2 context-parallel ranks", "disagrees"),
        (2, "4,096 each of 2 context-parallel ranks counts all tokens", "disagrees"),
        (1 / 64, "32 it counts one of 64 GPUs", "disagrees"),
        (64, "131,072 each of 64 GPUs counts all tokens", "disagrees"),
        (99, "202,752 left out", "disagrees"),
        (100, "204,800 left out", "absurd"),
        (1 / 100, "20 left out", "absurd"),
    ],
)
def test_a_rate_is_held_against_sizes_and_step_time(factor: float, says: str, kind: str) -> None:
    record = doubt_rates(ROW, lines(10, step_s=1.0, tokens_per_s=2048 * factor))
    figure, _, why = says.partition(" ")
    assert record.all_flags == ([(OTHER.format(figure, why), kind)] if says else [])
    if why == "left out":
        gone = {"tokens_per_s": None, "tokens_per_s_gpu": None, "tflops_model": None, "mfu": None}
        assert record == replace(ROW, **gone, sources={"seq": "y"}, flags=record.flags)
    else:
        assert record == replace(ROW, flags=record.flags)


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
    assert bool(doubt_rates(ROW, lines(count, step_s=1.0, **columns)).flags) is is_wrong
    assert not doubt_rates(ROW, lines(count, **columns)).flags, "the rate itself gave step_s"
    for lacks in ("tokens_per_s", "step_s"):
        assert not doubt_rates(replace(ROW, **{lacks: None}), lines(count, step_s=1.0, **columns)).flags


def test_a_rate_of_one_gpu_gives_way_to_that_of_all() -> None:
    words = "the program prints 40 tokens/s per GPU, but the total over 64 GPUs gives 32"
    steps = lines(3, step_s=1.0)
    record = doubt_rates(replace(ROW, tokens_per_s_gpu=40.0, flags=["x"]), steps)
    sources = {**ROW.sources, "tokens_per_s_gpu": "tokens_per_s / gpus"}
    assert record == replace(ROW, tokens_per_s_gpu=32.0, flags=["x", words], sources=sources)
    assert not doubt_rates(replace(ROW, tokens_per_s_gpu=33.5), steps).flags
    # One flag is enough for one reason.
    record = doubt_rates(replace(ROW, tokens_per_s_gpu=64.0), lines(10, step_s=1.0, tokens_per_s_gpu=64.0))
    assert (record.tokens_per_s_gpu, len(record.flags)) == (32.0, 1)


def test_what_contradicts_a_figure_is_why_it_is_null():
    doubted = replace(ROW, tokens_per_s=None, flags=[Flag("the program prints 9 tokens/s: left out", "disagrees")])
    flags = dict(flag.split(" is null: ") for flag, kind in flag_absent(doubted, Draft()).all_flags if kind == ABSENT)
    assert flags["tokens_per_s"] == "the program prints 9 tokens/s: left out"
    assert "seq" not in flags


@pytest.mark.parametrize(
    ("figures", "gone", "says"),
    [
        ({"tflops_printed": 61_000.0}, ["tflops_printed"], "6.1e+04, above the peak of every device"),
        ({"tflops_printed": 900.0, "device": "a100-80g"}, ["tflops_printed"], "900, above the peak of a100-80g"),
        ({"tflops_printed": 300.0, "device": "a100-80g", "tflops_model": 290.0}, [], ""),
        (
            {"tflops_printed": 150.0, "tflops_model": 290.0, "tflops_hardware": 260.0},
            [],
            "prints 150 TFLOP/s a GPU, by",
        ),
        (
            {"tflops_model": 700.0, "mfu": 2.2, "device": "a100-80g"},
            ["tflops_model", "mfu"],
            "mfu would be 2.2, above 1",
        ),
    ],
)
def test_an_impossible_rate_goes_and_a_possible_one_stays(figures: dict[str, Any], gone: list[str], says: str) -> None:
    record = doubt_flops(Record(**figures))
    assert {name: getattr(record, name) for name in figures} == figures | dict.fromkeys(gone)
    assert any(says in flag for flag in record.flags) is bool(says)


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
    draft, steps = Draft(), lines(len(rates), step=np.arange(1.0, len(rates) + 1), tokens_per_s=rates, step_s=step_s)
    drop_growing_rates(draft, steps)
    assert ("tokens_per_s" not in steps, len(draft.flags)) == (grows, grows)
