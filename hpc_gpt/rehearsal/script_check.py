"""What can be said of a script before it runs: by bash, by shellcheck, and by a real Slurm where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hpc_gpt.errors import JobRefused, SlurmUnreachable
from hpc_gpt.launch.slurm.scheduler import check_reachable, has_sbatch, submission_environment, test_only

_PATIENCE_S = 120


def check_script(script: str) -> tuple[bool, str]:
    """(whether it is sound, what `bash -n` and shellcheck, where it is installed, have to say)."""
    with tempfile.NamedTemporaryFile("w", suffix=".sh", encoding="utf-8") as file:
        file.write(script)
        file.flush()
        checks = [["bash", "-n", file.name]]
        if shutil.which("shellcheck"):
            checks.append(["shellcheck", "--severity=warning", file.name])
        for check in checks:
            done = subprocess.run(check, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
            if done.returncode:
                words = (done.stderr or done.stdout).replace(file.name, "job.sh").strip()
                return False, f"{check[0]}: {words}"
    names = "bash -n and shellcheck find" if len(checks) > 1 else "bash -n finds"
    return True, f"{names} nothing in its {script.count(chr(10))} lines"


def ask_slurm(script: str) -> tuple[bool | None, str]:
    """What `sbatch --test-only` says of the real script: (whether it is taken, its words); None where none answers."""
    if not has_sbatch():
        return None, "there is no sbatch here"
    try:
        check_reachable()
        return True, test_only(script, submission_environment(os.environ, {}))
    except SlurmUnreachable as fault:
        return None, str(fault).partition(";")[0]
    except JobRefused as fault:
        return False, str(fault)


def tail(path: Path, lines: int) -> list[str]:
    """The last lines of a file; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:]
    except OSError:
        return []
