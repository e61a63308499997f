"""Daemons of a test cluster: started in a temporary folder, known by pid, ended without fail.

Every cluster lives in one folder `/tmp/hpc-gpt-slurm-…`, which names the process that owns it. Daemons get a
death signal from the kernel when their owner dies, so even `kill -9` of a test session leaves none. Job steps
detach themselves from slurmd; they are found by the SLURM_CONF in their environment, which lies in the folder.
"""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.process import die_with_parent, start_time
from tests.processes import all_pids, command_of, environment_of, name_of, send
from tests.waiting import LIMIT_S, wait_for

PREFIX = "hpc-gpt-slurm-"


class DaemonError(RuntimeError):
    """A daemon did not come up; the message holds the end of its log."""


def make_folder() -> Path:
    """A new folder for one cluster, short enough for the sockets in it (108 bytes), owned by this process."""
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir="/tmp"))
    new.chmod(0o755)  # munged refuses a socket that others cannot reach
    (new / "owner").write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
    return new.rename(new.with_name(new.name.removeprefix("new-")))


def sweep() -> list[Path]:
    """Ends and removes what killed sessions left behind; gives the folders that were removed."""
    removed = []
    for folder in Path("/tmp").glob(PREFIX + "*"):
        try:
            pid, started = (folder / "owner").read_text().split()
        except (OSError, ValueError):  # half removed
            pid, started = "0", ""
        if start_time(int(pid)) != started:
            end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
    return removed


def processes_of(folder: Path) -> list[int]:
    """Pids of the daemons, job steps and job processes that belong to the cluster in `folder`."""
    found = []
    for pid in all_pids():
        environment, name = environment_of(pid), name_of(pid)
        # A shell that someone pointed at the cluster has SLURM_CONF too, but is neither a daemon nor in a job.
        in_it = environment.get("SLURM_CONF", "").startswith(f"{folder}/")
        ours = in_it and (name.startswith(("slurm", "srun")) or "SLURM_JOB_ID" in environment)
        is_daemon = name.startswith(("munged", "mariadbd", "slurm")) and f"{folder}/" in " ".join(command_of(pid))
        if pid != os.getpid() and (ours or is_daemon):
            found.append(pid)
    return found


def end_processes_of(folder: Path) -> None:
    """SIGKILL to everything of the cluster in `folder`, until nothing is left."""
    end = time.monotonic() + LIMIT_S
    while (pids := processes_of(folder)) and time.monotonic() < end:
        for pid in pids:
            send(pid, signal.SIGKILL)
        time.sleep(0.05)


def start_daemon(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a daemon that stays in the foreground; Ctrl-C does not reach it, its owner's death does."""
    with log.open("ab") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=dict(environment),
            start_new_session=True,
            preexec_fn=die_with_parent,
        )


def stop_daemon(daemon: subprocess.Popen[bytes]) -> None:
    """SIGTERM, and SIGKILL when that does not help."""
    daemon.terminate()
    try:
        daemon.wait(LIMIT_S / 10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def wait_until(what: str, ready: Callable[[], object], log: Path, daemon: subprocess.Popen[bytes] | None) -> None:
    """Waits for what the daemon does; DaemonError with the end of its log when it has ended."""

    def said() -> str:
        return log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"

    def is_ready() -> object:
        if not (found := ready()) and daemon is not None and daemon.poll() is not None:
            raise DaemonError(f"{what}: ended\n{said()}")
        return found

    wait_for(what, is_ready, said)


def held_ports(count: int) -> list[socket.socket]:
    """Sockets that hold free ports until they are closed: only who shares a port (SO_REUSEADDR), as Slurm's daemons
    do, can have it besides; and as the ports stay bound, no other session or program gets one meanwhile."""
    held = [socket.socket() for _ in range(count)]
    for each in held:
        each.bind(("", 0))
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held
