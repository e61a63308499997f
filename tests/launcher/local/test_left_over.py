"""Processes that outlive what supervised them: a run's program if its controller is killed, workers if their agent is.

A stand-in for nvidia-smi makes up one GPU. All processes are real, and are killed.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpc_gpt.core.files import read_json
from hpc_gpt.core.process import is_alive, start_time
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import in_process
from tests.command.mine import experiment
from tests.launcher.local.conftest import SMALL, ended, nothing_left, status_of, submit
from tests.programs import put
from tests.waiting import wait_for

__all__ = ["nothing_left"]

# Nobody reads what it prints any more, which would end it (SIGPIPE): bash's line on a sleep that SIGTERM ended, too.
TRAINS = """\
exec >/dev/null 2>&1
trap 'echo saved >"$0.saved"; exit 0' TERM
{closes}
echo $$ >"$0.new" && mv "$0.new" "$0.pid"
while :; do sleep 0.1; done
"""
ONE = ("--gpus", "1", "--cluster", "local")


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    put(tmp_path / "bin" / "nvidia-smi", "#!/bin/sh\necho 'Some GPU, 24576, 550.1'\n")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def program(tmp_path: Path, rank_template, kind: str, closes: str) -> list[object]:
    """The words after `submit` for a run of that kind that starts the program."""
    put(tmp_path / "work" / "train", TRAINS.format(closes=closes))
    line = f"bash {tmp_path / 'work' / 'train'}"
    if kind == "script":
        put(tmp_path / "train.sh", f"#!/bin/bash\n#SBATCH --gpus=1\n{line} & wait\n")
        return ["--cluster", "local", tmp_path / "train.sh"]
    if kind == "ranks":
        words = list(SMALL)
        words[words.index("--gpus") + 1] = words[words.index("--tp") + 1] = "1"
        return [*words, "--template", rank_template(f"{line} & wait")]
    return [experiment(tmp_path, "mine", {"run": f"{line} & wait", "per": "job"}), *ONE]


def pid_of(tmp_path: Path) -> int:
    noted = tmp_path / "work" / "train.pid"
    wait_for("the program notes its pid", noted.exists)
    return int(noted.read_text())


def controller(run: RunFolder) -> int:
    return int(run.submissions()[-1]["pid"])


CLOSES = 'for fd in /proc/$$/fd/*; do fd=${fd##*/}; [ "$fd" -lt 100 ] || eval "exec $fd>&-"; done'


@pytest.mark.parametrize(
    ("kind", "closes"),
    [
        pytest.param("command", CLOSES, marks=pytest.mark.long),
        pytest.param("script", "", marks=pytest.mark.long),
        pytest.param("ranks", "", marks=pytest.mark.long(always=True)),
    ],
)
def test_what_a_killed_controller_leaves_keeps_its_gpu(gpu, tmp_path, rank_template, kind: str, closes: str) -> None:
    """As torchrun's workers the first closes what it inherits, the GPU's lock with it."""
    run = submit(*program(tmp_path, rank_template, kind, closes))
    pid = pid_of(tmp_path)
    began = start_time(pid)
    os.kill(controller(run), signal.SIGKILL)
    wait_for("the controller has left", lambda: start_time(controller(run)) is None)
    wait_for("a process that runs on", lambda: status_of(run).run_on is not None)
    status = status_of(run)
    assert status.state == "running"
    assert pid in status.run_on
    assert f"{pid}" in status.cause
    assert f"without a supervisor, which was killed; hpc-gpt cancel {run.run_id}" in status.cause
    shown = " ".join(in_process("status", run.run_id).stdout.split())
    assert "without a supervisor, which was killed" in shown
    # It has its GPU.
    other = submit(*SMALL[:3], *ONE, "--tp", "1", "--pp", "1", "--set", "data.source=random")
    wait_for("who has the GPU", lambda: f"taken: 0 by run {run.run_id}" in (status_of(other).cause or ""))
    in_process("cancel", other.run_id)
    # Nothing starts it beside them, or removes what they need.
    for words in ((), ("--from-start",))[: 1 if kind == "script" else 2]:
        done = in_process("submit", "--resume", run.run_id, *words)
        assert done.code == 1, done
        assert str(pid) in done.stderr
    by_hand = subprocess.run(
        ["bash", run.job_script],
        env={**os.environ, "HPC_GPT_RUN": str(run.path), "HPC_GPT_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (by_hand.returncode, str(pid) in by_hand.stderr) == (1, True), by_hand
    assert "it has no supervisor that could stop it" in in_process("stop", run.run_id).stderr
    assert len(run.attempts()) == 1
    assert is_alive(pid, began)
    done = in_process("cancel", run.run_id)
    assert (done.code, done.stdout) == (0, f"cancelled {run.run_id}, job {controller(run)}\n")
    assert not is_alive(pid, began)
    assert (tmp_path / "work" / "train.saved").exists(), "it had time to save"
    assert status_of(run).state == "cancelled"


# Workers have sessions of their own, as torchrun's, and write their checkpoints after it is gone.
AGENT = "trap '' HUP; setsid bash {train} & wait"
KILLS_ALL = "trap 'trap \"\" TERM; kill 0' EXIT; bash {train} & until [ -e {train}.pid ]; do sleep 0.1; done; exit 7"


@pytest.mark.parametrize(
    "kind", ["agent", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("supervisor", "kill 0"))]
)
def test_nothing_of_a_program_outlives_its_attempt(tmp_path: Path, kind: str) -> None:
    """Its agent, or the rank that supervises it, is killed; or the program signals its process group, which is not
    its supervisor's."""
    put(tmp_path / "work" / "train", TRAINS.format(closes=""))
    line = (KILLS_ALL if kind == "kill 0" else AGENT).format(train=tmp_path / "work" / "train")
    run = submit(experiment(tmp_path, "agent", {"run": line, "per": "job"}), *ONE)
    pid = pid_of(tmp_path)
    began = start_time(pid)
    if kind == "agent":
        os.kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    elif kind == "supervisor":
        os.kill(int(read_json(run.attempt(1).ranks / "0.json")["pid"]), signal.SIGKILL)
    status = ended(run)
    assert not is_alive(pid, began), "it has ended before the attempt has"
    expected = {"kill 0": "exit code 7", "agent": "SIGKILL", "supervisor": "SIGKILL"}[kind]
    assert (status.state, expected in status.cause) == ("error", True), status


# --- processes that overwrite their environment, as setproctitle does

TITLED = """\
import ctypes, os, signal, subprocess, sys, time

def overwrite():
    begin, end = map(int, open("/proc/self/stat").read().rpartition(")")[2].split()[47:49])
    ctypes.memset(begin, 0, end - begin)

if sys.argv[1:] == ["work"]:
    overwrite()
    os.closerange(3, 1000)
    open(f"worker-{os.getpid()}", "w").close()
    time.sleep(3000)
"""
TRAINS_TITLED = f"""{TITLED}
overwrite()
open("train.pid", "w").write(str(os.getpid()))
print("step 1 loss 2.0", flush=True)
time.sleep(3000)
"""
LEAVES_ONE = f"""{TITLED}
for pid in [name[7:] for name in os.listdir() if name.startswith("worker-")]:
    state = "gone"
    if os.path.exists(f"/proc/{{pid}}"):
        state = open(f"/proc/{{pid}}/stat").read().rpartition(")")[2].split()[0]
    open("beside", "a").write("" if state in "gone Z" else f"{{pid}} {{state}} ")
worker = subprocess.Popen([sys.executable, __file__, "work"], start_new_session=True)
while not os.path.exists(f"worker-{{worker.pid}}"):
    time.sleep(0.05)
for step in range(1, 4):
    print(f"step {{step}} loss 2.0", flush=True)
open("done", "w").close()
os.kill(os.getpid(), signal.SIGKILL)
"""


def python_program(tmp_path: Path, text: str, *words: object) -> RunFolder:
    put(tmp_path / "work" / "p.py", text)
    run = f"exec {sys.executable} {tmp_path / 'work' / 'p.py'}"
    return submit(experiment(tmp_path, "titled", {"run": run, "per": "job", "snapshot": False}), *ONE, *words)


def test_a_program_that_sets_its_title_is_known_by_its_record(tmp_path: Path) -> None:
    run = python_program(tmp_path, TRAINS_TITLED)
    noted = tmp_path / "work" / "train.pid"
    wait_for("the program notes its pid", lambda: noted.exists() and noted.read_text())
    pid = int(noted.read_text())
    began = start_time(pid)
    wait_for("its record", lambda: str(pid) in read_json(run.attempt(1).processes).get("processes", {}))
    os.kill(controller(run), signal.SIGKILL)
    wait_for("the controller has left", lambda: start_time(controller(run)) is None)
    assert b"HPC_GPT" not in Path(f"/proc/{pid}/environ").read_bytes()
    wait_for("the rank has left", lambda: status_of(run).run_on == [pid])
    assert status_of(run).state == "running"
    assert f"process {pid} runs on" in in_process("why", run.run_id).stdout
    done = in_process("submit", "--resume", run.run_id)
    assert (done.code, f"process {pid} runs on" in done.stderr) == (1, True), done
    in_process("cancel", run.run_id, code=0)
    assert not is_alive(pid, began)


def test_a_worker_of_its_own_session_ends_with_the_attempt(gpu, tmp_path: Path) -> None:
    """The next attempt begins beside nothing, and the next run has its GPU when nothing is left on it."""
    soon = ("--set", "job.restart_in_job=true", "--set", "job.retry_pause_s=1")
    run = python_program(tmp_path, LEAVES_ONE, *soon)
    ended(run)
    assert len(run.attempts()) > 1, "it was started again"
    workers = [int(path.name[7:]) for path in (tmp_path / "work").glob("worker-*")]
    assert len(workers) == len(run.attempts())
    assert (tmp_path / "work" / "beside").read_text() == ""
    assert not [pid for pid in workers if start_time(pid)]
    assert not list(run.path.glob("attempts/*/processes.json"))
