"""What a process of another program is doing, for a report of a hang."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from hpc_gpt.secrets import hide_secrets

_STACK_S = 20.0


def stack_of(pid: int) -> str:
    """What a process does: its Python stacks if py-spy is installed, else what /proc shows of it."""
    head = f"process {pid}: {_proc(pid, 'cmdline').replace(chr(0), ' ').strip()[:200]}"
    if (spy := shutil.which("py-spy")) is not None:
        try:
            done = subprocess.run(
                [spy, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=_STACK_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            done = None
        if done is not None and done.returncode == 0:
            return hide_secrets(f"{head}\n{done.stdout}")
    threads = [f"  {task.name}: {_of_thread(pid, task.name)}" for task in _threads(pid)]
    return hide_secrets("\n".join([head, *threads])) + "\n"


def _of_thread(pid: int, thread: str) -> str:
    name, state = _proc(pid, f"task/{thread}/comm"), _proc(pid, f"task/{thread}/stat").rpartition(")")[2].split()[:1]
    waits = _proc(pid, f"task/{thread}/wchan")
    kernel = " < ".join(
        line.split()[-1] for line in _proc(pid, f"task/{thread}/stack").splitlines()[:6] if line.split()
    )
    return f"{name}, state {''.join(state) or '?'}, in {kernel or waits or '?'}"


def _threads(pid: int) -> list[Path]:
    try:
        return sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name))[:64]
    except OSError:
        return []


def _proc(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
