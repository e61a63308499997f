"""Records as text: the source's columns, whole figures, and readable at any width."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.columns import Grid
from hpc_gpt.core.format import show_digits, show_params
from hpc_gpt.core.runs.record import Record
from hpc_gpt.report.tables import as_block, print_record, record_pieces, records_text, show_layout
from tests.report.test_whole_texts import RUN

EMPTY = Record(run="20210527-040202-ffff", name="demo", gpus=4, ended="pending")


def test_cp_is_shown_where_a_run_has_it():
    assert show_layout(replace(RUN, cp=None)) == show_layout(RUN) == "tp2-pp2-dp2"
    wide = replace(RUN, pp=8, cp=2)
    assert show_layout(wide) == "tp2-pp8-cp2-dp2"
    assert "tp2-pp8-cp2-dp2" in records_text([RUN, wide]).splitlines()[2].split()


@pytest.mark.parametrize("width", [20, 60, 80, 100])
def test_a_narrow_terminal_gets_a_block_a_record_uncut(width):
    text = records_text([RUN, replace(EMPTY, flags=["a long flag " * 10])], "table", width)
    assert "30.0 TFLOP/s" in text
    assert [text.count(record.run) for record in (RUN, EMPTY)] == [1, 1]
    assert "…" not in text


def test_a_wide_terminal_gets_the_table():
    assert records_text([RUN], "table", 400) == records_text([RUN], "table", None)


def test_markdown_takes_a_bar_in_a_heading_or_a_cell():
    table = Grid(("a|b", "c"), (False, True), [("d", "e|f")]).markdown()
    assert table == "| a\\|b |    c |\n| ---- | ---: |\n| d    | e\\|f |\n"


def test_no_name_is_markup_in_markdown():
    names = ["<script>alert(1)</script>", "a\\|b", "[x](javascript:1)", "`c`"]
    text = Grid(["Run"], [False], [[name] for name in names]).markdown()
    rows = [line[2:-2].rstrip() for line in text.splitlines()[2:]]
    assert rows == ["\\<script>alert(1)\\</script>", r"a\\\|b", r"\[x](javascript:1)", r"\`c\`"]


def test_no_record_at_all():
    records = [RUN, replace(EMPTY, cause='a\n"b"')]
    pieces = list(record_pieces(records, "json"))
    assert len(pieces) == 3, "a piece for each record and one for the end: 10,000 records are never one text"
    page = {"schema": 1, "records": [record.to_tables() for record in records]}
    assert "".join(pieces) == json.dumps(page, indent=1) + "\n"
    assert json.loads(records_text([], "json")) == {"schema": 1, "records": []}
    assert len(records_text([], "csv").splitlines()) == 1


def test_print_record_writes_to_stdout(capsys):
    print_record(RUN)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (as_block(RUN), "")


@pytest.mark.parametrize(
    ("figure", "text"),
    [(146.0, "146"), (2.738, "2.74"), (0.04133, "0.0413"), (0.5, "0.500"), (12345.6, "12346"), (0, "0"), (None, "-")],
)
def test_three_digits_at_least(figure, text):
    assert show_digits(figure) == text


@given(st.floats(1e-9, 1e12))
def test_a_shown_figure_is_within_half_a_percent(figure):
    assert float(show_digits(figure)) == pytest.approx(figure, rel=0.0051)


@pytest.mark.parametrize(
    ("params", "text"),
    [(51_970_000_000, "52.0B"), (207_010_000_000, "207B"), (124_475_904, "124M"), (845_000, "845K"), (7, "7")],
)
def test_sizes_as_the_source_prints_them(params, text):
    assert show_params(params) == text
