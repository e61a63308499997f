"""Left-overs of attempts on a node, which a restart in the job ends: processes, shared memory, a node, a port."""

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import textwrap
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.ends.bad_nodes import listed
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.preflight import left_over as module
from hpc_gpt.trainer.preflight.left_over import LeftOver
from hpc_gpt.trainer.preflight.verdict import decode, encode
from tests.conftest import REPOSITORY
from tests.programs import put, ran
from tests.trainer.preflight.test_nodes import RANKS, new_run
from tests.trainer.supervision.nvml import nvml_environment
from tests.waiting import patient

JOB = "4711"
# A node of its own: it sees its own processes alone, and its own /dev/shm.
NODE = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "bash", "-c"]


def started(run: RunFolder, job: str = JOB, in_job: int = 0, **more: object) -> None:
    attempt = run.new_attempt()
    said = {"attempt": attempt.number, "job_id": job, "restart": 0, "in_job": in_job, "started": time.time() - 5}
    (attempt.folder / "attempt.json").write_text(json.dumps(said | more))


def judged(run: RunFolder, **verdict: object) -> None:
    (run.attempts()[-1].folder / "next.json").write_text(json.dumps({"go_on": True, "in_job": True, **verdict}))


@pytest.fixture
def restarted(tmp_path: Path) -> RunFolder:
    """A run whose second attempt is a restart in the job of the first one."""
    run = new_run(tmp_path, nodes=2, spares=1)
    started(run)
    judged(run)
    started(run, in_job=1)
    return run


def on_a_node(run: RunFolder, before: str, after: str = "") -> tuple[dict, str]:
    """(what the module says, what `after` prints) on a node on which `before` has been run."""
    if subprocess.run([*NODE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to make namespaces")
    module = f"{sys.executable} -m hpc_gpt.trainer.preflight.left_over"
    script = f"""
        mount -t tmpfs shm /dev/shm
        mkfifo ready
        process() {{  # one that is there when this returns
          HPC_GPT_RUN=$1 HPC_GPT_ATTEMPT=$2 SLURM_JOB_ID=$3 setsid sh -c 'echo >ready; exec sleep 300' >/dev/null 2>&1 &
          read -r <ready
        }}
        {before}
        HPC_GPT_ATTEMPT=2 SLURM_JOB_ID={JOB} {module}
        echo "$(jobs -r | wc -l) run"
        ls /dev/shm
        {after}
    """
    environment = os.environ | {"HPC_GPT_RUN": str(run.path), "SLURMD_NODENAME": "n1", "PYTHONPATH": str(REPOSITORY)}
    done = ran(*NODE, textwrap.dedent(script), cwd=run.path, env=environment, code=0)
    line, _, rest = done.stdout.partition("\n")
    return decode(line) or {}, rest


def test_processes_of_earlier_attempts_alone_are_ended(restarted: RunFolder) -> None:
    run = restarted.path
    said, rest = on_a_node(restarted, f"process {run} 1 {JOB}; process {run} 2 {JOB}")
    assert "figures" in said
    assert rest.split() == ["1", "run"]


def test_another_job_and_its_shared_memory_are_left_alone(restarted: RunFolder) -> None:
    run = restarted.path
    said, rest = on_a_node(restarted, f"process {run} 1 4712; process {run}-b 1 {JOB}; touch /dev/shm/nccl-a")
    assert said["figures"]["shared_memory"] == []
    assert rest.split() == ["2", "run", "nccl-a"]


def test_new_shared_memory_that_nobody_holds_is_removed(restarted: RunFolder) -> None:
    """Libraries' own since the first attempt; other names since the last one, with a minute for the nodes' clocks."""
    (restarted.attempt(1).folder / "attempt.json").write_text(json.dumps({"job_id": JOB, "started": time.time() - 300}))
    made = "touch -d '1 hour ago' /dev/shm/{old,nccl-old}; touch /dev/shm/{nccl-a,torch_7_1,sem.mp-k2,nccl-held,mine}"
    made += "; touch -d '270 seconds ago' /dev/shm/{staged,psm_7}; mkdir /dev/shm/data"
    said, rest = on_a_node(restarted, f"{made}; exec 9</dev/shm/nccl-held")
    assert said["figures"]["shared_memory"] == ["mine", "nccl-a", "psm_7", "sem.mp-k2", "torch_7_1"]
    assert rest.split() == ["0", "run", "data", "nccl-held", "nccl-old", "old", "staged"]


@pytest.fixture
def no_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm says nothing about the job."""
    monkeypatch.setenv("SLURM_CONF", "/nonexistent")
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    monkeypatch.setenv("SLURM_JOB_ID", JOB)


SRUN = f"""#!/bin/bash
nodes=${{4#--nodelist=}} message="srun: error: Task launch for StepId=1.0 failed on node b: gone"
[[ ,$nodes, != *,$FAILS,* ]] || {{ echo "$message" >&2; exit 1; }}
[[ $5 != --overlap ]] || set -- "${{@:1:4}}" "${{@:6}}"
exec {sys.executable} -m hpc_gpt.trainer.preflight.probe "${{nodes//,/ }}" 1 "${{@:5}}"
"""


@pytest.fixture
def srun(tmp_path: Path) -> list[str]:
    """The command of the preflight; its nodes are processes of this machine. Node $FAILS does not start its part."""
    put(tmp_path / "srun", SRUN)
    return [str(tmp_path / "srun"), "NODES", *RANKS]


def left_over(run: RunFolder, nodes: str, command: list[str], monkeypatch: pytest.MonkeyPatch, port: int) -> LeftOver:
    number = run.attempts()[-1].number
    for name, value in (("RUN", run.path), ("ATTEMPT", number)):
        monkeypatch.setenv(f"HPC_GPT_{name}", str(value))
    monkeypatch.setenv("MASTER_PORT", str(port))
    left = LeftOver(run, number, nodes.split())
    left.end(command)
    return left


@pytest.mark.usefixtures("no_slurm")
def test_nodes_at_fault_are_left_out_and_ports_are_free(
    tmp_path: Path, srun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(tmp_path, nodes=2, spares=2)
    started(run)
    judged(run, exclude=["a", "z"])
    started(run, in_job=1)
    with socket.create_server(("", 0)) as taken:
        left = left_over(run, "a c", srun, monkeypatch, port := taken.getsockname()[1])
    fault = "an earlier attempt failed on it"
    assert left.faults == {"a": fault}
    assert left.ports.keys() == {"c"}
    assert left.ports["c"] not in (port, None)
    assert left.why_none_starts(1) is None
    assert left.why_none_starts(2) == f"bad node a: {fault}"
    assert listed("site") == {}, "the attempt that failed on it has noted it"


def a_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("", 0)) as free:
        return int(free.getsockname()[1])


@pytest.mark.usefixtures("no_slurm")
def test_a_node_that_does_not_start_its_part_is_left_out(
    restarted: RunFolder, srun: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm's message about one node ends the step on all; the others are asked again."""
    monkeypatch.setenv("FAILS", "b")
    left = left_over(restarted, "a b c", srun, monkeypatch, a_port())
    assert list(left.faults) == ["b"]
    assert left.ports.keys() == {"a", "c"}
    assert "failed on node b: gone" in listed("site")["b"].why
    assert listed("site")["b"].everyone, "by Slurm's word"


@pytest.mark.usefixtures("no_slurm")
def test_a_node_is_blamed_for_all_runs_by_a_second_look(restarted: RunFolder, tmp_path: Path, monkeypatch) -> None:
    """Nobody knows whose memory is in use, or why a node has not answered."""
    said = encode("b", 0, failed="10 of 80 GiB of GPU 0 are in use", sure=False)
    put(tmp_path / "srun", f"#!/bin/sh\ncat <<'E'\n{said}E\necho \"$*\" >>'{tmp_path}/asked'\n")
    command = [str(tmp_path / "srun"), "--gpus-per-task=1", "--gpu-bind=closest", "NODES", *RANKS]
    for everyone in (False, True):
        clock = SimpleNamespace(monotonic=partial(next, itertools.count(0.0, 25.0)), sleep=lambda _: None)
        monkeypatch.setattr(module, "time", clock)
        left = left_over(restarted, "a b", command, monkeypatch, a_port())
        assert left.faults.keys() == {"a", "b"}
        found = listed("site")
        assert [found[node].everyone for node in "ab"] == [everyone] * 2
    assert "has not answered within 60 s" in found["a"].why
    assert "--gpu" not in (tmp_path / "asked").read_text(), "the one task of a node sees all its GPUs"


@pytest.mark.long
def test_the_first_rank_of_a_node_with_a_fault_ends_the_attempt(restarted: RunFolder) -> None:
    own = {"HPC_GPT_RUN": str(restarted.path), "HPC_GPT_ATTEMPT": "2", "RANK": "0", "SLURMD_NODENAME": "n1"}
    left = [sys.executable, "-m", "hpc_gpt.trainer.preflight.left_over"]
    run = partial(subprocess.run, left, capture_output=True, text=True, check=False)
    assert run(env=os.environ | own).returncode == 0
    held = nvml_environment(restarted.path / "lib", 1)
    done = run(env=os.environ | own | held)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    end = restarted.attempt(2).ended()
    assert (end["ended"], end["node"]) == ("node_failure", "n1")
    assert end["cause"] == "10 of 80 GiB of GPU 0 are in use, 30 s after the last ranks: something else runs there"


@pytest.mark.long
@pytest.mark.usefixtures("no_slurm")
def test_the_preflight_of_a_restart_probes_what_is_left(restarted: RunFolder, srun: list[str]) -> None:
    (restarted.attempts()[0].folder / "next.json").write_text(json.dumps({"go_on": True, "exclude": ["a"]}))
    own = {"HPC_GPT_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    own |= {"HPC_GPT_RUN": str(restarted.path), "HPC_GPT_ATTEMPT": "2", "MASTER_PORT": str(a_port())}
    nodes = [sys.executable, "-m", "hpc_gpt.trainer.preflight.nodes", str(restarted.path), "2", "a b c", "--", *srun]
    own |= {"HPC_GPT_PREFLIGHT_S": str(patient(180))}
    done = ran(*nodes, env=os.environ | own)
    (restarted.attempt(2).folder / "next.json").write_text('{"go_on": false}')  # so script_node ends
    assert re.fullmatch(r"nodes b,c \d+\n", done.stdout), done.stderr
    assert "bad node a: an earlier attempt failed on it" in done.stderr
    found = json.loads(restarted.attempt(2).preflight.read_text())
    assert [rank["node"] for rank in found["ranks"] if "device" in rank] == ["b", "c"]
