"""A second status of many runs reads none that is over, and says what a first one says."""

import json
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_gpt.core import files
from hpc_gpt.core.files import append_line
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.launcher.watch import status
from hpc_gpt.launcher.watch.status import RunStatus, ask_status
from hpc_gpt.reader import cache
from hpc_gpt.reader.cache import KINDS
from tests.made_runs import add_attempt, make_old, make_run, metrics_line

COUNT = 9


@pytest.fixture(params=["local", "generic-slurm"])
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request) -> Path:
    """Nine runs of yesterday that are over; Slurm knows of none any more."""
    monkeypatch.setenv("HPC_GPT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(KINDS, "rows", replace(KINDS["rows"], least=COUNT))
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({}, ""))
    for number in range(COUNT):
        run = make_run(tmp_path / "logs", request.param)
        attempt = add_attempt(run, 20, "error", cause="rank 0: boom")
        if request.param != "local":  # its script has asked what is next
            verdict = {"go_on": False, "ended": "error", "attempt_ended": "error", "cause": "rank 0: boom"}
            (attempt.folder / "next.json").write_text(json.dumps(verdict))
        run.path.rename(run.path.with_name(f"20260101-000000-{number:04x}"))
    make_old(tmp_path / "logs")
    return tmp_path / "logs"


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of the runs that were read."""
    runs: list[Path] = []
    own = status._status
    monkeypatch.setattr(status, "_status", lambda run, *more: (runs.append(run.path), own(run, *more))[1])
    return runs


def shown(logs: Path) -> list[RunStatus]:
    rows = ask_status(list_runs(logs))[0]
    assert all(row.age_s is None or row.age_s >= 0 for row in rows)
    return [replace(row, age_s=0) for row in rows]


def anew(logs: Path) -> list[RunStatus]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HPC_GPT_CACHE", "off")
        return shown(logs)


def test_the_second_status_reads_no_run(logs: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    first = shown(logs)
    assert (len(read), {row.state for row in first}) == (COUNT, {"error"})
    read.clear()
    assert shown(logs) == first
    assert read == []
    monkeypatch.setitem(KINDS, "rows", replace(KINDS["rows"], least=COUNT + 1))
    assert (shown(logs), len(read)) == (first, COUNT), "of few runs nothing is cached"


def test_its_age_goes_on(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, now = ask_status(list_runs(logs))[0], status.time.time()
    monkeypatch.setattr(status.time, "time", lambda: now + 1000)
    after = ask_status(list_runs(logs))[0]
    assert [each.age_s for each in after] == [pytest.approx(each.age_s + 1000, abs=60) for each in before]


@pytest.mark.parametrize(
    "change",
    [
        lambda run: add_attempt(run, [metrics_line(21)]),
        lambda run: append_line(run.path / "attempts" / "1" / "metrics.jsonl", json.dumps(metrics_line(21))),
        lambda run: (run.path / "attempts" / "1" / "ended.json").write_text('{"ended": "nan", "step": 20}'),
        lambda run: run.add_submission({"scheduler": "slurm", "job_id": "4712", "refused": None}),
        lambda run: (run.path / "after" / "step-7").mkdir(parents=True) or (run.path / "after/step-7/job.sh").touch(),
        lambda run: run.cancelled_mark("4711").touch(),
        lambda run: (run.path / "resolved.json").write_text("{"),
    ],
    ids=["attempt", "steps", "end", "submission", "after", "mark", "damage"],
)
def test_a_run_that_changed_is_read(logs: Path, read: list[Path], change) -> None:
    shown(logs)
    run = list_runs(logs)[3]
    read.clear()
    change(run)
    for _ in range(2):
        found = shown(logs)
        assert read == [run.path]
        assert found == anew(logs)
        read.clear()


def test_a_run_that_may_change_by_itself_is_read_each_time(logs: Path, read: list[Path], request) -> None:
    live, fresh, followed, unjudged = list_runs(logs)[2:6]
    for run in (live, unjudged):
        (run.path / "attempts" / "1" / "next.json").unlink(missing_ok=True)
    (live.path / "attempts" / "1" / "ended.json").unlink()
    os.utime(fresh.path / "attempts" / "1" / "ended.json")
    (followed.path / "after" / "step-7").mkdir(parents=True)  # its job is in Slurm, of which no file says anything
    (followed.path / "after" / "step-7" / "job.json").write_text('{"job_id": "9"}')
    os.utime(followed.path / "after" / "step-7" / "job.json", (0, 0))
    # Accounting may say that a node failed, which the trainer took for an error.
    by_slurm = [unjudged.path] if request.node.callspec.params["logs"] != "local" else []
    for _ in range(2):
        read.clear()
        shown(logs)
    assert read == [live.path, fresh.path, followed.path, *by_slurm]


@pytest.mark.parametrize("logs", ["generic-slurm"], indirect=True)
def test_a_job_that_slurm_shows_again_is_read(logs: Path, read: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """`scontrol requeue` by hand changes no file."""
    for number, run in enumerate(list_runs(logs)):
        for path in (run.path / "submissions.jsonl", run.path / "attempts" / "1" / "attempt.json"):
            path.write_text(path.read_text().replace("4711", f"47{number}"))
    make_old(logs)
    monkeypatch.setattr(status, "_slurm_states", lambda *_: (None, "squeue gave no answer"))
    silent = shown(logs)
    shown(logs)
    assert len(read) == 2 * COUNT, "without an answer nothing is cached"
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({}, ""))
    assert shown(logs) == silent
    read.clear()
    assert (shown(logs), read) == (silent, [])
    monkeypatch.setattr(status, "_slurm_states", lambda *_: ({"475": ("PENDING", "")}, ""))
    for _ in range(2):
        rows = shown(logs)
        assert ([row.state for row in rows].count("pending"), rows[5].state) == (1, "pending")
        assert read == [list_runs(logs)[5].path]
        read.clear()
    monkeypatch.setattr(status, "_slurm_states", lambda *_: (None, "squeue gave no answer"))
    assert (shown(logs), read) == (silent, []), "as the folders say"


def test_a_run_that_was_elsewhere_when_it_was_submitted(logs: Path, read: list[Path], tmp_path: Path) -> None:
    run = list_runs(logs)[3]
    line = json.loads((run.path / "submissions.jsonl").read_text())
    before = tmp_path / "before"
    (run.path / "submissions.jsonl").write_text(json.dumps({**line, "folder": str(before)}) + "\n")
    shutil.copytree(run.path, before)
    make_old(logs)
    assert shown(logs)[3].moved_from is None
    read.clear()
    shown(logs)
    assert read == []
    shutil.rmtree(before)
    found = shown(logs)
    assert (found[3].moved_from, read) == (str(before), [run.path])
    assert found == anew(logs)


def test_a_folder_that_does_not_answer_caches_nothing(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(files, "ANSWER_S", 0.2)
    monkeypatch.setattr(cache, "cache_path", lambda *_: answers.wait(60) and None)
    assert len(shown(logs)) == COUNT
    assert not answers.is_set()
    answers.set()


def test_a_report_between_changes_nothing(logs: Path, read: list[Path]) -> None:
    from hpc_gpt.report.gather import gather_paths

    first = shown(logs)
    assert len(gather_paths([str(logs)], logs, records_only=True).records) == COUNT
    read.clear()
    assert (shown(logs), read) == (first, [])
    assert len(list((logs.parent / "cache" / "report").iterdir())) == 2
    assert RunFolder(list_runs(logs)[0].path).record.exists()
