"""What the scheduler and the user do to a job."""

import os
import signal
import subprocess
import time
from pathlib import Path

from bench.torture.faults.kind import kind
from bench.torture.scene import Missed, Scene
from tests.processes import send
from tests.slurm.launcher import PYTHON, SILENT_SQUEUE, SLOW_SBATCH, any_has_pending, client_in
from tests.waiting import wait_for


@kind()
def preempt(scene: Scene) -> None:
    """A job of higher priority wants exactly these nodes."""
    scene.wait_moment()
    nodes = scene.job.nodes()
    scene.remember()
    scene.slurm(
        "sbatch", "-p", "high", "-w", ",".join(nodes), f"-N{len(nodes)}", "--gres=gpu:4", "-o", "/dev/null",
        "--wrap", "sleep 1",
    )  # fmt: skip


@kind()
def scancel_signal_usr2(scene: Scene) -> None:
    _signal_step(scene, "USR2")


@kind(by_hand=("cancelled",))
def scancel_signal_term(scene: Scene) -> None:
    """A SIGTERM that is no preemption: the user wants the run to save and end."""
    _signal_step(scene, "TERM")


def _signal_step(scene: Scene, name: str) -> None:
    scene.wait_moment()
    target = scene.chance.choice((scene.job.id, f"{scene.job.id}.0"))
    scene.remember()
    scene.slurm("scancel", f"--signal={name}", target)
    scene.detail = target


@kind(earliest=1)
def walltime(scene: Scene) -> None:
    """The time limit comes: with the signal ahead of it, or too near for that."""
    scene.wait_moment()
    warned = scene.chance.random() < 0.7
    scene.detail = "announced" if warned else "at once"
    scene.remember()
    # Slurm looks at time limits twice a minute, and sends the signal when its lead and half a minute are left.
    left_s = 45 if warned else 0
    end = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(time.time() + left_s))
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", f"EndTime={end}")
    # A run of seconds must not be done by then.
    pids = scene.freeze()
    scene.wait_at_most(lambda: not (_is_first_attempt(scene) and _any_has_none(pids, signal.SIGUSR2, signal.SIGTERM)))
    for pid in pids:
        send(pid, signal.SIGCONT)
    scene.wait_at_most(lambda: not _is_first_attempt(scene))
    # The next attempt has its time again.
    scene.slurm("scontrol", "update", f"jobid={scene.job.id}", "TimeLimit=60", check=False)


def _is_first_attempt(scene: Scene) -> bool:
    return not scene.run.attempt(1).ended() and len(scene.run.attempts()) == 1


def _any_has_none(pids: list[int], *numbers: signal.Signals) -> bool:
    """Whether a process is there, stopped as it is, for which none of the signals waits."""
    return any(
        Path(f"/proc/{pid}").exists() and not any(any_has_pending([pid], number) for number in numbers) for pid in pids
    )


@kind()
def two_requeues_at_once(scene: Scene) -> None:
    """Two people, or a person and a script, have the same idea."""
    scene.wait_moment()
    how = scene.chance.choice(("scontrol requeue", "hpc-gpt requeue", "submit --resume", "submit --resume of a dead"))
    scene.detail = how
    scene.remember()
    if how == "scontrol requeue":
        command = ("scontrol", "requeue", scene.job.id)
        both = [scene.start(*command) for _ in range(2)]
    elif how == "hpc-gpt requeue":
        both = [scene.start_hpc_gpt("requeue", str(scene.run.path)) for _ in range(2)]
    else:
        if how.endswith("dead"):
            scene.signal_ranks(signal.SIGKILL)
        both = [scene.start_hpc_gpt("submit", "--resume", str(scene.run.path)) for _ in range(2)]
    scene.said = [
        f"exit {done.returncode}: {(done.stdout + done.stderr).strip()}" for done in (each() for each in both)
    ]


@kind(earliest=1)
def squeue_silent_at_a_resumption(scene: Scene) -> None:
    """The user resumes the run while it trains, or has just died, and squeue times out."""
    scene.wait_moment()
    dies = scene.chance.random() < 0.5
    scene.detail = "as its ranks die" if dies else "while it trains"
    scene.remember()
    silent = client_in(scene.launcher.folder / "silent", "squeue", SILENT_SQUEUE)
    if dies:
        scene.signal_ranks(signal.SIGKILL)
    done = scene.start_hpc_gpt("submit", "--resume", str(scene.run.path), **silent, HPC_GPT_SLURM_S="1")()
    assert done.returncode == 4, f"resumed without an answer: exit {done.returncode}: {done.stdout}{done.stderr}"


@kind(earliest=1)
def sighup_at_sbatch(scene: Scene) -> None:
    """The user has stopped the run and resumes it; the connection is lost, or the command killed, as sbatch answers."""
    scene.wait_moment()
    number = scene.chance.choice((signal.SIGHUP, signal.SIGTERM, signal.SIGKILL))
    scene.detail = number.name
    pids = scene.freeze()  # a run of seconds must not be done by then
    scene.remember()
    scene.hpc_gpt("stop", str(scene.run.path))
    for pid in pids:
        send(pid, signal.SIGCONT)
    wait_for("the run's end", lambda: scene.state()[0] not in ("running", "pending", "unknown"))
    if (state := scene.state()[0]) != "stopped":
        raise Missed(f"{state} before the stop")
    folder = scene.launcher.folder / "slow"
    environment = {**scene.launcher.environment, **client_in(folder, "sbatch", SLOW_SBATCH)}
    with subprocess.Popen(
        [*PYTHON, "submit", "--resume", str(scene.run.path)],
        env=environment,
        cwd=scene.launcher.folder,
        process_group=0,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as submitting:
        wait_for("the job in the queue", (folder / "accepted").exists)
        os.killpg(submitting.pid, number)
        if number == signal.SIGKILL:
            submitting.wait()
        (folder / "answers").touch()
    again = scene.hpc_gpt("submit", "--resume", str(scene.run.path))
    assert again.returncode == 1, f"a second job: exit {again.returncode}: {again.stdout}{again.stderr}"
