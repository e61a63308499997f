"""Records as text: the source's columns, whole figures, and readable at any width."""

import csv
import io
import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.words import Grid, show_digits, show_params
from hpc_gpt.reader.report.tables import COLUMNS, as_block, print_record, record_pieces, records_text, show_layout

PUBLISHED_RUN = Record(
    run="20210527-040202-ab12",
    name="gpt2-meg-ds-3d-48b",
    engine="deepspeed-3d",
    gpus=64,
    params=51_970_000_000,
    tp=4,
    pp=16,
    dp=1,
    micro_batches=256,
    micro_batch=4,
    global_batch=1024,
    recompute="full",
    dtype="fp16",
    device="v100-32g",
    step_s=146.0,
    step_s_p10=143.2,
    step_s_p90=150.1,
    steps_used=99,
    warmup_steps=1,
    tokens_per_s=7182.0,
    tflops_seed=46.66,
    tflops_hardware=47.9,
    tflops_model=36.1,
    mfu=0.2888,
    loss_first=12.8,
    loss_last=6.4,
    ended="done",
)
EMPTY = Record(run="20210527-040202-ffff", name="demo", gpus=4, ended="pending")


def test_columns_stand_in_the_source_order():
    headings = [column.heading for column in COLUMNS]
    assert headings[:9] == ["GPUs", "Size", "TP", "PP", "CP", "DP", "Micro-batches", "Mic-BS", "Glob-BS"]
    assert [heading for heading in headings if "TFLOPs" in heading] == [
        "TFLOPs P s B",
        "TFLOPs hardware",
        "TFLOPs model",
        "TFLOPs printed",
    ]


def test_cp_is_shown_where_a_run_has_it():
    assert show_layout(replace(PUBLISHED_RUN, cp=1)) == show_layout(PUBLISHED_RUN) == "tp4-pp16-dp1"
    assert "CP" not in records_text([PUBLISHED_RUN, replace(PUBLISHED_RUN, cp=1)])
    wide = replace(PUBLISHED_RUN, pp=8, cp=2)
    assert show_layout(wide) == "tp4-pp8-cp2-dp1"
    assert "CP" in records_text([PUBLISHED_RUN, wide]).splitlines()[0].split()


def test_memory_and_printed_tflops_are_shown_where_known():
    assert "Memory" not in records_text([PUBLISHED_RUN])
    assert "printed" not in records_text([PUBLISHED_RUN])
    run = replace(PUBLISHED_RUN, memory_allocated_gib=[12.0, 25.5, None], tflops_printed=40.93)
    for text in (records_text([PUBLISHED_RUN, run]), records_text([run], "md")):
        for words in ("Memory GiB", "25.5", "TFLOPs printed", "40.9"):
            assert words in text
    assert "25.5 GiB allocated" in as_block(run)
    assert "40.9 TFLOP/s per rank  (as the program prints it)" in as_block(run)


def test_a_name_that_the_run_begins_with_is_not_said_twice():
    log = replace(PUBLISHED_RUN, name="train", run="train-4711")
    assert records_text([log]).splitlines()[1].endswith(" train-4711")
    assert as_block(log).startswith("train-4711\n")
    assert as_block(replace(log, name="demo")).startswith("demo/train-4711\n")


def test_a_block_says_nothing_of_what_is_not_known():
    log = Record(name="a", run="b", gpus=16, tp=2, global_batch=64, step_s=57.44, steps_used=16, warmup_steps=0)
    block = as_block(log)
    assert "None" not in block
    assert "median" not in block  # a total over its steps
    assert "tp2 on 16 ranks\n" in block


def test_a_row_reads_like_the_source():
    heading, row = records_text([PUBLISHED_RUN]).splitlines()
    assert heading.split()[:5] == ["GPUs", "Size", "TP", "PP", "DP"]
    assert row.split()[:9] == ["64", "52.0B", "4", "16", "1", "256", "4", "1024", "146"]
    assert "12.800 -> 6.400" in row
    assert "gpt2-meg-ds-3d-48b/20210527-040202-ab12" in row


def test_a_pipe_gets_whole_lines_a_record_each():
    lines = records_text([PUBLISHED_RUN, EMPTY]).splitlines()
    assert len(lines) == 3
    assert "…" not in "".join(lines)
    assert lines[0].index("Ended") == lines[1].index("done") == lines[2].index("pending")


@pytest.mark.parametrize("width", [20, 60, 80, 100])
def test_a_narrow_terminal_gets_a_block_a_record_uncut(width):
    text = records_text([PUBLISHED_RUN, replace(EMPTY, flags=["a long flag " * 10])], "table", width)
    assert "46.7 TFLOP/s" in text
    assert text.count("20210527-040202") == 2
    assert "…" not in text


def test_a_wide_terminal_gets_the_table():
    assert records_text([PUBLISHED_RUN], "table", 400) == records_text([PUBLISHED_RUN], "table", None)


def test_csv_holds_figures_in_full_under_the_records_keys():
    (row,) = csv.DictReader(io.StringIO(records_text([PUBLISHED_RUN], "csv")))
    assert (float(row["step_s"]), float(row["step_s_p90"])) == (146.0, 150.1)
    assert int(row["params"]) == 51_970_000_000
    assert (row["loss_eval"], list(row)[:3]) == ("", ["gpus", "params", "tp"])


def test_csv_of_an_odd_name():
    (row,) = csv.DictReader(io.StringIO(records_text([replace(PUBLISHED_RUN, name='a,"b"\nc')], "csv")))
    assert row["name"] == 'a,"b"\nc'


def test_markdown_takes_a_bar_in_a_heading_or_a_cell():
    table = Grid(("a|b", "c"), (False, True), [("d", "e|f")]).markdown()
    assert table == "| a\\|b |    c |\n| ---- | ---: |\n| d    | e\\|f |\n"


def test_no_name_is_markup_in_markdown():
    names = ["<script>alert(1)</script>", "a\\|b", "[x](javascript:1)", "`c`"]
    text = Grid(["Run"], [False], [[name] for name in names]).markdown()
    rows = [line[2:-2].rstrip() for line in text.splitlines()[2:]]
    assert rows == ["\\<script>alert(1)\\</script>", r"a\\\|b", r"\[x](javascript:1)", r"\`c\`"]


def test_markdown_is_a_table_of_equal_columns():
    lines = records_text([PUBLISHED_RUN, replace(EMPTY, name="a|b")], "md").splitlines()
    assert {line.replace("\\|", "").count("|") for line in lines} == {
        sum(not column.optional for column in COLUMNS) + 1
    }
    assert set(lines[1]) == set("| -:")


def test_json_is_one_object_with_every_key():
    page = json.loads(records_text([PUBLISHED_RUN, EMPTY], "json"))
    assert page["schema"] == 1
    assert [record["run"] for record in page["records"]] == [PUBLISHED_RUN.run, EMPTY.run]
    assert list(page["records"][1]) == list(Record().to_tables())


def test_no_record_at_all():
    records = [PUBLISHED_RUN, replace(EMPTY, cause='a\n"b"')]
    pieces = list(record_pieces(records, "json"))
    assert len(pieces) == 3, "a piece for each record and one for the end: 10,000 records are never one text"
    page = {"schema": 1, "records": [record.to_tables() for record in records]}
    assert "".join(pieces) == json.dumps(page, indent=1) + "\n"
    assert json.loads(records_text([], "json")) == {"schema": 1, "records": []}
    assert len(records_text([], "csv").splitlines()) == 1


def test_a_block_names_each_formula_and_omits_the_unknown():
    text = as_block(PUBLISHED_RUN)
    for word in ("tflops_seed", "tflops_hardware", "tflops_model", "12.800 -> 6.400", "146 s", "7,182", "99; 10th"):
        assert word in text
    assert "GPU hours" not in text
    assert "pending" in as_block(EMPTY)
    assert "None" not in text + as_block(EMPTY) + as_block(Record())


def test_print_record_writes_to_stdout(capsys):
    print_record(PUBLISHED_RUN)
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == (as_block(PUBLISHED_RUN), "")


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
