"""What stands over local ranks: outcome, the end of all when one fails, cancel, time limit, budget, a clean
environment; and job.sh started by hand."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpc_gpt.core.errors import JobRefused
from hpc_gpt.core.files import logs_dir, read_json, write_once
from hpc_gpt.core.process import host_clock, is_alive
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher.local import controller
from hpc_gpt.launcher.local.queue import QUEUE, budget_environment, start_here
from hpc_gpt.launcher.render import render_script
from hpc_gpt.launcher.watch.status import read_status
from tests.around import events_of, named
from tests.cli.command import hpc_gpt, in_process
from tests.conftest import REPOSITORY
from tests.launcher.local.conftest import SMALL, ended, newest, status_of, submit
from tests.made_runs import STARTED, add_attempt, add_checkpoint, unsubmitted_run
from tests.processes import state_of
from tests.waiting import patient, wait_for


def rank_processes(run):
    return [read_json(path) for path in sorted(run.attempts()[-1].ranks.glob("*.json"))]


def all_gone(run):
    line = run.submissions()[-1]
    processes = [line, *rank_processes(run)]
    return not any(is_alive(process["pid"], process["pid_start"]) for process in processes)


def until_gone(run):
    wait_for("nothing of it is left", lambda: all_gone(run))


def test_one_failing_rank_ends_all(ranks_that, tmp_path):
    up = tmp_path / "up"
    run = ranks_that(
        f"if [ $rank = 1 ]; then until [ -e {up} ]; do sleep 0.1; done; exit 7; fi; touch {up}; sleep 3000"
    )
    status = ended(run)
    assert (status.state, status.cause) == ("error", f"rank 1 on {platform.node()} ended with exit code 7")
    until_gone(run)
    wait_for("both exit codes", lambda: [each.get("exit_code") for each in rank_processes(run)] == [-signal.SIGKILL, 7])


@pytest.mark.long
def test_a_killed_rank_ends_all_with_what_it_had_started(ranks_that, tmp_path):
    run = ranks_that(f"sleep 3000 & echo $! > {tmp_path}/child.$rank; wait")
    wait_for("children of both ranks", lambda: all((tmp_path / f"child.{rank}").exists() for rank in (0, 1)))
    wait_for("two ranks run", lambda: len(rank_processes(run)) == 2)
    os.kill(rank_processes(run)[0]["pid"], signal.SIGKILL)
    status = ended(run)
    words = f"rank 0 on {platform.node()} was ended by SIGKILL, by hand or by the kernel's memory killer"
    assert (status.state, status.cause) == ("error", words)
    assert words in run.attempt(1).log.read_text().splitlines()
    until_gone(run)
    for rank in (0, 1):
        pid = int((tmp_path / f"child.{rank}").read_text())
        wait_for("the process has left", lambda pid=pid: state_of(pid) in "ZX")


def test_a_failed_attempt_is_retried_here_if_its_key_says_so(ranks_that):
    """One restart: here are no other nodes, and two attempts without a checkpoint are enough."""
    run = ranks_that("exit 7", "--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=1")
    wait_for("a second attempt is judged", lambda: len(run.attempts()) == 2 and run.attempt(2).verdict())
    assert ended(run).state == "error"
    starts = [attempt.started() for attempt in run.attempts()]
    assert [(start["restart"], start["in_job"]) for start in starts] == [(0, 0), (0, 1)]
    assert (run.attempt(1).verdict()["in_job"], run.attempt(2).verdict()["go_on"]) == (True, False)
    assert "no restart in the job: 2 attempts in a row left no newer checkpoint" in run.attempt(2).verdict()["why"]
    until_gone(run)


PAUSES = ("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=300")


def test_a_signal_in_the_pause_ends_a_script_started_by_hand(rank_template, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(in_process("render", *SMALL, *PAUSES, "--template", rank_template("exit 7")).stdout)
    environment = {**os.environ, "HPC_GPT_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(["bash", script], env=environment, stdout=subprocess.DEVNULL) as by_hand:
        wait_for("the pause", lambda: any(run.attempt(1).verdict() for run in list_runs(logs_dir())))
        status = status_of(newest())
        assert status.state == "running", "it holds its GPUs"
        assert f"{platform.node()} ended with exit code 7; between attempts, " in status.cause
        wait_for("its end", lambda: by_hand.poll() is not None or by_hand.send_signal(signal.SIGTERM))
    assert (by_hand.returncode, len(newest().attempts())) == (-signal.SIGTERM, 1)
    assert status_of(newest()).state == "cancelled"


def test_a_stop_in_the_pause_stops(ranks_that):
    run = ranks_that("exit 7", *PAUSES)
    wait_for("the pause", lambda: run.attempts() and run.attempt(1).verdict())
    in_process("stop", run.run_id, code=0)
    status = ended(run)
    assert (status.state, status.cause, len(run.attempts())) == ("stopped", "hpc-gpt stop in the pause", 1)


def test_a_time_limit_is_of_the_job_not_of_each_attempt():
    run = unsubmitted_run(job__time="0:01:30", job__restart_in_job=True)
    boot, now = host_clock()
    start = {"job_id": "5", "restart": 0, "boot": boot}
    for in_job, ago_s in ((0, 100.0), (1, 10.0)):
        attempt = run.new_attempt()
        times = {"in_job": in_job, "started": time.time() - ago_s, "uptime": now - ago_s}
        write_once(attempt.folder / "attempt.json", json.dumps({**start, **times}))
        attempt.write_ended("error", "exit code 7", 3)
    add_checkpoint(run, 3)
    assert controller.job_s(run, run.attempt(2)) >= 100
    assert not controller.judge_and_note(run, run.attempt(2), run.resolved())
    assert "no restart in the job: after the pause the job has 0 s, and it needs 1230 s" in attempt.verdict()["why"]


def test_a_retry_that_the_budget_refuses_ends_as_budget():
    run = unsubmitted_run(job__max_gpu_hours=1.0)
    attempt = add_attempt(run, 3, "requeued", job_id="5", device="a GPU", requeue=True)
    write_once(attempt.folder / "next.json", json.dumps({"go_on": True, "in_job": False, "attempt_ended": "requeued"}))
    assert not controller.wait_for_retry(run, attempt, run.resolved())
    verdict = attempt.verdict()
    assert (verdict["go_on"], verdict["ended"]) == (False, "budget")
    assert "GPU-hours of 1 are spent" in verdict["why"]


@pytest.mark.long
def test_wait_ends_with_exit_3_and_the_cause(tmp_path):
    template = tmp_path / "t.sh.j2"
    template.write_text('{% extends "base.sh.j2" %}{% block launch %}\nexit 9\n{% endblock %}')
    done = hpc_gpt(
        "submit", "demo", "--cluster", "local", "--set", "data.source=random", "--template", template, "--wait", code=3
    )
    assert "ended with exit code 9" in done.stderr
    assert f"hint: hpc-gpt why {newest().run_id}" in done.stderr


def test_by_hand_the_script_ends_with_the_worst_ranks_code(rank_template, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(in_process("render", *SMALL, "--template", rank_template("exit $((8 + rank))")).stdout)
    environment = {**os.environ, "HPC_GPT_PYTHON": sys.executable, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 9, done.stdout + done.stderr
    assert "ended with exit code" in done.stdout


def test_a_second_ctrl_c_cancels_a_run_that_heeds_no_first(rank_template, tmp_path):
    text = f"trap 'touch {tmp_path}/asked.$rank' INT; touch {tmp_path}/up.$rank; while :; do sleep 0.1; done"
    command = ["submit", *SMALL, "--template", str(rank_template(text)), "--wait"]
    waiting = subprocess.Popen(
        [sys.executable, "-m", "hpc_gpt", *command],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for("the ranks are up", lambda: all((tmp_path / f"up.{rank}").exists() for rank in (0, 1)))
    run = newest()
    waiting.send_signal(signal.SIGINT)
    wait_for("its mark", lambda: list(run.path.glob("cancelled.*")))
    wait_for("both ranks are asked", lambda: all((tmp_path / f"asked.{rank}").exists() for rank in (0, 1)))
    assert status_of(run).state == "running"
    waiting.send_signal(signal.SIGINT)
    _, said = waiting.communicate()
    assert waiting.returncode == 130, said
    assert "Ctrl-C again: the run is cancelled" in said
    assert status_of(run).state == "cancelled"
    until_gone(run)


def test_cancel_lets_ranks_save_and_leaves_its_mark_first(ranks_that, tmp_path):
    note = f"trap 'ls $HPC_GPT_RUN > {tmp_path}/seen.$rank; exit 0' TERM"
    run = ranks_that(f"{note}; touch {tmp_path}/up.$rank; while :; do sleep 0.1; done")
    wait_for("the ranks are up", lambda: all((tmp_path / f"up.{rank}").exists() for rank in (0, 1)))
    assert status_of(run).state == "running"
    done = in_process("cancel", run.run_id)
    job_id = run.submissions()[-1]["job_id"]
    assert (done.code, done.stdout) == (0, f"cancelled {run.run_id}, job {job_id}\n")
    assert ended(run).state == "cancelled"
    assert f"cancelled.{job_id}" in (tmp_path / "seen.0").read_text()
    until_gone(run)
    for verb in ("cancel", "stop", "save", "requeue"):
        done = in_process(verb, run.run_id)
        assert (done.code, done.stdout) == (1, "")
        assert done.stderr == f"{run.run_id}: nothing to {verb}, it ended as cancelled\n"


def test_a_ctrl_c_at_the_start_leaves_a_run_to_be_cancelled(monkeypatch):
    run = unsubmitted_run()

    class Interrupted(subprocess.Popen):
        def __init__(self, line, **options):
            is_controller = QUEUE in line
            super().__init__(["sleep", "300"] if is_controller else line, **options)
            if is_controller:
                signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        patched.setattr("hpc_gpt.launcher.local.queue.subprocess.Popen", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            start_here(run, run.resolved())
    assert read_status([run])[0].state == "running"


@pytest.mark.long
def test_a_run_goes_on_without_its_terminal_and_command(ranks_that):
    run = ranks_that("sleep 3000")
    pid = run.submissions()[-1]["pid"]
    assert os.getsid(pid) == pid
    assert status_of(run).state == "running"
    assert os.readlink(f"/proc/{pid}/fd/0") == os.devnull
    assert os.readlink(f"/proc/{pid}/fd/1") == str(run.attempts()[-1].log)


def test_the_time_limit_comes_with_a_warning(ranks_that):
    minutes, seconds = divmod(round(patient(16)), 60)
    run = ranks_that("trap 'echo rank $rank warned' USR2; while :; do sleep 0.1; done",
                     "-t", f"{minutes}:{seconds:02}", "--set", f"job.signal_lead_s={round(patient(4))}")  # fmt: skip
    status = ended(run)
    assert (status.state, str(status.cause).startswith("the time limit of ")) == ("walltime", True), status
    until_gone(run)
    assert "rank 0 warned" in run.attempts()[-1].log.read_text()
    assert "rank 1 warned" in run.attempts()[-1].log.read_text()


def test_nothing_of_an_enclosing_job_leaks_in_and_gpus_stay(ranks_that):
    outside = {"RANK": "5", "WORLD_SIZE": "9", "LOCAL_RANK": "5", "MASTER_ADDR": "elsewhere", "MASTER_PORT": "1",
               "SLURM_JOB_ID": "77", "SLURM_PROCID": "3", "SLURM_CPU_BIND": "none", "SUBMITIT_LOCAL_GLOBALID": "8",
               "HPC_GPT_ATTEMPT": "9", "HPC_GPT_RUN": "/nowhere", "CUDA_VISIBLE_DEVICES": "2,3",
               "HPC_GPT_STOP_AT": "7", "MINE": "kept"}  # fmt: skip
    run = ranks_that('env | sort | sed "s/^/$rank /"', environment=outside)
    assert ended(run).state == "error", "exit code 0 without a word of the trainer is no success"
    found = run.attempts()[0].log.read_text().splitlines()
    for rank in ("0", "1"):
        seen = dict(line[2:].partition("=")[::2] for line in found if line.startswith(f"{rank} ") and "=" in line)
        assert not [name for name in seen if name.startswith("SLURM_")]
        assert not {"RANK", "MASTER_ADDR", "MASTER_PORT", "HPC_GPT_STOP_AT"} & set(seen)
        assert seen["SUBMITIT_LOCAL_GLOBALID"] == rank
        assert seen["SUBMITIT_LOCAL_NTASKS"] == "2"
        assert (seen["HPC_GPT_RUN"], seen["HPC_GPT_ATTEMPT"]) == (str(run.path), "1")
        assert (seen["CUDA_VISIBLE_DEVICES"], seen["MINE"]) == ("2,3", "kept")


def test_a_killed_controller_leaves_no_rank_its_event_is_sent(ranks_that, tmp_path):
    """Nothing waits for the command that gets the events: it has them all before the first is read."""
    told, text = tmp_path / "told", '[ "$HPC_GPT_ATTEMPT" = 1 ] || exit 9; exec sleep 3000'
    command = f"touch {tmp_path}/has.$$; until [ -e {tmp_path}/go ]; do sleep 0.1; done; cat >>{told}"
    keys = ("--set", f"notify.command={command}", "--set", "notify.timeout_s=300")
    run = ranks_that(text, *keys)
    wait_for("two ranks run", lambda: len(rank_processes(run)) == 2)
    os.kill(run.submissions()[-1]["pid"], signal.SIGKILL)
    wait_for("nothing of it is left", lambda: all_gone(run) and status_of(run).state == "error")
    for number in (2, 3):
        submit("--resume", run.run_id)
        assert ended(run).state == "error"
        wait_for("an event is handed over", lambda number=number: len(list(tmp_path.glob("has.*"))) == number)
        wait_for("the lock is free", lambda: not (run.path / "lock.json").exists())
    (tmp_path / "go").touch()
    wait_for("the events are told", lambda: told.exists() and told.read_text().count("\n") == 3)
    second, third = (run.attempt(number).ended()["cause"] for number in (2, 3))
    assert named(events_of(run, told), "ended", "cause", "next") == [
        ("failed", 1, "error", "its process is gone and wrote no end", "attempt 2 has begun"),
        ("failed", 2, "error", second, "no other attempt"),
        ("failed", 3, "error", third, "no other attempt"),
    ]


@pytest.mark.long
def test_a_controller_of_a_moved_run_ends_its_ranks_alone(ranks_that):
    run = ranks_that("sleep 3000")
    wait_for("the second rank runs", lambda: (run.attempt(1).ranks / "1.json").exists())
    line, ranks = run.submissions()[-1], rank_processes(run)
    moved = run.path.rename(run.path.with_name("moved"))
    os.kill(line["pid"], signal.SIGTERM)
    wait_for(
        "the controller and its ranks have left",
        lambda: not any(is_alive(each["pid"], each["pid_start"]) for each in (line, *ranks)),
    )
    assert not run.path.exists()
    log = (moved / "attempts" / "1" / "log").read_text()
    assert log.count(f"cannot write {run.path}/attempts/1/ranks/") == 1
    assert "do not move a run folder before its run has ended" in log
    assert "Traceback" not in log


def test_a_budget_is_the_ranks_time_until_it_is_spent():
    """One GPU-hour on two GPUs is half an hour. Nothing starts where less is left than a save may take."""
    asked = {"layout__gpus": 2, "layout__tp": 2, "layout__pp": 1, "job__signal_lead_s": 60, "job__max_gpu_hours": 1.0}
    run = unsubmitted_run(**asked)
    assert budget_environment(run, run.resolved(), STARTED) == {"HPC_GPT_STOP_AT": f"{STARTED + 1800:.0f}"}
    add_attempt(run, [], "error", started=STARTED, time=STARTED + 1750)
    with pytest.raises(JobRefused, match=r"0\.972 GPU-hours of 1 are spent, and the rest is less than a save may take"):
        budget_environment(run, run.resolved(), STARTED + 3600)
    assert budget_environment(run, unsubmitted_run().resolved(), STARTED) == {}


def start(tmp_path: Path, inside: Path) -> subprocess.CompletedProcess[str]:
    """Starts the demo's script under a Python that finds the modules in `inside` first."""
    script = tmp_path / "job.sh"
    script.write_text(render_script(resolve(load_experiment("demo"), load_profile("local"))))
    environment = os.environ | {"HPC_GPT_PYTHON": sys.executable, "HPC_GPT_RUN": str(tmp_path / "run")}
    environment["PYTHONPATH"] = str(inside)
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)


def test_a_python_without_submitit_is_named(tmp_path):
    (inside := tmp_path / "inside").mkdir()
    (inside / "submitit.py").write_text("raise ModuleNotFoundError('No module named submitit', name='submitit')\n")
    done = start(tmp_path, inside)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert f"Error: {sys.executable} lacks submitit, which a run on this machine needs\n\nhint: " in done.stderr
    assert "HPC_GPT_PYTHON=PYTHON bash job.sh" in done.stderr
