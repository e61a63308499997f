"""Columns and order of one's choice."""

import csv
import io
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import RECORD_KEYS, Record
from hpc_gpt.report.tables import (
    all_columns,
    choose_columns,
    json_lines,
    json_text,
    look_up,
    records_text,
    sort_records,
)

FAST = Record(run="fast", gpus=8, step_s=0.5, params=124_000_000, settings={"engine": {"compile": "blocks"}})
SLOW = Record(run="slow", gpus=64, step_s=2.0, memory_allocated_gib=[3.0, 21.586], flags=["odd"])
NONE = Record(run="none")


def test_columns_stand_in_the_order_asked_for():
    columns = choose_columns(["step_s", "gpus", "settings.engine.compile", "memory_allocated_gib"])
    lines = records_text([FAST, SLOW], columns=columns).splitlines()
    assert lines[0].split() == ["Step", "s", "GPUs", "settings.engine.compile", "memory_allocated_gib"]
    assert lines[1].split() == ["0.500", "8", "blocks", "-"]
    assert lines[2].split() == ["2.00", "64", "-", "3.00,", "21.6"]


def test_what_a_sweep_varies_is_a_column_and_among_all():
    rows = [
        Record(run=f"r{lr:g}", gpus=8, mfu=0.4, settings={"sweep": {"varied": {"command.values.lr": lr}}})
        for lr in (3e-4, 1e-4)
    ]
    lines = records_text(rows, columns=choose_columns(["run", "command.values.lr"])).splitlines()
    assert [line.split() for line in lines] == [
        ["run", "command.values.lr"],
        ["r0.0003", "0.000300"],
        ["r0.0001", "0.000100"],
    ]
    assert sort_records(rows, ["command.values.lr"]) == [1, 0]
    rows[0] = replace(rows[0], power_w=640.0, gpu_hours=2.0)
    heading = records_text(rows, columns=all_columns(rows)).splitlines()[0]
    assert [each for each in ("command.values.lr", "MFU", "W", "GPU hours") if f" {each} " not in f" {heading} "] == []
    assert "MHz" not in heading, "no row has a value"


@pytest.mark.parametrize("key", ["stepp_s", "", "settngs.engine", "-gpus"])
def test_an_unknown_key_is_told_with_the_nearest(key):
    with pytest.raises(ConfigError, match="a record has no key") as fault:
        choose_columns([key])
    assert fault.value.hint


def test_order_from_low_to_high_and_back_with_the_unknown_last():
    records = [NONE, SLOW, FAST]
    assert [records[index].run for index in sort_records(records, ["step_s"])] == ["fast", "slow", "none"]
    assert [records[index].run for index in sort_records(records, ["-step_s"])] == ["slow", "fast", "none"]
    assert [records[index].run for index in sort_records(records, ["memory_allocated_gib"])] == ["slow", "none", "fast"]


@given(st.lists(st.tuples(st.sampled_from([None, 1, 2]), st.sampled_from([None, "a", "b"]))))
def test_the_first_key_leads_and_equals_keep_their_order(values):
    records = [Record(gpus=gpus, name=name, seq=place) for place, (gpus, name) in enumerate(values)]
    order = sort_records(records, ["-gpus", "name"])
    assert sorted(order) == list(range(len(records)))

    def rank(index):
        gpus, name = values[index]
        return (gpus is None, -(gpus or 0), name is None, name or "", index)

    assert order == sorted(range(len(records)), key=rank)


def test_every_key_can_be_a_column_and_an_order():
    for key in RECORD_KEYS:
        records_text([FAST, SLOW, NONE], columns=choose_columns([key]))
        assert sorted(sort_records([FAST, SLOW, NONE], [key, f"-{key}"])) == [0, 1, 2]


def test_a_dot_reaches_inside():
    assert look_up(FAST, "settings.engine.compile") == "blocks"
    assert look_up(FAST, "settings.engine.compile.more") is None
    assert look_up(FAST, "gpus.more") is None


def test_a_name_from_a_log_obeys_no_terminal_and_no_spreadsheet():
    hostile = Record(name="\x1b[2J\nx", run="=cmd|'/c calc'!A1", gpus=1)
    for text in (records_text([hostile]), records_text([hostile], width=20), records_text([hostile], "md")):
        assert "\x1b" not in text
        assert "\nx" not in text
    rows = list(csv.DictReader(io.StringIO(records_text([hostile], "csv"))))
    assert rows[0]["run"].startswith("'=")
    assert rows[0]["gpus"] == "1"


@pytest.mark.parametrize(("write", "value"), [(json_text, {"a": math.nan}), (json_lines, [{"a": math.inf}])])
def test_json_has_no_word_of_pythons_alone(write, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write(value)
