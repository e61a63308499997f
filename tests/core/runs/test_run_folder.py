"""The run folder: what is written once stays, two starts get two attempts, half-written files hurt nobody."""

import errno
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.ends.run_state import newest_chain
from hpc_gpt.core.errors import ConfigError, NoSuchRun, RunFolderError, UserError
from hpc_gpt.core.files import append_line, read_json_lines
from hpc_gpt.core.runs.find_runs import find_run, find_runs, list_runs
from hpc_gpt.core.runs.run_folder import create_run
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.render import render_script
from tests.made_runs import make_run


@pytest.fixture(scope="module")
def resolved():
    return resolve(load_experiment("demo"), load_profile("local"))


@pytest.fixture
def logs(tmp_path):
    return tmp_path / "logs"


@pytest.fixture
def run(logs, resolved):
    return create_run(logs, resolved, "#!/bin/bash\n", "name = 'demo'\n", {"ds_config.json": {"train_batch_size": 32}})


def test_a_run_holds_what_is_known_before_it_starts(run, resolved, logs):
    assert (run.path.parent, run.resolved()) == ((logs / "demo").resolve(), resolved)
    assert run.job_script.read_text() == "#!/bin/bash\n"
    assert (run.path / "experiment.toml").read_text() == "name = 'demo'\n"
    assert json.loads((run.path / "ds_config.json").read_text()) == {"train_batch_size": 32}
    assert not list(run.path.glob(".*"))


NAMES = {
    "log": "log", "err": "err", "metrics": "metrics.jsonl", "rendezvous": "rendezvous", "asked": "asked",
    "measured": "measured.json", "ranks": "ranks", "heartbeats": "beats", "stacks": "stacks",
    "notified": "notified", "elsewhere": "elsewhere",
}  # fmt: skip


def test_its_files_have_these_names(run):
    """The names of the files of an attempt and of the run: scripts write some, and later versions read all."""
    (folder := run.path / "attempts" / "1").mkdir(parents=True)
    attempt = run.attempt(1)
    assert {key: getattr(attempt, key).relative_to(folder).as_posix() for key in NAMES} == NAMES
    of_run = (run.checkpoints, run.record, run.waits_for, run.cancelled_mark("7_1"), run.stop_mark("7_1"))
    names = ["checkpoints", "record.json", "queue.json", "cancelled.7_1", "stop.7_1"]
    assert [path.relative_to(run.path).as_posix() for path in of_run] == names
    of_attempt = {"attempt": attempt.started, "ended": attempt.ended, "exit": attempt.script_exit,
                  "next": attempt.verdict}  # fmt: skip
    for name, read in of_attempt.items():
        assert read() == {}
        (attempt.folder / f"{name}.json").write_text(json.dumps({"of_another": name}))
        assert read() == {"of_another": name}


def test_runs_made_at_once_are_apart(logs, resolved):
    runs = [create_run(logs, resolved, "", "", {}) for _ in range(20)]
    assert len({run.run_id for run in runs}) == 20
    assert sorted(found.path for found in list_runs(logs)) == sorted(run.path for run in runs)


def test_a_logs_folder_that_cannot_be_made_is_refused(tmp_path, resolved):
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFolderError, match="cannot make run folder") as refusal:
        create_run(tmp_path / "file", resolved, "", "", {})
    assert "HPC_GPT_LOGS" in refusal.value.hint


def test_a_full_disk_leaves_no_half_run(logs, resolved, monkeypatch):
    write_text = Path.write_text

    def full(self, text, **options):
        if "job.sh" in self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_text(self, text, **options)

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunFolderError, match="No space left on device"):
        create_run(logs, resolved, "#!", "", {})
    assert not [path for path in logs.rglob("*") if path.is_file()]
    assert not list_runs(logs)


def test_the_first_word_on_how_an_attempt_ended_stands(run):
    attempt = run.new_attempt()
    attempt.write_ended("walltime", None, 40, requeue=True)
    attempt.write_ended("error", "exit code 1", 0)
    assert attempt.ended()["ended"] == "walltime"
    assert attempt.ended()["requeue"] is True


def test_attempts_started_at_once_get_numbers_of_their_own(run):
    made = []
    threads = [threading.Thread(target=lambda: made.append(run.new_attempt().number)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(1, 9))
    assert [attempt.number for attempt in run.attempts()] == list(range(1, 9))


def test_attempts_are_in_order_of_number_not_of_name(run):
    for _ in range(11):
        run.new_attempt()
    (run.path / "attempts" / "2b").mkdir()
    assert [attempt.number for attempt in run.attempts()] == list(range(1, 12))


# --- finding


def test_a_job_id_in_full_stands_before_a_prefix(run, logs, resolved):
    (other := create_run(logs, resolved, "", "", {})).add_submission({"job_id": run.run_id[:4]})
    assert find_run(run.run_id[:4], logs) == other


def test_a_prefix_of_several_is_refused_with_the_candidates(logs, resolved):
    runs = [create_run(logs, resolved, "", "", {}) for _ in range(3)]
    with pytest.raises(NoSuchRun, match="matches 3 runs") as refusal:
        find_run(runs[0].run_id[:4], logs)
    assert runs[0].run_id in str(refusal.value)
    assert refusal.value.exit_code == 5


def test_names_mean_runs_or_folders_of_runs_each_once(logs, resolved, tmp_path, monkeypatch):
    runs = [create_run(logs, resolved, "", "", {}) for _ in range(2)]
    ids = [run.run_id for run in find_runs([], logs)]
    assert sorted(ids) == sorted(run.run_id for run in runs)
    assert [run.run_id for run in find_runs([ids[1], str(logs), ids[0]], logs)] == [ids[1], ids[0]]
    (logs / "none yet").mkdir()
    assert find_runs([str(logs / "none yet")], logs) == []
    monkeypatch.chdir(tmp_path)
    Path(ids[0]).mkdir()  # a folder that happens to go by the run's name
    assert [run.run_id for run in find_runs([ids[0]], logs)] == ids[:1]
    Path("other").mkdir()
    with pytest.raises(NoSuchRun, match="no runs under other"):
        find_runs(["other"], logs)
    with pytest.raises(NoSuchRun, match=r"no run 'nosuch' under .*, nor a folder of that name"):
        find_runs(["nosuch"], logs)


# --- half-written files


@given(st.lists(st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), max_size=5), st.data())
def test_a_file_cut_anywhere_gives_the_lines_that_are_whole(tmp_path_factory, objects, data):
    path = tmp_path_factory.mktemp("cut") / "lines"
    text = "".join(json.dumps(line) + "\n" for line in objects).encode()
    cut = data.draw(st.integers(0, len(text)))
    path.write_bytes(text[:cut])
    whole = text[:cut].count(b"\n")
    found = read_json_lines(path)
    assert found[:whole] == objects[:whole]
    assert len(found) <= whole + 1


def test_a_line_after_a_cut_line_is_read(tmp_path):
    path = tmp_path / "lines"
    append_line(path, '{"step": 1}')
    with open(path, "a") as file:
        file.write('{"step": 2, "lo')
    append_line(path, '{"step": 3}')
    assert [line["step"] for line in read_json_lines(path)] == [1, 3]


def test_appending_to_a_missing_folder_is_refused(tmp_path):
    with pytest.raises(RunFolderError, match="cannot write"):
        append_line(tmp_path / "none" / "lines", "{}")


def chain_of(tmp_path, *lines):
    """The job ids of the newest chain of a run with these lines in its submissions.jsonl."""
    run = make_run(tmp_path, "generic-slurm", submit=False)
    for line in lines:
        run.add_submission({"scheduler": "slurm", "refused": None, **line})
    return [line.get("job_id") for line in newest_chain(run)]


def test_the_newest_chain_is_what_was_submitted_last(tmp_path):
    def links(first, count):
        return [{"job_id": str(first + n), "link": n + 1, "links": count} for n in range(count)]

    assert chain_of(tmp_path) == []
    assert chain_of(tmp_path, {"job_id": "1"}, {"job_id": "2"}) == ["2"]
    assert chain_of(tmp_path, {"job_id": "1"}, *links(5, 3)) == ["5", "6", "7"]
    assert chain_of(tmp_path, *links(1, 2), *links(5, 3)) == ["5", "6", "7"]
    assert chain_of(tmp_path, *links(1, 2), {"job_id": "9"}) == ["9"]
    sent = {"job_id": "8", "chained_to": "7"}
    assert chain_of(tmp_path, *links(5, 3), sent, {"job_id": "9", "chained_to": "8"}) == ["5", "6", "7", "8", "9"]
    assert chain_of(tmp_path, {"job_id": "1"}, {"job_id": "7_3"}, {**sent, "chained_to": "7_3"}) == ["7_3", "8"]


def test_a_damaged_resolved_json_is_named_with_its_remedy(logs, resolved):
    run = create_run(logs, resolved, render_script(resolved), "name = 'demo'\n", {})
    path = run.path / "resolved.json"
    whole = path.read_bytes()
    for damage in (b"", b'{"schema": 1, "na', None):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(UserError, match=f"^{re.escape(str(run.path))}: .*resolved.json") as refusal:
            run.resolved()
        assert "JSONDecodeError" not in str(refusal.value)
        words, command = refusal.value.hint.split(": ", 1)
        assert words == "job.sh holds the settings"
        subprocess.run(["bash", "-c", command], check=True)
        assert path.read_bytes() == whole
        assert run.resolved() == resolved
    # A script without settings, as one that was cut short, is not offered.
    run.job_script.write_text("#!/bin/bash\n")
    path.write_text("{")
    with pytest.raises(ConfigError) as refusal:
        run.resolved()
    assert refusal.value.hint == "the run folder is damaged; submit again"


def test_a_run_folder_that_was_moved_is_said_to_be_gone(run):
    run.path.rename(run.path.with_name("elsewhere"))
    with pytest.raises(RunFolderError, match="the run folder does not exist any more"):
        run.resolved()


def test_a_line_for_a_folder_that_was_moved_says_so(tmp_path):
    with pytest.raises(RunFolderError, match="cannot write") as refusal:
        append_line(tmp_path / "gone" / "metrics.jsonl", "{}")
    assert "its folder is gone" in refusal.value.hint
