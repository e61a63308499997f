"""Daemons of a test cluster: started in a temporary folder, known by pid, ended without fail.

Every cluster lives in one folder `/tmp/hpc-gpt-slurm-…`, which names the process that owns it. Daemons get a
death signal from the kernel when their owner dies, so even `kill -9` of a test session leaves none. Job steps
detach themselves from slurmd; they are found by the SLURM_CONF in their environment, which lies in the folder.
"""

import contextlib
import fcntl
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from hpc_gpt.core.process import die_with_parent, start_time
from tests.processes import all_pids, command_of, environment_of, name_of, send

PREFIX = "hpc-gpt-slurm-"


class DaemonError(RuntimeError):
    """A daemon did not come up; the message holds the end of its log."""


def make_folder() -> Path:
    """A new folder for one cluster, short enough for the sockets in it (108 bytes), owned by this process."""
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))
    folder.chmod(0o755)  # munged refuses a socket that others cannot reach
    (folder / "owner").write_text(f"{os.getpid()} {start_time(os.getpid())}\n")
    return folder


def sweep() -> list[Path]:
    """Ends and removes what killed sessions left behind; gives the folders that were removed."""
    removed = []
    for folder in Path("/tmp").glob(PREFIX + "*"):
        try:
            pid, started = (folder / "owner").read_text().split()
        except (OSError, ValueError):
            # A folder without a readable owner is either being made right now or half removed.
            if time.time() - folder.stat().st_mtime < 60:
                continue
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


def end_processes_of(folder: Path, timeout_s: float = 60.0) -> None:
    """SIGKILL to everything of the cluster in `folder`, until nothing is left."""
    end = time.monotonic() + timeout_s
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


def stop_daemon(daemon: subprocess.Popen[bytes], timeout_s: float = 30.0) -> None:
    """SIGTERM, and SIGKILL when that does not help."""
    if daemon.poll() is None:
        daemon.terminate()
        try:
            daemon.wait(timeout_s)
        except subprocess.TimeoutExpired:
            daemon.kill()
    daemon.wait()


def wait_until(
    what: str,
    ready: Callable[[], object],
    log: Path,
    daemon: subprocess.Popen[bytes] | None = None,
    limit_s: float = 240,
) -> None:
    """Polls `ready`; DaemonError with the end of `log` when the daemon ended or the limit passed."""
    end = time.monotonic() + limit_s
    while not ready():
        ended = daemon is not None and daemon.poll() is not None
        if ended or time.monotonic() > end:
            tail = log.read_text(errors="replace")[-3000:] if log.exists() else "(no log)"
            raise DaemonError(f"{what}: {'ended' if ended else f'not within {limit_s:.0f} s'}\n{tail}")
        time.sleep(0.05)


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[range]:
    """`count` consecutive free ports below the ephemeral range; no other session chooses while the block runs."""
    with Path("/tmp/hpc-gpt-slurm.ports").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for _ in range(200):
            first = random.randrange(11000, 31000 - count)
            ports = range(first, first + count)
            if all(_is_free(port) for port in ports):
                yield ports
                return
        raise DaemonError(f"no {count} consecutive free ports between 11000 and 31000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
