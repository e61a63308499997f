"""Columns of many steps in little room: every value comes back to the last bit."""

import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_gpt.reader import packed as packed_module
from hpc_gpt.reader.packed import PackedColumn, PackedColumns
from hpc_gpt.reader.steps import StepTable

FLOATS = st.floats(allow_nan=True, allow_infinity=True)
KINDS = [
    FLOATS,
    st.floats(width=32),
    st.integers(-(2**53), 2**53).map(float),
    st.sampled_from([np.nan, np.nan, np.nan, 1.5]),
    st.decimals(0, 10**7, places=3).map(float),
    st.integers(0, 10**8).map(lambda number: number / 1e6),
    st.sampled_from([0.0, -0.0]),
]
BLOCKS = st.lists(st.one_of([st.lists(kind, max_size=40) for kind in KINDS]), max_size=5)


def packed(blocks: list[list[float]]) -> PackedColumn:
    column = PackedColumn()
    for block in blocks:
        column.add(np.array(block, np.float64))
    return column


@pytest.fixture(params=[3, 1 << 15], scope="module")
def rows_of_a_block(request):
    """Few values are packed as soon as many are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_module, "_ROWS", request.param)
        patch.setattr(packed_module, "_OWN_PAGES", request.param)
        yield


def bits(values: np.ndarray) -> list[int]:
    return np.where(np.isnan(values), np.nan, values).view(np.int64).tolist()


@pytest.mark.usefixtures("rows_of_a_block")
@example(blocks=[[-0.0], [0.0]])
@given(blocks=BLOCKS)
def test_what_was_packed_comes_back(blocks: list[list[float]]) -> None:
    values = np.array([value for block in blocks for value in block], np.float64)
    assert bits(packed(blocks).values()) == bits(values)
    assert bits(pickle.loads(pickle.dumps(packed(blocks))).values()) == bits(values)


@pytest.mark.usefixtures("rows_of_a_block")
@given(first=BLOCKS, second=BLOCKS)
def test_joined_columns_are_one_after_the_other(first: list[list[float]], second: list[list[float]]) -> None:
    one, other = (PackedColumns({"loss": column}, column.rows) for column in (packed(first), packed(second)))
    nothing = PackedColumns({}, 2)
    joined = PackedColumns.joined([one, nothing, other])
    assert bits(joined["loss"]) == bits(np.concatenate([one["loss"], [np.nan, np.nan], other["loss"]]))
    assert joined.rows == one.rows + other.rows + 2


def test_rows_are_taken_of_rows_that_were_taken() -> None:
    table = StepTable(PackedColumns({"step": packed([[1.0, 2.0, 3.0, 4.0, 5.0]])}, 5), np.arange(5))
    some = table.take(np.array([True, False, True, True, True]))
    some.columns["loss"] = np.arange(4) / 3
    last = some.take(np.array([3, 1]))
    assert (last["step"].tolist(), last["loss"].tolist(), len(last)) == ([5.0, 3.0], [1.0, 1 / 3], 2)
    both = StepTable.joined([last, table])
    assert both["step"].tolist() == [5.0, 3.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("values", "most"),
    [
        (np.arange(7.0, 1e5), 200),
        (np.full(100_000, np.nan), 200),
        (np.round(np.random.default_rng(0).random(100_000), 6), 410_000),
        (np.random.default_rng(0).random(100_000).astype(np.float32).astype(np.float64), 410_000),
    ],
    ids=["steps", "nothing", "seconds", "losses"],
)
def test_columns_of_a_trainer_take_half_the_room_or_less(values: np.ndarray, most: int) -> None:
    column = PackedColumn()
    column.add(values)
    assert len(pickle.dumps(column)) < most + 400


def test_steps_beyond_two_to_the_31_are_exact() -> None:
    column = packed([[2.0**31 - 1, 2.0**31, 2.0**31 + 1], [2.0**40, 2.0**52 + 1]])
    assert column.values().tolist() == [2**31 - 1, 2**31, 2**31 + 1, 2**40, 2**52 + 1]


# Columns as a long log gives them, between objects of JSON, and the memory of the process before and after some go.
HELD = """
import json, sys
import numpy as np
from hpc_gpt.reader.cache import CacheFile
from hpc_gpt.reader.packed import PackedColumn
from pathlib import Path

def held():
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256

def read():
    columns, random, line = [PackedColumn() for _ in range(8)], np.random.default_rng(0), json.dumps({"loss": 1.5})
    for _ in range(600):
        objects = [json.loads(line) for _ in range(1500)]
        for column in columns:
            column.add(random.random(1500))
    for column in columns:
        column.values()
    return columns

before = held()
file = CacheFile("metrics", Path(sys.argv[1]))
columns = read() if sys.argv[2] == "first" else file.load()[1]
file.store(columns)
full = held()
del columns[::2]
print(full - before, held() - before)
"""


def test_a_column_that_is_not_needed_any_more_takes_no_memory(tmp_path) -> None:
    for time in ("first", "again"):
        done = subprocess.run(
            [sys.executable, "-c", HELD, str(tmp_path / "cached"), time], capture_output=True, text=True, check=True
        )
        full, half = map(float, done.stdout.split())
        assert 55 <= full <= 75, (time, full)  # MiB; the values take 55
        assert half < full - 25, (time, full, half)


def test_joining_copies_no_block() -> None:
    parts = [packed([np.random.default_rng(seed).random(100).tolist()]) for seed in range(3)]
    for part in parts:
        part.pack()
    whole = PackedColumns.joined([PackedColumns({"loss": part}, part.rows) for part in parts])
    assert [id(block) for block in whole._packed["loss"].blocks] == [id(part.blocks[0]) for part in parts]
