"""What follows from a record's own sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpc_gpt.formulas import memory_seed003_gib
from hpc_gpt.readers.runs import add_figures
from hpc_gpt.runs.record import Record

RUN = Record(
    gpus=8, tp=2, pp=2, dp=2, micro_batch=4, global_batch=32, seq=128, hidden=64, layers=4, heads=4, vocab=1000,
    params=400_000, dtype="bf16", recompute="none",
)  # fmt: skip


def test_seed_003s_memory_is_that_of_one_ranks_share():
    record = add_figures(RUN)
    share = {"params": 100_000, "batch": 4, "seq": 128, "layers": 2, "hidden": 32, "heads": 2, "vocab": 500}
    assert record.memory_seed003_gib == pytest.approx(memory_seed003_gib(**share))
    assert "seed 003" in record.sources["memory_seed003_gib"]
    assert record.step_s is None, "it needs no step time"


def test_seed_003s_memory_knows_the_bytes_of_fp32_and_no_sharding():
    whole = add_figures(RUN).memory_seed003_gib
    assert add_figures(replace(RUN, dtype="fp32")).memory_seed003_gib == pytest.approx(2 * whole)
    assert add_figures(replace(RUN, zero_stage=3, dp=64, gpus=256)).memory_seed003_gib == whole
    assert add_figures(replace(RUN, recompute="full")).memory_seed003_gib == whole


@pytest.mark.parametrize("key", ["params", "micro_batch", "seq", "layers", "hidden", "heads", "vocab", "tp", "pp"])
def test_without_a_size_it_is_null(key):
    record = add_figures(replace(RUN, **{key: None}))
    assert record.memory_seed003_gib is None
    assert "memory_seed003_gib" not in record.sources


@pytest.mark.parametrize(
    ("device", "dtype", "words"),
    [
        ("h100-80g", None, "no dtype is named"),
        ("abacus", "bf16", "no peaks known"),
        ("v100-32g", "bf16", "no dense bf16"),
    ],
)
def test_what_lacks_for_utilisation_is_told(device, dtype, words):
    record = add_figures(replace(RUN, step_s=1.0, device=device, dtype=dtype))
    assert record.mfu is None
    assert words in record.sources["mfu"]
    assert any(flag.startswith(words) and "None" not in flag for flag in record.flags)
