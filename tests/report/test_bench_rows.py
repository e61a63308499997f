"""The rows of a bench in a report and a comparison: once, and not the rounds below them."""

import json

import pytest

from hpc_gpt.bench.folder import make_folder
from hpc_gpt.bench.row import Row
from hpc_gpt.errors import ConfigError, NoSuchRun
from hpc_gpt.readers.own_runs.kept_records import BENCH_FILE
from hpc_gpt.report.comparison.compared import read_compared
from hpc_gpt.report.gather import gather_paths, read_one
from hpc_gpt.runs.record import Record
from tests.made_runs import add_attempt, make_run, metrics_line
from tests.readers.made_logs import dump, iterations, write_log


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def bench(logs):
    """Two rows, with a run and a peer's log of theirs below."""
    folder = make_folder(logs, "gpt2")
    add_attempt(make_run(folder.path), [metrics_line(step) for step in range(1, 11)])
    write_log(folder.path / "peer-round1.log", dump(), iterations(1, 5))
    folder.write(
        [
            Row(name, Record(run=folder.name_of(place), name=name, tokens_per_s=speed, ended="done"), (speed,))
            for place, (name, speed) in enumerate((("ddp", 100.0), ("fsdp", 90.0)))
        ]
    )
    return folder


def test_its_rows_stand_for_the_rounds_below(bench, logs):
    for path in (bench.path, bench.file, bench.path.parent, logs):
        gathered = gather_paths([str(path)], logs)
        assert [record.run for record in gathered.records] == [f"{bench.id}#1", f"{bench.id}#2"], path
        assert [record.tokens_per_s for record in gathered.records] == [100.0, 90.0]
        assert not gathered.unread
        assert not gathered.notes
    assert len(gather_paths([str(bench.path), str(bench.file)], logs).runs) == 2


def test_the_runs_of_its_rounds_are_read_where_they_are_named(bench, logs):
    (run,) = gather_paths([str(bench.path / "demo")], logs).records
    assert run.tokens_per_s
    assert run.dialect == "hpc-gpt"


def test_other_runs_are_beside_it(bench, logs):
    add_attempt(make_run(logs), [metrics_line(step) for step in range(1, 11)])
    assert len(gather_paths([str(logs)], logs).runs) == 3
    assert len(gather_paths([], logs).runs) == 3


def test_a_row_by_its_number(bench, logs):
    for name in (bench.id, bench.id[:12], bench.path, bench.file):
        assert [read_one(f"{name}#{number}", logs).record.name for number in (1, 2)] == ["ddp", "fsdp"]
        assert read_compared(f"{name}#2", logs).record.name == "fsdp"
    with pytest.raises(NoSuchRun):
        read_one(f"{bench.path}#3", logs)
    with pytest.raises(NoSuchRun) as refused:
        read_one(str(bench.path), logs)
    assert f"{bench.id}#1" in refused.value.hint
    with pytest.raises(ConfigError) as several:
        read_compared(str(bench.file), logs)
    assert f"{BENCH_FILE}#1" in several.value.hint


def test_no_bench_of_that_id(logs):
    for name in ("20990101-000000-0000#1", "#1", "../x#1", "*#1"):
        with pytest.raises(NoSuchRun):
            read_one(name, logs)


def test_a_report_of_that_name_hides_no_run(logs):
    run = make_run(logs)
    add_attempt(run, [metrics_line(step) for step in range(1, 11)])
    page = {"schema": 1, "records": [record.to_tables() for record in gather_paths([str(logs)], logs).records]}
    (logs / BENCH_FILE).write_text(json.dumps(page))
    assert [record.run for record in gather_paths([str(logs)], logs).records] == [run.run_id]


def test_a_damaged_row_is_told_of(bench, logs):
    page = json.loads(bench.file.read_text())
    page["records"][0]["tokens_per_s"] = "fast"
    bench.file.write_text(json.dumps(page))
    gathered = gather_paths([str(bench.path)], logs)
    assert not gathered.runs
    assert "tokens_per_s" in gathered.unread[0]
