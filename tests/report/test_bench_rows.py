"""The rows of a bench.json in a report and a comparison: once, and not the rounds below them."""

import json

import pytest

from hpc_gpt.core.errors import NoSuchRun
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.rounds import BENCH_FILE
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.gather import gather_paths, read_bench, read_compared, read_one
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run, with_attempt
from tests.measured_rows import make_bench
from tests.reader.made_logs import dump, iterations, write_log
from tests.report.test_compared_notes import row


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def bench(logs):
    """Two rows, with a run and a peer's log of theirs below."""
    rows = (("ddp", 100.0), ("fsdp", 90.0))
    folder = make_bench(
        logs, "gpt2", *((Record(name=name, tokens_per_s=speed, ended="done"), (speed,)) for name, speed in rows)
    )
    add_attempt(make_run(folder), 10)
    write_log(folder / "peer-round1.log", dump(), iterations(1, 5))
    return folder


def test_its_rows_stand_for_the_rounds_below(bench, logs):
    for path in (bench, (bench / BENCH_FILE), bench.parent, logs):
        gathered = gather_paths([str(path)], logs)
        assert [record.run for record in gathered.records] == [f"{bench.name}#1", f"{bench.name}#2"], path
        assert [record.tokens_per_s for record in gathered.records] == [100.0, 90.0]
        assert not gathered.unread
        assert not gathered.notes
    assert len(gather_paths([str(bench), str(bench / BENCH_FILE)], logs).runs) == 2


def test_the_runs_of_its_rounds_are_read_where_they_are_named(bench, logs):
    (run,) = gather_paths([str(bench / "demo")], logs).records
    assert run.tokens_per_s
    assert run.dialect == "hpc-gpt"


def test_other_runs_are_beside_it(bench, logs):
    add_attempt(make_run(logs), 10)
    assert (len(gather_paths([str(logs)], logs).runs), len(gather_paths([], logs).runs)) == (3, 3)


def test_a_row_by_its_number(bench, logs):
    for name in (bench, (bench / BENCH_FILE)):
        assert [read_one(f"{name}#{number}", logs).record.name for number in (1, 2)] == ["ddp", "fsdp"]
        assert read_compared(f"{name}#2", logs).record.name == "fsdp"


def test_no_bench_of_that_id(logs):
    for name in ("20990101-000000-0000#1", "#1", "../x#1", "*#1"):
        with pytest.raises(NoSuchRun):
            read_one(name, logs)


def test_rows_on_other_gpu_counts_are_compared_by_gpu_as_well():
    one = row("p", "f", 100, 102, 98, gpus=1, hidden=64, tflops_model=10.0)
    found = compare_runs(one, row("q", "f", 150, 153, 147, gpus=2, hidden=128, tflops_model=15.0))
    assert [speed.name for speed in found.speeds] == ["tokens_per_s", "tokens_per_s_gpu", "tflops_model"]
    assert [speed.interval.change for speed in found.speeds] == pytest.approx([50.0, -25.0, 50.0])


def test_rounds_that_are_no_speeds_are_none(bench, logs):
    for damaged in ([{"tokens_per_s": ["fast"]}, {"tokens_per_s": [True, -1]}], [{}], "x", [1, 2]):
        page = json.loads((bench / BENCH_FILE).read_text())
        page["rows"] = damaged
        (bench / BENCH_FILE).write_text(json.dumps(page))
        assert [run.rounds for run in read_bench(bench / BENCH_FILE)] == [[], []]


def test_the_only_row_of_a_bench_by_its_file(logs):
    folder = make_bench(logs, "gpt2", (Record(name="a", tokens_per_s=100.5, ended="done"), (100.0, 101.0)))
    assert read_compared(str(folder / BENCH_FILE), logs).rounds == [100.0, 101.0]


def test_a_report_of_that_name_hides_no_run(logs):
    run = with_attempt(make_run(logs), 10)
    page = {"schema": 1, "records": [record.to_tables() for record in gather_paths([str(logs)], logs).records]}
    (logs / BENCH_FILE).write_text(json.dumps(page))
    assert [record.run for record in gather_paths([str(logs)], logs).records] == [run.run_id]


def test_a_damaged_row_is_told_of(bench, logs):
    page = json.loads((bench / BENCH_FILE).read_text())
    page["records"][0]["tokens_per_s"] = "fast"
    (bench / BENCH_FILE).write_text(json.dumps(page))
    gathered = gather_paths([str(bench)], logs)
    assert not gathered.runs
    assert "tokens_per_s" in gathered.unread[0]


def test_a_report_of_its_folder_alone_is_its_own_table(bench):
    for path in (bench, (bench / BENCH_FILE)):
        heading, first, second, *_ = in_process("report", path).stdout.splitlines()
        assert heading.split()[:4] == ["Row", "Layout", "Tokens/s", "Ratio"]
        assert [line.split()[:4] for line in (first, second)] == [
            ["ddp", "-", "100", "1.000"], ["fsdp", "-", "90", "0.900"]
        ]  # fmt: skip
    page = json.loads((bench / BENCH_FILE).read_text())
    del page["rows"]  # of an early version
    (bench / BENCH_FILE).write_text(json.dumps(page))
    assert "fsdp" in in_process("report", bench).stdout
