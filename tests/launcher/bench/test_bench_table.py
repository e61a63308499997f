"""The printed rows: a table, a block if the terminal is narrow, marks for what did not fit."""

from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.launcher.bench.bench_run import bench_text
from hpc_gpt.launcher.bench.measurement import BenchRow, measurement_row
from tests import examples
from tests.launcher.bench.test_measurement import bad, good
from tests.report.any_run import any_run


def rows():
    return [
        measurement_row("ddp", "id#1", [good(0.030), good(0.032)]),
        measurement_row("fsdp", "id#2", [good(0.060, allocator_retries=3)]),
        measurement_row("ddp mbs 64", "id#3", [bad()]),
    ]


def test_a_ratio_is_to_the_first_row():
    assert [line.split()[1] for line in bench_text(rows()).splitlines()[1:3]] == ["1.000", "0.516"]


def test_little_room_takes_a_block_a_row_and_cuts_nothing():
    wide, narrow = bench_text(rows()), bench_text(rows(), 60)
    assert wide.splitlines()[0].startswith("Cell")
    assert narrow.splitlines()[0] == "ddp"
    assert "Config" in narrow
    assert bench_text(rows(), 1000) == wide


def test_without_rows_there_is_nothing():
    assert bench_text([]) == ""


@settings(max_examples=examples(100))
@given(st.lists(any_run(), min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 400)))
def test_whatever_the_record_it_is_printed_line_by_line(runs, width):
    some = [
        BenchRow(f"cell {place}", replace(run.record, ended="done"), (1.0,), (Path("x"),))
        for place, run in enumerate(runs)
    ]
    text = bench_text(some, width)
    assert all(row.cell in text for row in some)
    assert all(line.isprintable() for line in text.splitlines())
