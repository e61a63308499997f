"""What status says of a run, from the scheduler's word and the folder's files.

Slurm's answers here are put in by hand, to have every one of them; tests/slurm asks a real one.
"""

import json
import os
import platform
import re
import time
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest

from hpc_gpt.core import files
from hpc_gpt.core.errors import ConfigError, SlurmUnreachable
from hpc_gpt.core.files import logs_dir, write_once
from hpc_gpt.core.process import process_identity, start_time
from hpc_gpt.core.processes.heartbeats import RankHeartbeat, write_heartbeat
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.slurm.clients import Answer, add_found
from hpc_gpt.launcher.watch import control, status
from hpc_gpt.launcher.watch.status import NO_ANSWER, ask_status, read_own_status, read_status, shell_command
from hpc_gpt.reader.lines.read_log import read_log
from hpc_gpt.report.why import explain
from tests.cli.command import in_process
from tests.made_runs import add_attempt, make_run, metrics_line, unsubmitted_run, with_job
from tests.programs import put
from tests.waiting import patient


@pytest.fixture
def slurm_says(monkeypatch):
    """Sets what Slurm answers: job id -> (state, reason), or None for no answer."""

    def say(states):
        monkeypatch.setattr(status, "_slurm_states", lambda *_: (states, ""))

    say({})
    return say


def slurm_run(*, ended: str | None = None, requeue: bool = False, attempt: bool = True, job_id: str = "7"):
    run = with_job(unsubmitted_run("generic-slurm"), job_id)
    if attempt:
        folder = run.new_attempt().folder
        (folder / "attempt.json").write_text(json.dumps({"job_id": job_id}))
        if ended:
            run.attempt(1).write_ended(ended, "its cause", 5, requeue)
    return run


@pytest.mark.parametrize(
    ("slurm", "ended", "requeue", "state", "cause"),
    [
        ("PENDING", "walltime", True, "pending", "starts again after walltime, as attempt 2"),
        ("COMPLETING", "done", False, "running", None),
        ("COMPLETED", None, False, "unknown", "Slurm says COMPLETED"),
        ("COMPLETED", "preempted", True, "preempted", "not requeued, Slurm says COMPLETED"),
        ("FAILED", "data", False, "data", "its cause"),
        ("CANCELLED", "walltime", True, "cancelled", "while it waited"),
        ("CANCELLED", "stopped", False, "stopped", "its cause"),
        ("NODE_FAIL", None, False, "node_failure", "Slurm says NODE_FAIL"),
        ("OUT_OF_MEMORY", None, False, "host_memory", "Slurm says OUT_OF_MEMORY"),
        ("TIMEOUT", None, False, "walltime", "Slurm says TIMEOUT"),
        ("", "walltime", True, "unknown", "walltime, and Slurm no longer knows job 7"),
        ("REVOKED", None, False, "unknown", "Slurm says REVOKED"),
    ],
)
def test_slurms_word_makes_a_state_and_its_cause(slurm_says, slurm, ended, requeue, state, cause):
    """What has no branch of its own here is in the whole table, core/ends/test_whole_states.py."""
    run = slurm_run(ended=ended, requeue=requeue)
    slurm_says({"7": (slurm, "None")} if slurm else {})
    row = read_status([run])[0]
    assert (row.state, row.cause) == (state, cause)


def test_a_job_put_back_before_the_verdict_trains_no_more(slurm_says):
    run = slurm_run(ended="walltime", requeue=True)
    verdict = {
        "go_on": False,
        "put_back": True,
        "ended": "no_progress",
        "attempt_ended": "walltime",
        "why": "gained no step",
    }
    write_once(run.attempt(1).folder / "next.json", json.dumps(verdict))
    slurm_says({"7": ("PENDING", "BeginTime")})
    row = read_status([run])[0]
    said = "gained no step; its job is in the queue once more, and ends at its start without training"
    assert (row.state, row.cause) == ("pending", said)


def test_a_training_run_says_its_end_and_cost_unless_suspended(slurm_says):
    """Half an hour into its attempt, 71 steps of half a second are left."""
    run = with_job(unsubmitted_run("generic-slurm", train__steps=100), "7", time=time.time() - 7200)
    slurm_says({"7": ("RUNNING", "None")})
    add_attempt(run, 29, ended=None, job_id="7", started=time.time() - 1800)
    row = read_status([run])[0]
    assert (row.state, row.left_s) == ("running", pytest.approx(71 * 0.5))
    assert row.age_s == pytest.approx(7200, abs=60)
    assert row.gpu_hours == pytest.approx(run.resolved().gpus / 2, rel=0.05)
    head, line = in_process("status", run.run_id).stdout.splitlines()[:2]
    assert head.split()[-5:] == ["tokens/s", "age", "ends", "GPU", "hours"]
    assert "120 min" in line
    slurm_says({"7": ("SUSPENDED", "None")})
    [row] = read_status([run])
    assert (row.state, row.suspended, row.left_s) == ("suspended", True, None)
    assert row.cause == "Slurm says SUSPENDED: scontrol resume 7 continues it"
    line = in_process("status", run.run_id).stdout.splitlines()[1]
    assert (" suspended " in line, " running " in line) == (True, False)


def test_a_controller_that_is_down_hides_nothing_of_the_folder(slurm_says):
    slurm_says(None)
    assert read_status([slurm_run(ended="done")])[0].state == "done"
    row = read_status([slurm_run()])[0]
    assert (row.state, row.cause, row.is_over) == ("running", status.NO_ANSWER, False)
    assert read_own_status(slurm_run()).state == "unknown", "to who is about to act"


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a Slurm client on the PATH that notes how it is called and does this; returns the file of its calls.

    It has as long as it takes, but where a test says otherwise."""
    (folder := tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.setenv(status.PATIENCE, f"{patient(300):g}")

    def add(name, does):
        put(folder / name, f'#!/bin/bash\necho "$*" >>"$0.calls"\n{does}\n')
        return folder / f"{name}.calls"

    return add


def test_one_squeue_for_all_runs_and_none_for_local_ones(client):
    calls = client("squeue", 'printf "%s|RUNNING|None\\n" 0 1 2 3 4')
    read_status([unsubmitted_run()])
    assert not calls.exists()
    rows = read_status([slurm_run(job_id=str(number)) for number in range(5)] + [unsubmitted_run()])
    assert [row.state for row in rows[:5]] == ["running"] * 5
    assert len(calls.read_text().splitlines()) == 1


def test_each_cluster_is_asked_of_its_own_runs_alone(client):
    calls = client("squeue", 'case "$*" in --clusters=far*) echo "7|RUNNING|None" ;; *) echo "7|PENDING|None" ;; esac')
    near, far = slurm_run(), unsubmitted_run("generic-slurm")
    far.add_submission({"scheduler": "slurm", "job_id": "7", "slurm_cluster": "far"})
    assert [row.state for row in read_status([near, far, near])] == ["pending", "running", "pending"]
    assert [line.split()[0] for line in calls.read_text().splitlines()] == ["--noheader", "--clusters=far"]
    # In a federation another cluster may run the job.
    far.add_submission({"scheduler": "slurm", "job_id": str((1 << 26) + 7), "slurm_cluster": "far"})
    (far.path / "submissions.jsonl").write_text((far.path / "submissions.jsonl").read_text().splitlines()[-1] + "\n")
    assert far.slurm_cluster() is None


def test_a_revoked_sibling_says_nothing_of_its_job(client):
    client("squeue", 'echo "7|RUNNING|None"; echo "7|REVOKED|None"')
    assert read_status([slurm_run()])[0].state == "running"


def test_accounting_is_asked_only_of_jobs_whose_end_is_open(client):
    client("squeue", 'echo "4|RUNNING|None"')
    calls = client("sacct", 'echo "2|NODE_FAIL"')
    runs = [
        slurm_run(job_id="1", ended="done"),
        slurm_run(job_id="2"),
        slurm_run(job_id="3", ended="walltime", requeue=True),
        slurm_run(job_id="4", ended="done"),
    ]
    assert [row.state for row in read_status(runs)] == ["done", "node_failure", "unknown", "running"]
    read_status(runs[:1])
    assert [line.split()[-1] for line in calls.read_text().splitlines()] == ["2,3"]


def test_accounting_is_asked_in_parts_and_of_elements_once(client):
    many = 30_000
    client("squeue", 'echo "7_1|RUNNING|None"')
    answers = 'echo "7_1|COMPLETED"; echo "7_2|FAILED"; tr , "\\n" <<<"${@: -1}" | sed "s/$/|FAILED/"'
    calls = client("sacct", answers)
    ids = [f"7_{n}" for n in range(1, many)] + [str(100_000_000 + n) for n in range(many)]
    words, silence = status._slurm_states(ids, lambda client: client.answer(patient(300)), None)
    assert silence == ""
    assert words["7_1"] == ("RUNNING", "None"), "the queue knows better"
    assert words["7_2"] == words[str(100_000_000 + many - 1)] == ("FAILED", "")
    asked = [line.split()[-1] for line in calls.read_text().splitlines()]
    assert sum(line.split(",").count("7") for line in asked) == 1
    assert sum(len(line.split(",")) for line in asked) == many + 1


@pytest.mark.parametrize("by", ["squeue", "sacct"])
def test_elements_without_a_state_have_that_of_the_rest(client, by: str):
    client("squeue", 'echo "7_1|COMPLETED|None"; echo "7|CANCELLED|JobArrayTaskLimit"' if by == "squeue" else "true")
    client("sacct", 'echo "7_1|COMPLETED"; echo "7_[2-8%1]|CANCELLED by 1000"' if by == "sacct" else "exit 1")
    runs = [slurm_run(job_id="7_1", ended="done"), slurm_run(job_id="7_2"), slurm_run(job_id="8")]
    assert [row.state for row in read_status(runs)] == ["done", "cancelled", "unknown"]


def test_accounting_that_fails_hides_nothing_else(client):
    client("squeue", 'echo "4|RUNNING|None"')
    client("sacct", "exit 1")
    rows, silence = status.ask_status([slurm_run(job_id="4"), slurm_run(job_id="5")])
    assert ([row.state for row in rows], silence) == (["running", "unknown"], "")

    def wait(asked):
        if asked.name == "sacct":
            raise SlurmUnreachable("sacct gave no answer in 1 s")
        return asked.answer(patient(300))

    found = {"4": ("RUNNING", "None")}
    assert status._slurm_states(["4", "5"], wait, None) == (found, "sacct gave no answer in 1 s")


def test_a_silent_controller_delays_ended_runs_by_patience_alone(client, monkeypatch):
    client("squeue", "exec sleep 6000")
    monkeypatch.setenv(status.PATIENCE, "0.2")
    early = []
    rows, silence = status.ask_status([slurm_run(ended="done")], early.extend)
    assert [row.state for row in rows] == [row.state for row in early] == ["done"]
    assert silence == "squeue gave no answer in 0.2 s"
    assert status.PATIENCE in status.silence_note(silence)


def test_an_open_run_is_waited_for_after_its_folder_is_shown(client, monkeypatch, tmp_path):
    """Of an answer that comes in time nothing is shown before."""
    monkeypatch.setattr(status, "EARLY_S", patient(300))
    client("squeue", 'echo "7|RUNNING|None"')
    assert status.ask_status([slurm_run()], lambda _: pytest.fail("it was early"))[1] == ""
    monkeypatch.setattr(status, "EARLY_S", 0.1)
    client("squeue", f'until [ -e {tmp_path}/early ]; do sleep 0.05; done; echo "7|RUNNING|None"')
    early = []
    rows, silence = status.ask_status([slurm_run()], lambda rows: (early.extend(rows), (tmp_path / "early").touch()))
    assert ([row.state for row in rows], silence) == (["running"], "")
    assert [row.cause for row in early] == [status.NO_ANSWER]


@pytest.mark.parametrize("given", ["soon", "0", "nan"])
def test_a_patience_that_is_no_time_is_refused(monkeypatch, given):
    monkeypatch.setenv(status.PATIENCE, given)
    with pytest.raises(ConfigError, match=status.PATIENCE):
        status.patience_s()


def test_a_configuration_that_is_not_there_is_said_at_once(client, monkeypatch):
    client("squeue", "exec sleep 6000")
    monkeypatch.setenv("SLURM_CONF", "/nowhere/slurm.conf")
    silence = status.ask_status([slurm_run(ended="done")])[1]
    assert silence == "SLURM_CONF names /nowhere/slurm.conf, which does not exist"


@pytest.mark.parametrize("cluster", ["local", "generic-slurm"])
def test_an_ended_run_has_each_of_its_files_read_once(slurm_says, monkeypatch, cluster):
    run = make_run(logs_dir()) if cluster == "local" else slurm_run(ended="done")
    if cluster == "local":
        add_attempt(run, [metrics_line(1)], "data")
    opened, plain_open = Counter(), files.open_regular

    def count(path):
        opened[str(path.relative_to(run.path))] += 1
        return plain_open(path)

    monkeypatch.setattr(files, "open_regular", count)
    read_status([run])
    assert {"resolved.json", "submissions.jsonl", "attempts/1/ended.json"} <= opened.keys()
    assert [name for name, times in opened.items() if times > 1] == []


def test_a_run_that_ends_while_slurm_is_asked_has_ended(monkeypatch):
    run = slurm_run()

    def answer(*_):
        run.attempt(1).write_ended("done", None, 5)
        return {}, ""

    monkeypatch.setattr(status, "_slurm_states", answer)
    assert read_status([run])[0].state == "done"


def test_a_refused_run_says_why():
    run = unsubmitted_run("generic-slurm")
    run.add_submission({"scheduler": "slurm", "job_id": None, "refused": "error: no\nerror: such partition"})
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("refused", "error: no; error: such partition")


def test_a_run_that_plain_sbatch_started_is_found_by_its_attempt(slurm_says):
    run = unsubmitted_run("generic-slurm")
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "31"}))
    slurm_says({"31": ("RUNNING", "None")})
    row = read_status([run])[0]
    assert (row.state, row.job_id) == ("running", "31")


@pytest.mark.parametrize(
    ("line", "newest"),
    [
        ({"time": 200.0}, "30"),
        ({"time": 50.0}, "20"),
        ({"time": 50.0, "attempts_before": 1}, "30"),
        ({"time": 200.0, "attempts_before": 0}, "20"),
    ],
)
def test_of_a_resume_and_a_plain_sbatch_the_newer_is_the_job(slurm_says, line, newest):
    """Their two clocks count only where the number of attempts is not known."""
    run = unsubmitted_run("generic-slurm")
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "20", "started": 100}))
    run.add_submission({"scheduler": "slurm", "job_id": "30", "refused": None, **line})
    slurm_says({"20": ("COMPLETED", "None"), "30": ("PENDING", "Priority")})
    row = read_status([run])[0]
    assert (row.job_id, row.state) == (newest, {"20": "unknown", "30": "pending"}[newest])


def test_a_run_of_another_host_is_not_known_from_here():
    run = unsubmitted_run()
    run.add_submission({"scheduler": "local", "job_id": "2", **process_identity(os.getpid()), "host": "elsewhere"})
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("pending", "runs on elsewhere, which is not visible from here")


def test_the_last_step_is_the_newest_attempts_that_has_one(slurm_says):
    slurm_says({"7": ("RUNNING", "None")})
    run = slurm_run()
    run.attempt(1).metrics.write_text('{"step": 8, "loss": NaN, "tokens_per_s": 10.0}\n{"step": 9, "lo')
    (run.new_attempt().folder / "attempt.json").write_text(json.dumps({"job_id": "7"}))
    row = json.loads(json.dumps(read_status([run])[0].to_dict(), allow_nan=False))
    assert [row[key] for key in ("step", "loss", "tokens_per_s", "attempts")] == [8, None, 10.0, 2]


def test_a_run_that_leaves_after_a_cancel_says_so(slurm_says):
    mine, theirs = unsubmitted_run(), slurm_run()
    me = {**process_identity(os.getpid()), "host": platform.node()}
    mine.add_submission({"scheduler": "local", "job_id": "9", **me})
    slurm_says({"7": ("RUNNING", "")})
    assert [(each.state, each.cause) for each in read_status([mine, theirs])] == [("running", None)] * 2
    mine.cancelled_mark("9").touch()
    theirs.cancelled_mark("7").touch()
    words = "cancelled; its ranks may save before they leave"
    assert [(each.state, each.cause) for each in read_status([mine, theirs])] == [("running", words)] * 2
    assert f"{mine.run_id}: {words}\n" in in_process("status", mine.run_id).stdout


def test_damaged_metrics_are_steps_that_nobody_trained(slurm_says):
    slurm_says({"4711": ("RUNNING", "None")})
    run = make_run(logs_dir(), "generic-slurm")
    for text in ("[]", '{"step": "a"}', "not json"):
        add_attempt(run, [], "walltime", requeue=True).metrics.write_text(text)
    row = read_status([run])[0]
    assert (row.state, row.attempts, row.step, row.left_s) == ("running", 3, None, None)


def moved_run(line, ended=None):
    """A run of one attempt that was submitted in another folder; and that folder."""
    run = unsubmitted_run("local" if line["scheduler"] == "local" else "generic-slurm")
    run.add_submission({"refused": None, **line})
    add_attempt(run, [], ended=ended, job_id=line["job_id"], started=time.time())
    return RunFolder(run.path.rename(run.path.with_name(f"moved-{run.run_id}"))), run.path


def local_line(pid_start):
    return {"scheduler": "local", "job_id": "1", "host": platform.node(),
            **process_identity(os.getpid()), "pid_start": pid_start}  # fmt: skip


def test_a_run_that_was_moved_under_its_ranks_cannot_be_asked():
    run, old = moved_run(local_line(start_time(os.getpid())))
    assert (read_status([run])[0].state, read_status([run])[0].cause) == ("running", None)
    for verb in ("save", "stop", "requeue"):
        done = in_process(verb, run.path)
        words = f"moved from {old}, where its ranks look for requests: move it back, or use hpc-gpt cancel"
        assert (done.code, words in " ".join(done.stderr.split())) == (1, True)


def test_a_run_moved_before_its_end_is_every_verbs_user_error():
    run, old = moved_run(local_line("1"))
    words = f"its folder was moved from {old} while it ran"
    row = read_status([run])[0]
    assert (row.state, row.cause) == ("user_error", f"its process is gone and wrote no end; {words}")
    said = in_process("why", run.path).stdout
    assert f"\ncause    {words}\n" in said
    assert f"hpc-gpt submit --resume {run.run_id}" in said
    record = json.loads(in_process("report", run.path, "--json").stdout)["records"][0]
    assert (record["ended"], record["cause"]) == ("user_error", words)
    run, _ = moved_run(local_line("1"), ended="nan")
    assert (read_status([run])[0].state, read_status([run])[0].cause) == ("nan", None), "it had ended before"


@pytest.mark.parametrize(
    ("slurm", "state", "says"),
    [
        ("COMPLETED", "user_error", "Slurm says COMPLETED; {} while it ran"),
        ("", "user_error", "it wrote no end; {} while it ran"),
        ("CANCELLED", "cancelled", "{} while it ran"),
        ("TIMEOUT", "walltime", "Slurm says TIMEOUT; {} while it ran"),
    ],
)
def test_a_slurm_run_whose_folder_was_moved(slurm_says, slurm, state, says):
    run, old = moved_run({"scheduler": "slurm", "job_id": "7"})
    slurm_says({"7": (slurm, "None")} if slurm else {})
    row = read_status([run])[0]
    assert row.state == state
    assert str(row.cause).endswith(says.format(f"its folder was moved from {old}"))


def test_why_has_the_attempt_and_line_that_slurm_says_failed(slurm_says):
    run, old = moved_run({"scheduler": "slurm", "job_id": "7"})
    run.attempt(1).log.write_text(
        f"step 1\nrank 0: Error: cannot write {old}/metrics.jsonl: No such file or directory\n"
    )
    slurm_says({"7": ("FAILED", "None")})
    found = json.loads(in_process("why", run.path, "--json").stdout)
    assert (found["ended"], found["attempts"][-1]["ended"], found["line"]) == ("user_error", "user_error", 2)
    assert (
        found["cause"]
        == found["attempts"][-1]["cause"]
        == f"Slurm says FAILED; its folder was moved from {old} while it ran"
    )


def test_why_says_nothing_twice(slurm_says):
    slurm_says({"7": ("PENDING", "None")})
    run = slurm_run(ended="error")
    write_once(
        run.attempt(1).folder / "next.json", json.dumps({"go_on": True, "attempt_ended": "error", "cause": "boom"})
    )
    said = in_process("why", run.path).stdout
    assert (said.count("continues after error"), said.count("status   ")) == (0, 1)
    assert "cause    done" not in in_process("why", slurm_run(ended="done").path).stdout


def test_why_of_a_run_that_waits_has_slurms_reason_in_words(slurm_says):
    slurm_says({"7": ("PENDING", "Priority")})
    said = in_process("why", slurm_run(attempt=False).path).stdout.splitlines()
    assert said[1] == "status   other jobs come first (Priority)"
    said = in_process("why", slurm_run(ended="walltime", requeue=True).path).stdout
    assert "\nstatus   starts again after walltime, as attempt 2; other jobs come first (Priority)\n" in said
    slurm_says({"7": ("PENDING", "PartitionNodeLimit")})
    never = slurm_run(attempt=False)
    assert read_status([never])[0].cause == (
        "it never starts: it asks for more nodes than the partition has or allows (PartitionNodeLimit); "
        f"hpc-gpt cancel {never.run_id}"
    )
    slurm_says({"7": ("CANCELLED", "None")})
    assert ": cancelled: " in in_process("why", slurm_run(attempt=False).path).stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("verb", "code", "says"),
    [("why", 0, "\nstatus   Slurm does not answer\n"), ("status", 0, NO_ANSWER), ("save", 0, "may not be running")],
)
def test_looks_and_requests_wait_for_slurm_as_long_as_allowed(client, monkeypatch, verb, code, says):
    client("squeue", "exec sleep 6000")
    monkeypatch.setenv(status.PATIENCE, "0.2")
    done = in_process(verb, slurm_run().path)
    assert (done.code, "squeue gave no answer in 0.2 s" in done.stderr) == (code, True), done
    assert says in " ".join((done.stdout + done.stderr).split(" ")), done


def test_a_request_that_came_too_late_says_so_of_a_silent_slurm(client, monkeypatch):
    client("squeue", "exec sleep 6000")
    monkeypatch.setenv(status.PATIENCE, "0.2")
    done = in_process("stop", slurm_run(ended="done").path)
    assert (done.code, "Slurm has not answered yet\n" in done.stderr, "ended as done" in done.stderr) == (1, True, True)


def test_a_request_is_written_before_slurm_is_asked_and_once(client, tmp_path):
    run = slurm_run()
    seen = tmp_path / "seen"
    client("squeue", f'ls {run.path}/attempts/1/asked >{seen}; echo "7|RUNNING|None"')
    in_process("save", run.path, code=0)
    assert seen.read_text().split() == ["save-1.json"]
    assert [path.name for path in run.attempts()[0].asked.glob("*.json")] == ["save-1.json"]


def test_a_failed_silent_job_asks_if_nodes_see_its_folder(slurm_says):
    run = slurm_run(attempt=False)
    slurm_says({"7": ("FAILED", "NonZeroExitCode")})
    assert read_status([run])[0].cause == f"Slurm says FAILED, and the job wrote nothing: do the nodes see {run.path}?"
    (output := run.path / "slurm-7.out").write_text("nothing\n")
    assert read_status([run])[0].cause == "Slurm says FAILED"
    output.write_text(f"Error: cannot write in {run.path}/attempts\n\nhint: is the disk full or read-only?\n")
    assert read_status([run])[0].cause == f"cannot write in {run.path}/attempts; Slurm says FAILED"
    # The error of a start that was followed by an attempt is not this end's.
    output.write_text(f"Error: no room\nrun folder {run.path}, attempt 1, output in attempts/1/log\n")
    assert read_status([run])[0].cause == "Slurm says FAILED"


@pytest.mark.parametrize("code", [None, 0])
def test_what_ranks_measure_after_the_end_is_waited_for(monkeypatch, code):
    attempt = add_attempt(run := unsubmitted_run(), [])
    attempt.ranks.mkdir()
    (attempt.ranks / "0.json").write_text(json.dumps({"pid": 1, "exit_code": code}))
    waits = SimpleNamespace(monotonic=lambda: 0.0, sleep=lambda _: attempt.measured.write_text("{}"))
    monkeypatch.setattr(control, "time", waits)
    control.await_measurements(run)
    assert attempt.measured.exists() == (code is None)


def test_a_run_without_sbatchs_answer_is_unknown_until_found(slurm_says):
    run = unsubmitted_run("generic-slurm")
    line = {"scheduler": "slurm", "job_id": None, "refused": None, "script": str(run.job_script)}
    run.add_submission({**line, "lost": "Socket timed out on send/recv operation"})
    slurm_says(None)
    (row,) = read_status([run])
    assert (row.state, row.cause, row.is_over) == ("unknown", NO_ANSWER, False)
    (asked,) = control.ask_runs([run], "stop")
    assert (asked.refused, asked.message) == (True, f"its job is not known yet: {NO_ANSWER}")
    slurm_says({})
    (row,) = read_status([run])
    sent = "sbatch sent its job and got no answer (Socket timed out on send/recv operation)"
    cause = f"{sent}; Slurm does not show the job"
    assert (row.state, row.cause) == ("unknown", cause)
    answer = Answer(0, f"41|{run.job_script}\n42|{run.job_script}\n43|{run.job_script} x\n44|/other/job.sh\n", "")
    assert add_found(run, run.submissions()[-1], answer) == "42", "the newest of its command"
    slurm_says({"42": ("PENDING", "Priority")})
    (row,) = read_status([run])
    assert (row.state, row.job_id) == ("pending", "42")


def test_a_job_without_an_attempt_is_what_its_output_says(slurm_says):
    """status and why say the same of a script that failed before it had a run folder's attempt."""
    run = slurm_run(attempt=False)
    slurm_says({})
    assert read_status([run])[0].state == "unknown"
    (run.path / "slurm-7.out").write_text("/site/job.sh: line 41: modul: command not found\n")
    (row,), why = read_status([run]), json.loads(in_process("why", run.run_id, "--json").stdout)
    assert (row.state, row.cause) == (why["ended"], why["cause"])
    assert (row.state, row.cause) == ("user_error", "modul: command not found")
    for slurm in ("PENDING", "RUNNING"):  # it goes on: Slurm has put it back
        slurm_says({"7": (slurm, "None")})
        assert read_status([run])[0].state == slurm.lower()


@pytest.mark.parametrize(
    ("probes", "node", "named"),
    [((0.01, 0.01, 0.01), None, "n1"), ((0.01, 0.01, 0.0125), None, "n3"), ((0.01, 0.01, 0.0125), "n2", "n2"),
     ((0.01, 0.01, 0.01), "n9", "n1")],
)  # fmt: skip
def test_the_line_for_a_shell_names_the_slow_node_else_rank_0s(slurm_says, probes, node, named) -> None:
    """Or the node of a cause, if the job still has it."""
    run = slurm_run()
    (folder := run.attempt(1).heartbeats).mkdir()
    for rank, probe_s in enumerate(probes):
        beat = RankHeartbeat(rank, f"n{rank + 1}", 1, 9, 17, "training", 0.5, 300.0, time.time(), probe_s=probe_s)
        write_heartbeat(folder, beat)
    slurm_says({"7": ("RUNNING", "")})
    (row,) = read_status([run])
    line = f"srun --jobid=7 --overlap --nodelist={named} --pty bash"
    assert shell_command(run, row, node) == line
    assert shell_command(run, replace(row, job_id="7_3"), node) == line.replace("=7 ", "=$(squeue -ho %A -j 7_3) ")
    if node is None:
        for verb in ("status", "why"):
            assert f"a shell in its job: {line}\n" in in_process(verb, run.run_id).stderr
    assert shell_command(run, replace(row, state="done"), node) == ""


@pytest.mark.parametrize(
    ("line", "ended"),
    [("ModuleNotFoundError: No module named 'einops'", "user_error"), ("torch.OutOfMemoryError: CUDA", "gpu_memory")],
)
@pytest.mark.parametrize("has_attempt", [True, False])
def test_why_says_the_same_of_a_failure_that_nobody_judged(slurm_says, line, ended, has_attempt):
    run = slurm_run() if has_attempt else with_job(unsubmitted_run("generic-slurm"), "7")
    log = run.attempt(1).log if has_attempt else run.path / "slurm-7.out"
    log.write_text(f"Traceback (most recent call last):\n{line}\n")
    slurm_says({"7": ("FAILED", "")})
    (row,) = read_status([run])
    found = json.loads(in_process("why", run.run_id, "--json", code=0).stdout)
    assert (row.state, found["ended"], row.cause) == (ended, ended, found["cause"])


def test_the_logs_that_why_has_read_are_not_read_again(slurm_says, monkeypatch):
    run, read = slurm_run(), []
    run.attempt(1).log.write_text("ModuleNotFoundError: No module named 'einops'\n")
    slurm_says({"7": ("FAILED", "")})
    monkeypatch.setattr("hpc_gpt.report.why.read_log", lambda path: read.append(path) or read_log(path))
    answer = explain(str(run.path), logs_dir())
    (row,), _ = ask_status([run], explained=answer)
    assert (row.state, read) == ("user_error", [run.attempt(1).log])


def test_it_says_since_when_the_steps_of_a_program_stand_still(slurm_says):
    run = slurm_run()
    slurm_says({"7": ("RUNNING", "")})
    heartbeat = RankHeartbeat(0, "n1", 1, 9, 17, "training", 320.0, 3600.0, time.time())
    folder = run.attempt(1).heartbeats
    folder.mkdir()
    write_heartbeat(folder, heartbeat)
    assert read_status([run])[0].still is None
    words = "signs of life: output, CPU work; a hang after 60 min"
    write_heartbeat(folder, replace(heartbeat, still_s=320.0, still=words))
    found = read_status([run])[0].still
    assert re.fullmatch(rf"no step since [\d: -]+, for 32\d s: {words}", found), found
    assert found.partition(", for ")[0] in in_process("status", run.run_id).stdout
    run.attempt(1).write_ended("hang", "its cause", 17)
    assert read_status([run])[0].still is None
