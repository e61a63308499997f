"""Whose a process is: by the tree of its supervisor, by the record of that, and by Slurm's answers."""

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.process import boot_id, start_time
from hpc_gpt.core.processes import find_processes as processes
from hpc_gpt.core.processes.find_processes import Tree, recorded, run_on
from hpc_gpt.core.processes.job_steps import StartedSteps, Step, in_cgroup, in_job, steps_of
from hpc_gpt.launcher.local import controller, gpus
from tests.conftest import REPOSITORY
from tests.made_runs import add_attempt, unsubmitted_run
from tests.programs import put, ran

# A supervisor, whose child leaves one without environment, one that ends, and the supervisor of another run.
LEAVES = """
    import os, subprocess, sys, time
    from hpc_gpt.core.process import adopt_orphans, stat_of
    from hpc_gpt.core.processes.find_processes import Tree
    adopt_orphans()
    before = subprocess.Popen(["sleep", "300"], process_group=0)
    tree = Tree()
    text = "setsid env -i sleep 301 & setsid true & setsid bash -c 'sleep 302; true' x hpc_gpt.launcher.local.queue &"
    root = subprocess.Popen(["bash", "-c", text + "exit 7"], process_group=0)
    tree.add(root.pid)
    beside = subprocess.Popen(["sleep", "300"], process_group=0)
    own = [subprocess.Popen(["true"]), subprocess.Popen(["true"], process_group=0)]
    code = root.wait()

    def children(state):
        pids = open("/proc/self/task/%d/children" % os.getpid()).read().split()
        return [pid for pid in map(int, pids) if stat_of(pid)[0] in state]

    def lines():
        found = []
        for pid in tree.look(at_once=True).seen:
            try:
                found += open("/proc/%d/cmdline" % pid).read().split("\\0")[1:2] or ["has ended"]
            except OSError:
                found += ["is gone"]
        return found

    while lines() != ["301"] or len(children("Z")) != 2:  # those that it has started itself
        time.sleep(0.05)
    left = list(tree.last.seen)
    os.kill(left[0], 9)
    while tree.is_alive() or left[0] in children("Z"):
        time.sleep(0.05)
    print(code, [each.wait() for each in own], before.poll(), beside.poll())
    for pid in children("SR"):
        os.killpg(pid, 9)
"""


def test_a_supervisor_knows_adopts_and_reaps_what_it_started() -> None:
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    done = ran(sys.executable, "-c", textwrap.dedent(LEAVES), env=environment, code=0)
    assert done.stdout == "7 [0, 0] None None\n"


def test_a_recorded_process_keeps_its_gpu_and_its_run() -> None:
    run = unsubmitted_run()
    attempt, may_have = run.new_attempt(), {"0": "GPU-recorded"}
    gpus.take_for(str(run.path), 1, may_have, {})[0].free()
    with subprocess.Popen(["env", "-i", "sleep", "300"]) as left:
        record = {"boot": boot_id(), "processes": {left.pid: start_time(left.pid), os.getpid(): "1"}}
        attempt.processes.write_text(json.dumps(record))
        assert run_on(run) == [left.pid]
        assert gpus.take_for("r", 1, may_have, {})[1] == f"waits for 1 of GPUs 0; taken: 0 by run {run.run_id}"
        left.kill()
    assert run_on(run) == []
    held, _ = gpus.take_for("r", 1, may_have, {})
    held.free()
    attempt.processes.write_text(json.dumps(record | {"boot": "another", "processes": {os.getpid(): "1"}}))
    assert run_on(run) == []


def test_a_jobs_processes_are_read_from_its_cgroup(tmp_path: Path) -> None:
    for place, pids in (
        ("step_batch/user/task_0", "11\n12\n"),
        ("step_batch/slurm", "13\n"),
        ("step_0/user/task_special", "21\n"),
        ("step_extern/task_0", "31\n"),
        ("", "1\n"),
    ):
        put(tmp_path / place / "cgroup.procs", pids)
    assert in_cgroup(tmp_path) == {11: "batch", 12: "batch", 13: "batch", 21: "0", 31: "extern"}
    assert in_cgroup(tmp_path / "none") == {}


LISTED = (
    "PID      JOBID    STEPID   LOCALID GLOBALID\n11 7 batch 0 0\n{own} 7 0 0 0\n{other} 7 1 0 0\n-1 7 extern - -\n"
)
SHOWN = "StepId=7.{number} State=RUNNING NodeList=n[1-2] Nodes=2 Name=bash SrunHost:Pid={srun}"


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's answers about job 7: step 0 has an srun of this host that runs, this test; step 1 one of another host."""
    host = os.uname().nodename.partition(".")[0]
    put(tmp_path / "listed", LISTED.format(own=os.getpid(), other=os.getppid()))
    steps = ("0", f"{host}:{os.getpid()}"), ("1", "login1:4"), ("2", f"{host}:{2**22 + 1}"), ("batch", "(null):0")
    put(tmp_path / "shown", "".join(f"{SHOWN.format(number=number, srun=srun)}\n" for number, srun in steps))
    put(
        tmp_path / "bin" / "scontrol",
        f'#!/bin/sh\n[ "$1" = listpids ] && cat {tmp_path}/listed || cat {tmp_path}/shown\n',
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_CONF", raising=False)


@pytest.mark.usefixtures("scontrol")
def test_steps_are_left_once_their_srun_has_ended_here(monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_job("7", "n1") == {11: "batch", os.getpid(): "0", os.getppid(): "1"}
    steps = steps_of("7")
    assert [(step.id, step.nodes, step.is_left) for step in steps] == [
        ("7.0", "n[1-2]", False), ("7.1", "n[1-2]", False), ("7.2", "n[1-2]", True),
    ]  # fmt: skip
    assert not Step("").is_left
    assert StartedSteps()({os.getpid(): ""}) == [], "outside a job"
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    assert StartedSteps()({os.getpid(): ""}) == [os.getpid()], "whose srun is in the tree"
    assert StartedSteps()({}) == []
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    assert steps_of("7") == []


def test_an_ended_root_is_no_process_of_a_later_pid(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["sleep", "300"]) as one:
        monkeypatch.setattr(processes, "start_time", lambda pid: "1")
        tree = Tree([one.pid])
        assert tree.look().seen == {}
        one.kill()


def test_no_attempt_begins_beside_what_a_kill_has_not_ended(monkeypatch, capsys) -> None:
    """Such as a process of another user."""
    run = unsubmitted_run()
    attempt = run.new_attempt()
    with subprocess.Popen(["sleep", "300"]) as left:
        record = {"boot": boot_id(), "processes": {left.pid: start_time(left.pid)}}
        attempt.processes.write_text(json.dumps(record))
        monkeypatch.setattr(controller, "time", SimpleNamespace(**{**vars(time), "sleep": lambda _: left.kill()}))
        assert not controller.wait_for_retry(run, attempt, run.resolved())
    said = f"process {left.pid} runs on after its kill: no attempt begins beside it\n"
    assert capsys.readouterr().out == said


@pytest.mark.parametrize(
    "table", [{}, {"processes": [7]}, {"processes": {"x": "1", "": 0, "9" * 30: "1", "-3": "1"}}, {"boot": 7}, []]
)
def test_a_malformed_record_names_no_process(table):
    run = unsubmitted_run()
    add_attempt(run, 1)
    for name in ("processes.json", "processes-0.json"):
        text = json.dumps({"boot": boot_id(), **table} if table != [] else table)
        (run.attempt(1).folder / name).write_text(text)
    assert recorded(run.attempts()) == set()
