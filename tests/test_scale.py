"""Twice as much is no more than twice the bytes, and some; bench/scale.py has what, and its CPU."""

import gc
from itertools import pairwise
from pathlib import Path

import pytest

from bench.scale import CASES, Case, cpu_of, first_save, memory_of


@pytest.mark.long(but="first")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_doubling_takes_no_more_than_twice_the_bytes(case: Case) -> None:
    done = [cpu_of(case, size)[1] for size in case.sizes]
    first, second = (large - small for small, large in pairwise(done))
    assert second <= 2.2 * first, f"bytes of {case.sizes}: {done}"


@pytest.mark.parametrize("name", ["logs", "logs --tail"])
def test_a_log_of_any_size_takes_no_more_memory(name: str) -> None:
    assert max(memory_of(CASES[name], size) for size in CASES[name].sizes[::2]) < 4 << 20


def test_a_save_of_many_ranks_is_not_searched_for_garbage(tmp_path: Path) -> None:
    work = first_save(tmp_path, 384)
    gc.collect()
    searched = gc.get_stats()[0]["collections"]
    work()
    found = gc.get_stats()[0]["collections"] - searched
    assert found < 10, f"{found} times, while 7,680 pieces were put together"
