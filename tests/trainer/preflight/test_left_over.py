"""What attempts leave on a node, and a restart in the job without it: processes, shared memory, a node, a port."""

import json
import os
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from hpc_gpt.core.ends.bad_nodes import listed
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.preflight.verdict import decode
from tests.conftest import REPOSITORY
from tests.trainer.preflight.test_nodes import COLD, new_run

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
        process() {{ HPC_GPT_RUN=$1 HPC_GPT_ATTEMPT=$2 SLURM_JOB_ID=$3 setsid sleep 300 >/dev/null 2>&1 </dev/null & }}
        {before}
        sleep 0.2
        HPC_GPT_ATTEMPT=2 SLURM_JOB_ID={JOB} {module}
        echo "$(jobs -r | wc -l) run"
        ls /dev/shm
        {after}
    """
    environment = os.environ | {"HPC_GPT_RUN": str(run.path), "SLURMD_NODENAME": "n1", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(
        [*NODE, textwrap.dedent(script)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    line, _, rest = done.stdout.partition("\n")
    return decode(line) or {}, rest


def test_processes_of_earlier_attempts_alone_are_ended(restarted: RunFolder) -> None:
    run = restarted.path
    said, rest = on_a_node(restarted, f"process {run} 1 {JOB}; process {run}/visits/a 1 {JOB}; process {run} 2 {JOB}")
    assert "figures" in said
    assert rest.split() == ["1", "run"]


def test_another_job_and_its_shared_memory_are_left_alone(restarted: RunFolder) -> None:
    run = restarted.path
    said, rest = on_a_node(restarted, f"process {run} 1 4712; process {run}-b 1 {JOB}; touch /dev/shm/nccl-a")
    assert said["figures"]["shared_memory"] == []
    assert rest.split() == ["2", "run", "nccl-a"]


def test_new_shared_memory_that_nobody_holds_is_removed(restarted: RunFolder) -> None:
    made = "touch -d '1 hour ago' /dev/shm/old; touch /dev/shm/{nccl-a,torch_7_1,held}; mkdir /dev/shm/data"
    said, rest = on_a_node(restarted, f"{made}; sleep 300 </dev/shm/held &")
    assert said["figures"]["shared_memory"] == ["nccl-a", "torch_7_1"]
    assert rest.split() == ["1", "run", "data", "held", "old"]


def restart(run: RunFolder, nodes: str, starter: list[str] | None = None, **environment: str) -> tuple[str, str]:
    """(the line for the script, the log) of the run's last attempt."""
    stand_in = [sys.executable, "-m", "hpc_gpt.trainer.preflight.probe", nodes, "1", *COLD]
    number = str(run.attempts()[-1].number)
    own = {"PYTHONPATH": str(REPOSITORY), "HPC_GPT_RUN": str(run.path), "HPC_GPT_ATTEMPT": number, "SLURM_JOB_ID": JOB}
    done = subprocess.run(
        [sys.executable, "-m", "hpc_gpt.trainer.preflight.nodes", str(run.path), number, nodes, "--"]
        + (starter or stand_in),
        env=os.environ | own | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def without_preflight(run: RunFolder) -> None:
    resolved = json.loads((run.path / "resolved.json").read_text())
    resolved["job"]["preflight"] = False
    (run.path / "resolved.json").write_text(json.dumps(resolved))


def test_a_restart_has_a_free_port_of_the_first_node(restarted: RunFolder) -> None:
    without_preflight(restarted)
    with socket.create_server(("", 12345)):
        said, log = restart(restarted, "a b c", MASTER_PORT="12345")
    words = said.split()
    assert words[:2] == ["nodes", "a,b"], log
    assert words[2] != "12345"
    assert restart(restarted, "a b c", MASTER_PORT="12346")[0] == "nodes a,b 12346"


def test_nodes_at_fault_and_dead_ones_give_their_place(tmp_path: Path) -> None:
    run = new_run(tmp_path, nodes=2, spares=2)
    without_preflight(run)
    started(run)
    judged(run, exclude=["a", "z"], nodes=["a", "c", "d"])
    started(run, in_job=1)
    assert restart(run, "a b c d", MASTER_PORT="12347")[0] == "nodes c,d 12347"
    judged(run, exclude=["a", "c"], nodes=["a", "c", "d"])
    started(run, in_job=2)
    said, _ = restart(run, "a b c d")
    fault = "an earlier attempt failed on it"
    assert said == f"end node_failure bad node a: {fault}; c: {fault}, and 1 spare"
    assert listed("site") == {}, "the attempt that failed on them has noted them"


def test_a_node_that_does_not_start_its_part_is_left_out(restarted: RunFolder, tmp_path: Path) -> None:
    """Slurm's message about one node ends the step on all; the others are asked again."""
    without_preflight(restarted)
    (srun := tmp_path / "srun").write_text(
        "#!/bin/bash\n"
        "nodes=${4#--nodelist=}\n"
        'message="srun: error: Task launch for StepId=1.0 failed on node b: gone"\n'
        '[[ ,$nodes, != *,b,* ]] || { echo "$message" >&2; exit 1; }\n'
        f'exec {sys.executable} -m hpc_gpt.trainer.preflight.probe "${{nodes//,/ }}" 1 "${{@:6}}"\n'
    )
    srun.chmod(0o755)
    said, log = restart(restarted, "a b c", [str(srun), "NODES", *COLD], MASTER_PORT="12348")
    assert said == "nodes a,c 12348", log
    assert "failed on node b: gone" in listed("site")["b"].why


def test_the_preflight_of_a_restart_probes_what_is_left(restarted: RunFolder, tmp_path: Path) -> None:
    (restarted.attempts()[0].folder / "next.json").write_text(json.dumps({"go_on": True, "exclude": ["a"]}))
    (srun := tmp_path / "srun").write_text(
        '#!/bin/bash\nnodes=${4#--nodelist=}; [[ $5 != --overlap ]] || set -- "${@:1:4}" "${@:6}"\n'
        f'exec {sys.executable} -m hpc_gpt.trainer.preflight.probe "${{nodes//,/ }}" 1 "${{@:5}}"\n'
    )
    srun.chmod(0o755)
    own = {"HPC_GPT_MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    said, log = restart(restarted, "a b c", [str(srun), "NODES", *COLD], MASTER_PORT="12349", **own)
    assert said == "nodes b,c 12349", log
    assert "bad node a: an earlier attempt failed on it" in log
    found = json.loads(restarted.attempts()[-1].preflight.read_text())
    assert [rank["node"] for rank in found["ranks"] if "device" in rank] == ["b", "c"]
