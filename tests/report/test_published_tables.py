"""A sweep in its published own columns: our figure and the source's side by side, and rows that nobody ran."""

import json

import pytest
from click.testing import CliRunner

from hpc_gpt.cli.report import report
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.experiment_file import find_sweep
from hpc_gpt.core.settings.sweep_rows import SweepRow
from hpc_gpt.report.published_tables import PUBLISHED_TABLES, SweepLine, sweep_lines, sweep_text
from tests.experiments.sweeps import COUNTS
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.report.test_whole_tables import OWN

GENERIC = "generic-slurm"


@pytest.fixture
def logs(tmp_path, monkeypatch):
    folder = tmp_path / "logs"
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder))
    return folder


def call(*words):
    return CliRunner().invoke(report, words, catch_exceptions=False)


def ran(logs, experiment, row, step_s=0.5, **values):
    """A run of that row whose steps took so long."""
    run = make_run(logs, GENERIC, experiment, row=row)
    add_attempt(run, [metrics_line(step, **{"step_s": step_s, **values}) for step in range(1, 21)])
    return run


def cells(text, row):
    """The cells of a row in a markdown table, by heading; the published ones as `HEADING published`."""
    heading, _, *lines = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in text.splitlines()]
    names = [
        f"{heading[place - 1].strip()} published" if name == "published" else name for place, name in enumerate(heading)
    ]
    found = [dict(zip(names, line, strict=True)) for line in lines if line[0] == row]
    assert found, text
    return found[0] if len(found) == 1 else found


@pytest.mark.parametrize("name", COUNTS)
def test_every_folder_has_its_columns_and_each_figure_a_place(name):
    sweep = find_sweep(name)
    shown = {column.published for column in PUBLISHED_TABLES[name].columns}
    for row in sweep.rows:
        assert set(row.published) <= shown | {"notes"}, row.name


# The published TFLOPs that their rows contradict, with what the formula gives. Others are rounded or cut off.
CONTRADICTED = {
    ("gpt2-meg", "perf-18b-pp8-c128-mb4"): ("26.5", "26.66"),
    ("gpt2-meg-ds-zero", "off-48b-tp1"): ("34.99", "34.19"),
    ("gpt2-meg-ds-zero", "full-48b"): ("39.71", "36.79"),
    ("gpt2-hf-ds", "max-23b"): ("25.66", "12.83"),
}
TOO_FEW_GPUS = 6


def test_what_is_wrong_in_published_tables_alone_is_marked():
    lines = [(name, line) for name in COUNTS for line in sweep_lines(name, []).lines]
    found = {(name, line.row.name): line.contradiction for name, line in lines if line.contradiction}
    assert set(found) == set(CONTRADICTED)
    for place, (printed, figure) in CONTRADICTED.items():
        assert found[place] == f"TFLOPs {printed}: 8 P s B / (t n 1e12) of this row is {figure}"
    assert sum("GPUs, the row has" in line.notes for _, line in lines) == TOO_FEW_GPUS


def test_a_contradiction_is_in_the_table_and_in_json(logs):
    row = cells(call("gpt2-hf-ds", "--format", "md").stdout, "max-23b")
    assert "of this row is 12.83" in row["Notes"]
    page = json.loads(call("gpt2-hf-ds", "--json").stdout)
    assert [each["row"] for each in page["rows"] if each["contradiction"]] == ["max-23b"]


@pytest.mark.parametrize(
    ("printed", "marked"), [(26.66, False), (26.6, False), (26.7, False), (26.5, True), (27, False), (28, True)]
)
def test_a_figure_that_is_rounded_or_cut_off_follows(printed, marked):
    # 8 x 18e9 x 1,024 x 512 / (177 x 16 x 1e12) = 26.66
    asked = Record(seq=1024, global_batch=512, gpus=16, recompute="full")
    row = SweepRow("a", published={"size": "18B", "step_s": 177, "tflops_seed": printed})
    assert bool(SweepLine(row, asked).contradiction) is marked


def test_rows_without_a_run_and_impossible_ones_have_a_reason(logs):
    run = ran(logs, "gpt2-meg", "32g-18b")
    text = call(str(logs), "--format", "md").stdout
    assert len(text.splitlines()) == 2 + COUNTS["gpt2-meg"]
    assert cells(text, "32g-18b")["Run"] == run.run_id
    waiting, never = cells(text, "32g-28b"), cells(text, "perf-48b-pp32-c256-mb4")
    assert (waiting["Throughput s"], waiting["Throughput s published"], waiting["Ended"]) == ("-", "1.618", "")
    assert (never["GPUs"], never["PP"], never["Glob-BS"]) == ("64", "32", "1024")
    assert (never["Ended"], never["TFLOPs (8 or 6) P s B published"]) == ("impossible", "28.6")
    assert never["Notes"] == "05-26; tp4 x pp32 needs 128 GPUs, the row has 64"


def test_a_sweep_by_name_is_its_runs_or_the_source_table(logs):
    assert call("memory-ladder", "--format", "md").stdout.count("\n") == 2 + 7
    ran(logs, "memory-ladder", "batch64", memory_reserved_gib=[14.0], memory_allocated_gib=[13.0])
    ran(logs, "colab-ladder", "tf32")
    row = cells(call("memory-ladder", "--format", "md").stdout, "batch64")
    assert (row["Training Latency (s)"], row["Training Latency (s) published"]) == ("80.0", "56.8")


def test_one_rows_runs_are_together_and_a_smoke_run_alone(logs):
    first, second = ran(logs, "memory-ladder", "batch32"), ran(logs, "memory-ladder", "batch32")
    smoke = make_run(logs, GENERIC, "memory-ladder", row="batch128", name="memory-ladder-batch128-smoke")
    text = call("--format", "md").stdout
    assert {line["Run"] for line in cells(text, "batch32")} == {first.run_id, second.run_id}
    published, shrunken = cells(text, "batch128")
    assert (published["Training Latency (s) published"], published["Run"]) == ("45.5", "-")
    assert (shrunken["Training Latency (s) published"], shrunken["Notes"]) == ("-", "smoke run")
    assert shrunken["Run"] == smoke.run_id


def test_csv_and_json_have_every_row_and_records_in_order(logs):
    run = ran(logs, "gpt2-hf-ds", "max-48b", step_s=60.0)
    assert len(call("--format", "csv").stdout.splitlines()) == 1 + COUNTS["gpt2-hf-ds"]
    later = ran(logs, "gpt2-hf-ds", "max-23b")
    page = json.loads(call("--json").stdout)
    assert (list(page), len(page["rows"])) == (["schema", "records", "sweep", "rows"], COUNTS["gpt2-hf-ds"])
    assert [record["run"] for record in page["records"]] == [run.run_id, later.run_id]
    assert page["records"][0]["settings"]["sweep"] == {"name": "gpt2-hf-ds", "row": "max-48b"}


def test_runs_of_several_sweeps_and_of_none_have_usual_columns(logs):
    ran(logs, "memory-ladder", "batch32")
    assert call("--columns", "usual").stdout.split()[:3] == ["Run", "Layout", "GPUs"]
    make_run(logs)
    assert call().stdout.split()[:3] == ["Run", "Layout", "GPUs"]
    with pytest.raises(ConfigError, match="one sweep"):
        call("--columns", "published")


def test_a_run_whose_sweep_or_row_is_gone_prints_a_dash(logs):
    run = ran(logs, "memory-ladder", "batch32")
    text = run.path.joinpath("resolved.json").read_text()
    run.path.joinpath("resolved.json").write_text(text.replace('"sweep": "memory-ladder"', '"sweep": "no-such"'))
    table = call().stdout.splitlines()
    assert len(table) == 2
    assert run.run_id in table[1]
    run.path.joinpath("resolved.json").write_text(text.replace('"row": "batch32"', '"row": "batch31"'))
    row = cells(call("--format", "md").stdout, "batch31")
    assert (row["Training Latency (s)"], row["Training Latency (s) published"]) == ("160", "-")


def test_ones_own_sweep_is_named_by_its_file(tmp_path, logs):
    (path := tmp_path / "mine.toml").write_text(OWN)
    assert call(str(path)).stdout == sweep_text(sweep_lines("mine", [], str(path)), "table")
    run = ran(logs, str(path), "small", step_s=0.25)
    (line,) = [line for line in call(str(path)).stdout.splitlines() if run.run_id in line]
    assert line.split()[:4] == ["small", "1", "0.001", "tp1-pp1-dp1"]


@pytest.mark.parametrize("width", [20, 60])
def test_a_narrow_terminal_gets_a_block_a_row_uncut(width):
    text = sweep_text(sweep_lines("colab-ladder", []), "table", width)
    assert text.count("\n\n") == COUNTS["colab-ladder"] - 1
    assert "112136.19" in text
    lines = sweep_lines("colab-ladder", [])
    assert sweep_text(lines, "table", 400) == sweep_text(lines, "table")
