"""Names of runs and of sweeps: what an id, an array's job id, an element's or a folder means."""

import json
import os
import pwd
import subprocess
import sys
import time
import unicodedata

import pytest

from hpc_gpt.core.errors import NoSuchRun, RunFolderError
from hpc_gpt.core.files import from_here, logs_dir
from hpc_gpt.core.runs.find_runs import (
    find_named,
    find_run,
    find_runs,
    list_runs,
    name_here,
)
from hpc_gpt.core.runs.run_folder import IN_QUEUE
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.prepared import PreparedRun
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.submission import check_submission
from hpc_gpt.launcher.sweep import SubmittedSweep, link_runs, queue_locally, start_queued, write_sweep
from hpc_gpt.launcher.watch.control import cancel_run, wait_for_all
from hpc_gpt.launcher.watch.status import read_status
from hpc_gpt.launcher.watch.sweep_rows import count_states, fold
from tests.made_runs import make_run, read_run, unsubmitted_run, with_job


def prepared(row: str, **changes) -> PreparedRun:
    settings = load_experiment("demo", {"name": f"table-{row}", "data.source": "random", **changes})
    resolved = resolve(settings, load_profile("local"))
    resolved = type(resolved)(**{**vars(resolved), "sweep": "table", "row": row})
    return PreparedRun(resolved, render_script(resolved), "")


ROWS = [prepared(row) for row in ("a", "b", "c")]


@pytest.fixture
def sweep() -> SubmittedSweep:
    """Three runs, of which the first two are an array's."""
    sweep = write_sweep("table", ROWS, logs_dir(), check_submission(ROWS, logs_dir()))
    for run, job_id in zip(sweep.runs, ("4711_0", "4711_1", "4712"), strict=True):
        with_job(run, job_id)
    link_runs(sweep, 1, sweep.runs[:2])
    link_runs(sweep, 2, sweep.runs[2:])
    return sweep


def test_a_name_means_a_run_or_a_sweep(sweep):
    a, b, c = sweep.runs
    logs, other = logs_dir(), unsubmitted_run()
    other.add_submission({"job_id": "47"})
    assert find_run("4711_1", logs) == b
    assert (find_runs(["4711_1"], logs), find_runs(["4711"], logs)) == ([b], [a, b])
    assert (find_runs(["47"], logs), find_runs(["4712"], logs)) == ([other], [c])
    assert find_runs([sweep.id], logs) == find_runs([str(sweep.folder)], logs) == [a, b, c]
    assert find_runs([sweep.id, b.run_id], logs) == [a, b, c]
    assert find_runs([str(sweep.folder)], logs) == find_runs([str(sweep.folder.parent)], logs) == [a, b, c]
    assert find_runs([str(sweep.folder / "2")], logs) == [c]
    assert len(list_runs(logs)) == 4
    with pytest.raises(NoSuchRun, match="'4711' matches 2 runs") as refusal:
        find_run("4711", logs)
    assert refusal.value.hint == f"name one of its runs: {b.run_id} is the newest"
    with pytest.raises(NoSuchRun, match="matches 4 runs") as refusal:
        find_run(sweep.id[:8], logs)
    assert refusal.value.hint.startswith("give more of the id, or its end: ")
    with pytest.raises(NoSuchRun, match="no run '471'"):
        find_named("471", logs)


def test_a_sweep_has_its_name_and_the_ends_of_its_id(sweep):
    unsubmitted_run()
    found = find_named("table", logs_dir())
    assert (found.runs, found.what) == (sweep.runs, "table")
    for name in (sweep.id[-4:], sweep.id[-7:], sweep.id[:-1]):
        found = find_named(name, logs_dir())
        assert (found.runs, found.what) == (sweep.runs, f"sweep {sweep.id}"), name
    assert find_runs(["table-b"], logs_dir()) == [sweep.runs[1]]


def test_a_run_has_short_names():
    one, logs = unsubmitted_run(), logs_dir()
    assert find_run(one.run_id[-4:], logs) == find_run("demo", logs) == find_run(one.run_id[:9], logs) == one
    other = unsubmitted_run()
    assert find_run(one.run_id[-4:], logs) == one
    assert find_runs(["demo"], logs) == [one, other]
    for name in ("demo", one.run_id[:8]):
        with pytest.raises(
            NoSuchRun, match=f"'{name}' matches 2 runs under .*: {one.run_id}, {other.run_id}"
        ) as refusal:
            find_run(name, logs)
        assert refusal.value.exit_code == 5
    with pytest.raises(NoSuchRun, match="matches 2 runs"):
        find_named(one.run_id[:8], logs)


def test_the_shortest_name_of_a_run_that_a_command_finds(tmp_path, monkeypatch):
    inside, outside = make_run(logs_dir()), make_run(tmp_path / "-old logs")
    assert (name_here(inside), find_run(name_here(inside), logs_dir()).path) == (inside.run_id, inside.path)
    assert name_here(outside) == str(outside.path)
    monkeypatch.chdir(tmp_path)
    assert name_here(outside) == f"./-old logs/demo/{outside.run_id}"
    assert find_run(name_here(outside), logs_dir()).path.samefile(outside.path)
    assert (from_here("/"), from_here(f"{tmp_path}2/a:7"), from_here(tmp_path / "a.log:7")) == (
        "/",
        f"{tmp_path}2/a:7",
        "a.log:7",
    )


def test_two_experiments_have_two_folders_in_any_script():
    names = ("实验一", "实验二", "größe", "मॉडल", "🚀", "x" * 300 + "a", "x" * 300 + "b")
    for name in names:
        (run,) = write_sweep("table", [prepared("a", name=name)], logs_dir(), {}).runs
        assert find_runs([name], logs_dir()) == find_runs([run.path.parent.name], logs_dir()) == [run]
        assert find_runs([unicodedata.normalize("NFD", name)], logs_dir()) == [run]
    assert {"实验一", "实验二", "größe", "मॉडल", "🚀"} <= {path.name for path in logs_dir().iterdir()}


def test_a_name_means_no_run_of_another_experiment_in_its_folder():
    """`cancel "x y"` ends nothing of "x:y"."""
    one, other = (write_sweep("t", [prepared("a", name=name)], logs_dir(), {}).runs[0] for name in ("x y", "x:y"))
    assert one.path.parent == other.path.parent
    assert [find_runs([name], logs_dir()) for name in ("x y", "x:y")] == [[one], [other]]
    assert set(find_runs(["x_y"], logs_dir())) == {one, other}


def test_a_folder_that_the_locale_cannot_name_is_an_error(tmp_path):
    code = (
        "from hpc_gpt.core.runs.run_folder import claim_folder; from pathlib import Path; claim_folder(Path('\\u5b9e'))"
    )
    environment = os.environ | {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert "RunFolderError" in done.stderr
    assert "this locale's encoding, ascii, has no '\\u5b9e'" in done.stderr


def test_links_stand_when_logs_are_moved(sweep, tmp_path):
    logs_dir().rename(tmp_path / "moved")
    moved = list_runs(tmp_path / "moved" / "table" / sweep.id)
    assert [run.resolved().row for run in moved] == ["a", "b", "c"]
    assert {run.sweep_id for run in moved} == {sweep.id}


def test_a_sweep_is_one_line(sweep):
    by_itself = unsubmitted_run()
    for run, ended in zip(sweep.runs, ("done", "nan", "done"), strict=True):
        attempt = run.new_attempt()
        (attempt.folder / "attempt.json").write_text(json.dumps({"job_id": run.submissions()[0]["job_id"]}))
        attempt.write_ended(ended, None, 5)
    first, line = fold(read_status([by_itself, *sweep.runs]))
    assert first.run == by_itself.run_id
    assert (line.run, line.name, line.state, line.job_id) == (sweep.id, "table", "2 done, 1 nan", "4711 4712")
    assert [status.state for status in wait_for_all([sweep.runs[0], sweep.runs[2]])] == ["done", "done"]


def test_what_waits_here_is_pending_until_it_or_its_queue_ends():
    sweep = write_sweep("table", ROWS, logs_dir(), check_submission(ROWS, logs_dir()))
    queue_locally(sweep)
    assert count_states(read_status(sweep.runs)) == "3 pending"
    assert cancel_run(sweep.runs[1]) == IN_QUEUE
    assert start_queued(sweep.runs[1], ROWS[1]) is None
    gone = {"pid": os.getpid(), "pid_start": "0"}
    sweep.runs[2].add_submission({**sweep.runs[2].submissions()[-1], "queue": gone})
    rows = read_status(sweep.runs)
    mark = json.loads(sweep.runs[1].cancelled_mark(IN_QUEUE).read_text())
    when = time.strftime("%Y-%m-%d at %H:%M", time.localtime(mark["time"]))
    assert [(row.state, row.cause) for row in rows] == [
        ("pending", "waits for its turn"),
        ("cancelled", f"{pwd.getpwuid(os.getuid()).pw_name} cancelled it on {when}, while it waited"),
        ("cancelled", "the process that was to start it ended before its turn"),
    ]
    assert all(row.sweep_id == sweep.id for row in rows)
    assert [read_run(run).ended for run in sweep.runs] == ["pending", "cancelled", "cancelled"]
    assert find_runs([sweep.id], logs_dir()) == sweep.runs


def test_where_one_folder_cannot_be_written_the_others_say_so(monkeypatch):
    logs_dir().mkdir(parents=True)
    (logs_dir() / "table-c").write_text("in the way")
    with pytest.raises(RunFolderError, match="table-c"):
        write_sweep("table", ROWS, logs_dir(), check_submission(ROWS, logs_dir()))
    assert read_status(list_runs(logs_dir())) == [], "it was seen before anything was written"
    monkeypatch.setattr("hpc_gpt.launcher.submission.check_writable", lambda folder: None)
    with pytest.raises(RunFolderError, match="table-c"):
        write_sweep("table", ROWS, logs_dir(), check_submission(ROWS, logs_dir()))
    rows = read_status(list_runs(logs_dir()))
    assert [(row.row, row.state) for row in rows] == [("a", "refused"), ("b", "refused")]
    assert "the folder of row 'c' could not be written" in str(rows[0].cause)
