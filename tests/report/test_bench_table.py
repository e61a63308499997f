"""bench.json, and the printed rows of one: a table, a block if the terminal is narrow, marks for what did not fit."""

import json
import os
from dataclasses import replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from hpc_gpt.core.runs.rounds import is_bench
from hpc_gpt.reader.runs.run_read import read_records
from hpc_gpt.report.bench_table import file_text, rows_text
from hpc_gpt.report.measured_rows import measurement_row
from tests import examples
from tests.measured_rows import tables_of
from tests.report.any_run import any_run
from tests.report.test_measured_rows import bad, good


def rows(race: Path):
    return [
        measurement_row("ddp", "id#1", [replace(good(step_s), place=race / "x") for step_s in (0.030, 0.032)]),
        measurement_row("fsdp", "id#2", [good(0.060, allocator_retries=3)]),
        measurement_row("ddp mbs 64", "id#3", [bad()]),
    ]


def file_of(race: Path) -> Path:
    (file := race / "bench.json").write_text(json.dumps(tables_of(rows(race), race)))
    return file


def test_the_rows_come_back_as_they_were(tmp_path):
    file = file_of(tmp_path)
    assert is_bench(file)
    assert read_records(file) == [row.record for row in rows(tmp_path)]
    page = json.loads(file.read_text())
    assert (page["schema"], page["bench"]) == (1, tmp_path.name)
    first, _, last = rows(tmp_path)
    measured = {"run": "id#1", "cell": "ddp", "tokens_per_s": list(first.tokens_per_s), "ratio": 1.0}
    failed = {"run": "id#3", "cell": "ddp mbs 64", "tokens_per_s": [], "ratio": None}
    assert page["rows"][0] == {**measured, "tenth_step_s": [], "rounds": ["x", "x"]}
    assert page["rows"][2] == {**failed, "tenth_step_s": [], "rounds": [os.path.relpath(last.places[0], tmp_path)]}


def test_without_a_race_a_ratio_is_to_the_first_row(tmp_path):
    heading, *lines = file_text(file_of(tmp_path)).splitlines()
    assert "  Ratio  " in heading
    assert [("1.000" in line, "0.516" in line) for line in lines[:2]] == [(True, False), (False, True)]


def test_little_room_takes_a_block_a_row_and_cuts_nothing(tmp_path):
    file = file_of(tmp_path)
    wide, narrow = file_text(file), file_text(file, 60)
    assert wide.splitlines()[0].startswith("Row")
    assert narrow.splitlines()[0] == "ddp"
    assert "slowed down by allocator retries" in narrow
    assert file_text(file, 1000) == wide


def test_what_is_no_bench_has_no_table(tmp_path):
    assert file_text(tmp_path / "bench.json") == ""
    (tmp_path / "bench.json").write_text("{}")
    assert file_text(tmp_path / "bench.json") == ""


@settings(max_examples=examples(100))
@given(st.lists(any_run(), min_size=1, max_size=4), st.one_of(st.none(), st.integers(1, 400)))
def test_whatever_the_record_it_is_printed_line_by_line(runs, width):
    named = [replace(run.record, name=f"row {place}", ended="done") for place, run in enumerate(runs)]
    text = rows_text(named, width)
    assert all(str(record.name) in text for record in named)
    assert all(line.isprintable() for line in text.splitlines())
