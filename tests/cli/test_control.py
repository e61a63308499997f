"""stop, save and requeue: what is left in the run folder, and what is refused with a word."""

import json
import os
import platform
import shutil
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.cli.requests import ask_verb as ask_named
from hpc_gpt.core.process import process_identity
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.requests import VERBS, RunRequest, answer, open_requests, write_request
from hpc_gpt.core.runs.run_folder import IN_QUEUE, RunFolder
from hpc_gpt.launcher.watch.control import ControlRequest, ask_runs, await_answer
from hpc_gpt.trainer.supervision.signals import Inbox
from tests.cli.command import as_nobody, error_of, in_process, without_slurm
from tests.made_runs import add_attempt, metrics_line, unsubmitted_run, with_job
from tests.programs import put


@pytest.fixture
def running(waiting_process, made_run: RunFolder) -> RunFolder:
    """A local run whose process lives, in its first attempt."""
    add_attempt(made_run, [metrics_line(1)], ended=None, job_id=str(waiting_process.pid))
    return made_run


@pytest.mark.parametrize(
    ("verb", "asked"),
    [
        ("stop", " to save after this step and"),
        ("save", ""),
        ("requeue", " to save after this step and go back to the queue\n"),
    ],
)
def test_a_running_run_is_asked_by_a_file(running, verb, asked):
    done = in_process(verb, running.run_id, code=0)
    assert done.stdout.startswith(f"{running.run_id}: asked{asked}")
    assert done.stderr == f"next: hpc-gpt status {running.run_id}\n"
    (attempt,) = running.attempts()
    assert open_requests(attempt) == [RunRequest(verb, 1)]
    marks = [path.name for path in running.path.glob("stop.*")]
    assert marks == ([f"stop.{attempt.started()['job_id']}"] if verb == "stop" else [])


def test_requests_at_once_are_several_and_none_is_overwritten(running):
    (attempt,) = running.attempts()
    threads = [threading.Thread(target=write_request, args=(attempt, "save")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert open_requests(attempt) == [RunRequest("save", number) for number in range(1, 9)]
    assert not [path for path in attempt.asked.iterdir() if path.name.startswith(".")]
    answer(attempt, RunRequest("save", 3), 5, True)
    assert RunRequest("save", 3) not in open_requests(attempt)


def test_rank_0_sees_a_save_once_and_a_stop_until_it_ends(running, monkeypatch):
    (attempt,) = running.attempts()
    monkeypatch.setattr("hpc_gpt.trainer.supervision.signals._LOOK_S", 0.0)
    inbox = Inbox(attempt)
    assert inbox.look() == frozenset()
    write_request(attempt, "save")
    write_request(attempt, "stop")
    assert (inbox.look(), inbox.look()) == ({"save", "stop"}, {"stop"})
    write_request(attempt, "save")
    assert inbox.look() == {"save", "stop"}
    inbox.answer("save", 7, True)
    assert [request.verb for request in open_requests(attempt)] == ["stop"]


def test_an_ended_run_is_refused_with_a_word(made_run):
    made_run.add_submission({"scheduler": "local", "job_id": "7", "pid": 7, "pid_start": "1", "host": platform.node()})
    add_attempt(made_run, [metrics_line(1)], ended="stopped", job_id="7")
    for verb in (*VERBS, "cancel"):
        done = in_process(verb, made_run.run_id)
        assert (done.code, done.stdout) == (1, "")
        assert done.stderr == f"{made_run.run_id}: nothing to {verb}, it ended as stopped\n"
    assert not made_run.attempts()[0].asked.exists()
    assert not list(made_run.path.glob("stop.*"))


def _open(run: RunFolder) -> RunFolder:
    with_job(run, "4711")
    add_attempt(run, [metrics_line(1)], ended=None)
    return run


def test_without_slurm_the_request_is_left_all_the_same(own_folders, tmp_path):
    """Where only the shared disk reaches: no squeue here, and nobody to ask."""
    run = _open(unsubmitted_run("generic-slurm"))
    for verb in VERBS:
        done = in_process(verb, run.run_id, environment=without_slurm(tmp_path), code=0)
        assert "Slurm does not answer" in done.stdout
    assert {request.verb for request in open_requests(run.attempts()[0])} == set(VERBS)


def test_a_run_that_waits_is_marked_and_the_words_name_cancel(own_folders, tmp_path, monkeypatch):
    run = unsubmitted_run("generic-slurm")
    for job_id in ("4711", "4712"):
        with_job(run, job_id)
    squeue = put(
        tmp_path / "clients" / "squeue", "#!/bin/sh\necho '4711|PENDING|Priority'; echo '4712|PENDING|Dependency'\n"
    )
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=":")
    assert "hpc-gpt cancel" in in_process("stop", run.run_id, code=0).stdout
    assert sorted(path.name for path in run.path.glob("stop.*")) == ["stop.4711", "stop.4712"]
    for verb in ("save", "requeue"):
        done = in_process(verb, run.run_id)
        assert (done.code, done.stderr) == (1, f"{run.run_id}: nothing to {verb}, it waits in the queue\n")


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")


@pytest.fixture
def seen_logs(monkeypatch):
    """Logs that other users see."""
    (folder := Path(tempfile.mkdtemp())).chmod(0o755)
    monkeypatch.setenv("HPC_GPT_LOGS", str(folder))
    yield folder
    shutil.rmtree(folder)


@needs_root
def test_permission_denied_is_said_of_another_users_run(seen_logs, waiting_process):
    run = unsubmitted_run()
    run.add_submission(lock.submission_line(waiting_process.pid, str(waiting_process.pid), [], "local"))
    add_attempt(run, [metrics_line(1)], ended=None, job_id=str(waiting_process.pid))
    in_process("save", run.run_id, code=0)  # imports all that is needed
    for verb in VERBS:
        done = as_nobody(verb, run.run_id)
        message, hint = error_of(done)
        assert done.code != 0
        assert message.endswith(": Permission denied"), message
        assert "full" not in hint
        assert hint.endswith("is root's, and you are nobody: its owner can do it, or let you"), hint
    assert as_nobody("status", run.run_id).code == 0


@needs_root
@pytest.mark.parametrize("name", ["", "id", "experiment"])
def test_a_closed_folder_is_said_and_status_exits_above_0(seen_logs, name):
    run, other = unsubmitted_run(), unsubmitted_run()
    in_process("status", code=0)
    run.path.chmod(0o700)
    words = {"": [], "id": [run.run_id], "experiment": [run.path.parent]}[name]
    done = as_nobody("status", *words)
    assert (done.code, "Traceback" in done.stderr) == (1, False), done
    assert "Permission denied" in done.stdout + done.stderr
    assert (other.run_id in done.stdout) == (name in ("", "experiment"))
    if words:
        refused = as_nobody("requeue", *words, "--yes")
        assert (refused.code > 0, "Permission denied" in refused.stderr) == (True, True), refused


@needs_root
@pytest.mark.parametrize(
    ("closed", "dry"), [("", ()), ("", ("--dry-run",)), ("attempts", ()), ("submissions.jsonl", ())]
)
def test_nothing_is_queued_of_a_run_that_one_cannot_write(seen_logs, tmp_path, monkeypatch, closed, dry):
    run = with_job(unsubmitted_run("generic-slurm"), "4711")
    add_attempt(run, [metrics_line(1)], ended="stopped", job_id="4711")
    for path in (run.path, run.path / "attempts", run.path / "submissions.jsonl"):
        path.chmod(0o777 if path.is_dir() else 0o666)
    (run.path / closed).chmod(0o755 if closed != "submissions.jsonl" else 0o644)
    (clients := Path(tempfile.mkdtemp(dir=seen_logs.parent))).chmod(0o777)
    for client in ("sbatch", "squeue", "sacct", "scontrol"):
        put(clients / client, f"#!/bin/sh\necho {client} >>{clients}/called\n")
    monkeypatch.setenv("PATH", str(clients), prepend=":")
    in_process("submit", "--resume", run.run_id, "--dry-run")  # imports all that is needed
    (clients / "called").unlink(missing_ok=True)
    done = as_nobody("submit", "--resume", run.run_id, *dry)
    assert done.code != 0
    message, hint = error_of(done)
    where = run.path / closed if closed else run.path
    assert (message, hint) == (f"cannot write in {where}: Permission denied", f"{where} is root's, and you are nobody")
    assert not (clients / "called").exists() or "sbatch" not in (clients / "called").read_text()
    shutil.rmtree(clients)


OBEYED = [
    ("requeue", "requeued", "PENDING|BeginTime", "attempt 1 ended as requeued after step 5", True),
    ("stop", "stopped", "", "attempt 1 ended as stopped after step 5", True),
    ("requeue", "preempted", "PENDING|BeginTime",
     "nothing to requeue, attempt 1 ended as preempted after step 5; it waits in the queue", False),
    ("requeue", "done", "", "nothing to requeue, it ended as done", False),
]  # fmt: skip


@pytest.mark.parametrize(("verb", "ended", "says", "words", "happened"), OBEYED)
def test_what_ranks_did_while_slurm_was_asked_is_said(
    own_folders, tmp_path, monkeypatch, verb, ended, says, words, happened
):
    run = with_job(unsubmitted_run("generic-slurm"), "4711")
    attempt = add_attempt(run, [metrics_line(5)], ended=None, job_id="4711")
    end = {"ended": ended, "cause": None, "step": 5, "time": 1.0, "requeue": "PENDING" in says}
    obeys = f"echo '{json.dumps(end)}' >{attempt.folder}/ended.json; echo '4711|{says}'"
    squeue = put(
        tmp_path / "clients" / "squeue", f"#!/bin/sh\n{obeys}\n" if says else f"#!/bin/sh\n{obeys} >/dev/null\n"
    )
    put(squeue.parent / "sacct", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(squeue.parent), prepend=":")
    done = in_process(verb, run.run_id, code=0 if happened else 1)
    assert (done.stdout if happened else done.stderr).startswith(f"{run.run_id}: {words}\n"), done
    assert [request.verb for request in open_requests(attempt)] == [verb]


def test_only_a_run_without_an_attempt_has_begun_none(own_folders, tmp_path, monkeypatch):
    run = with_job(unsubmitted_run("generic-slurm"), "4711")
    put(tmp_path / "clients" / "squeue", "#!/bin/sh\necho '4711|RUNNING|None'\n")
    monkeypatch.setenv("PATH", str(tmp_path / "clients"), prepend=":")
    assert "no attempt has begun" in in_process("save", run.run_id, code=1).stderr
    add_attempt(run, [metrics_line(5)], ended="requeued", job_id="4711", requeue=True)
    said = in_process("save", run.run_id, code=1).stderr
    assert "nothing to save, attempt 1 ended as requeued after step" in said
    assert "and its job has not begun another" in said


def test_a_run_that_waits_for_its_turn_here_is_passed_over(made_run, waiting_process):
    queue = process_identity(waiting_process.pid)
    made_run.add_submission({"scheduler": "local", "job_id": None, "queue": queue, "host": platform.node()})
    in_process("stop", made_run.run_id, code=0)
    assert made_run.cancelled_mark(IN_QUEUE).exists()


@pytest.mark.parametrize(
    ("verb", "end", "happened", "words"),
    [
        ("save", None, True, "saved after step 9"),
        ("save", "error", False, "attempt 1 ended as error after step 9: boom; nothing is saved"),
        ("stop", "stopped", True, "attempt 1 ended as stopped after step 9: boom"),
        ("stop", "done", False, "attempt 1 ended as done after step 9: boom"),
        ("requeue", "requeued", True, "attempt 1 ended as requeued after step 9: boom"),
    ],
)
def test_a_wait_ends_with_what_has_happened(running, monkeypatch, verb, end, happened, words):
    (attempt,) = running.attempts()
    (asked,) = ask_runs([running], "stop" if verb == "requeue" else verb)
    if verb == "requeue":
        asked = type(asked)(running, verb, "", attempt=attempt, request=write_request(attempt, verb))

    def happen(seconds: float) -> None:
        if end is None:
            answer(attempt, asked.request, 9, True)
        else:
            attempt.write_ended(end, "boom", 9)

    # The wait finds nothing when it first looks.
    monkeypatch.setattr("hpc_gpt.launcher.watch.control.time", SimpleNamespace(monotonic=time.monotonic, sleep=happen))
    assert await_answer(asked) == (happened, words)


@pytest.mark.parametrize(
    ("saved", "happened", "words"),
    [
        (9, True, "attempt 1 ended as done after step 9; saved after step 9"),
        (7, False, "attempt 1 ended as done after step 9; saved after step 7"),
        (None, False, "attempt 1 ended as done after step 9; nothing is saved"),
    ],
)
def test_a_save_after_the_last_look_is_what_the_end_has_saved(running, saved, happened, words):
    (asked,) = ask_runs([running], "save")
    if saved is not None:
        (folder := running.checkpoints / f"step-{saved:08d}").mkdir(parents=True)
        (folder / "complete.json").write_text(json.dumps({"step": saved}))
    running.attempts()[0].write_ended("done", None, 9)
    assert await_answer(asked) == (happened, words)


def test_an_answer_before_the_end_is_the_one_that_counts(running):
    (asked,) = ask_runs([running], "save")
    (attempt,) = running.attempts()
    answer(attempt, asked.request, 9, False, "not saved after step 9: boom")
    attempt.write_ended("done", None, 9)
    assert await_answer(asked) == (False, "not saved after step 9: boom")


def test_what_cannot_be_a_request_is_none(running):
    (attempt,) = running.attempts()
    attempt.asked.mkdir()
    for name in ("save-0.json", "save-1.json.swp", "quit-1.json", "save-x.json", ".save.1.ab", "stop-1.done.json"):
        (attempt.asked / name).write_text(json.dumps({}))
    (attempt.asked / "stop-2.json").mkdir()
    assert [request.verb for request in open_requests(attempt)] == ["stop"]
    assert Path(attempt.asked).is_dir()


@pytest.mark.parametrize("outcomes", [(True, True), (False, True)])
def test_of_several_that_were_waited_for_all_must_have_done_it(own_folders, monkeypatch, outcomes):
    happened = {unsubmitted_run().path: outcome for outcome in outcomes}
    monkeypatch.setattr(
        "hpc_gpt.cli.requests.ask_runs", lambda runs, verb, note: [ControlRequest(run, verb, "asked") for run in runs]
    )
    monkeypatch.setattr("hpc_gpt.cli.requests.await_answer", lambda asked, _: (happened[asked.run.path], "so"))
    names = tuple(map(str, happened))
    if all(outcomes):
        ask_named("save", names, True, True)
        return
    with pytest.raises(SystemExit) as end:
        ask_named("save", names, True, True)
    assert end.value.code == 1
