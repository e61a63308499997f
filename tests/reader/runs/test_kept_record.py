"""A second report of many runs that are over reads none of them, and says what a first one says."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hpc_gpt import __version__
from hpc_gpt.core.files import append_line
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.reader.runs.kept_record import code_sum
from hpc_gpt.reader.runs.own_run import read_own
from hpc_gpt.report import gather
from hpc_gpt.report.gather import GatheredRuns, gather_paths
from tests.made_runs import add_attempt, make_old, make_run, metrics_line

COUNT = 9


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    """Nine runs of yesterday that are over."""
    run = make_run(tmp_path / "logs")
    add_attempt(run, 20, "error", cause="rank 0: boom")
    for number in range(1, COUNT):
        shutil.copytree(run.path, run.path.with_name(f"20260101-000000-{number:04x}"))
    make_old(tmp_path / "logs")
    return tmp_path / "logs"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[RunFolder]:
    """The runs that were read."""
    runs: list[RunFolder] = []
    monkeypatch.setattr(gather, "read_own", lambda run, **how: (runs.append(run), read_own(run, **how))[1])
    return runs


def report(logs: Path, *paths: Path) -> GatheredRuns:
    return gather_paths([str(path) for path in paths or (logs,)], logs, records_only=True)


def shown(gathered: GatheredRuns) -> list[object]:
    tables = [json.loads(record.to_json()) for record in gathered.records]
    return [tables, [record.all_flags for record in gathered.records], [run.files for run in gathered.runs]]


def anew(logs: Path) -> list[object]:
    """The text of a report that reads each run anew."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gather, "read_kept", lambda run: None)
        return shown(report(logs))


def test_the_second_report_reads_no_run(logs: Path, read: list[RunFolder]) -> None:
    first = shown(report(logs))
    assert len(read) == COUNT
    read.clear()
    written = {run.record.stat().st_mtime_ns for run in list_runs(logs)}
    assert shown(report(logs)) == first
    assert (read, written) == ([], {run.record.stat().st_mtime_ns for run in list_runs(logs)})
    assert shown(report(logs)) == first == anew(logs)


@pytest.mark.parametrize(
    "change",
    [
        lambda run: add_attempt(run, [metrics_line(21)]),
        lambda run: append_line(run.path / "attempts" / "1" / "metrics.jsonl", json.dumps(metrics_line(21))),
        lambda run: (run.path / "attempts" / "1" / "ended.json").write_text('{"ended": "nan", "step": 20}'),
        lambda run: (run.path / "attempts" / "1" / "measured.json").write_text('{"gpu_util_mean": 97.5}'),
        lambda run: run.add_submission({"scheduler": "slurm", "job_id": "4712", "refused": None}),
        lambda run: run.cancelled_mark("4711").touch(),
    ],
    ids=["attempt", "steps", "end", "measured", "submission", "mark"],
)
def test_a_run_that_changed_is_read(logs: Path, read: list[RunFolder], change) -> None:
    report(logs)
    run = list_runs(logs)[3]
    read.clear()
    change(run)
    found = report(logs)
    assert [each.path for each in read] == [run.path]
    assert shown(found) == anew(logs)
    written = json.loads(run.record.read_text())
    assert "read" not in written, "its files are new"
    assert written == found.records[3].to_tables()


@pytest.mark.parametrize(
    "change",
    [
        Path.unlink,
        lambda record: record.write_text("{}"),
        lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "more": 1})),
        lambda record: record.write_text(record.read_text().replace(code_sum(), "0" * 16)),
        lambda record: record.write_text(json.dumps({**json.loads(record.read_text()), "read": {"by": __version__}})),
    ],
    ids=["removed", "empty", "another key", "of another version", "without files"],
)
def test_a_record_of_another_version_is_written_again(logs: Path, read: list[RunFolder], change) -> None:
    report(logs)
    run = list_runs(logs)[3]
    before = run.record.read_text()
    read.clear()
    change(run.record)
    report(logs)
    assert ([each.path for each in read], run.record.read_text()) == ([run.path], before)


def test_a_run_that_may_change_by_itself_is_read_each_time(logs: Path, read: list[RunFolder]) -> None:
    live, fresh = list_runs(logs)[2:4]
    (live.path / "attempts" / "1" / "ended.json").unlink()
    os.utime(fresh.path / "attempts" / "1" / "ended.json")
    for _ in range(2):
        read.clear()
        report(logs)
    assert [run.path for run in read] == [live.path, fresh.path]


def test_runs_that_are_gone_or_new(logs: Path, read: list[RunFolder]) -> None:
    report(logs)
    runs = list_runs(logs)
    shutil.copytree(runs[0].path, logs / "demo" / "20260102-000000-0000")
    shutil.rmtree(runs[1].path)
    read.clear()
    assert len(report(logs).records) == COUNT
    assert [run.path.name for run in read] == ["20260102-000000-0000"]


def test_a_page_has_the_steps_of_all(logs: Path, read: list[RunFolder]) -> None:
    report(logs)
    runs = gather_paths([str(logs)], logs).runs
    assert ([len(run.steps) for run in runs], len(read)) == ([20] * COUNT, 2 * COUNT)


def test_without_a_record_that_can_be_written(logs: Path, read: list[RunFolder]) -> None:
    run = list_runs(logs)[3]
    run.record.mkdir()
    for _ in range(2):
        assert len(report(logs).unwritten) == 1
    assert len(read) == COUNT + 1


def test_a_run_moved_or_copied_with_its_times_is_not_read(logs: Path, read: list[RunFolder]) -> None:
    report(logs)
    shutil.copytree(logs, logs.with_name("copy"))
    read.clear()
    found = report(logs.with_name("copy"))
    assert (read, {run.folder for run in found.runs}) == ([], {run.path for run in list_runs(logs.with_name("copy"))})


def test_a_log_elsewhere_that_grew_is_read_again(logs: Path, read: list[RunFolder], tmp_path: Path) -> None:
    """A job script may send its programs' output to a file outside the run folder."""
    (log := tmp_path / "train.log").write_text("begun\n")
    run = list_runs(logs)[3]
    (link := run.path / "attempts" / "1" / "elsewhere").mkdir()
    (link / "0").symlink_to(log)
    make_old(tmp_path)
    report(logs)
    read.clear()
    assert log in report(logs).runs[3].files
    assert not read
    append_line(log, "more")
    report(logs)
    assert [each.path for each in read] == [run.path]
