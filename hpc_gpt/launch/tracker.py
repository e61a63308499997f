"""What `[track]` needs: its packages at the submission, and on this machine its process beside the ranks."""

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress

from hpc_gpt.errors import ConfigError
from hpc_gpt.process import die_with_parent
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.requirements import check_package
from hpc_gpt.settings.resolved import Resolved

# After the ranks: for all that is to be sent, and if the run was cancelled.
LIMIT_S, CANCELLED_S = 30.0, 5.0
_POLL_S = 0.05
_FIND = "import sys, importlib.util as u; sys.exit(3 * (u.find_spec(sys.argv[1]) is None))"
_ASK_S = 30


def tracked_packages(resolved: Resolved) -> list[str]:
    """The packages that a run's `[track]` needs; each is an extra of ours, too."""
    track = resolved.track
    return [*(["tensorboard"] if track.tensorboard else []), *(["wandb"] if track.wandb is not None else [])]


def check_tracker(resolved: Resolved) -> None:
    """ConfigError if the job's Python lacks a package of `[track]`, as far as this machine can know: not of a
    container, and not of a Python that modules bring."""
    for package in tracked_packages(resolved):
        user = "track.tensorboard" if package == "tensorboard" else "track.wandb"
        python = _other_python(resolved)
        if python is None:
            check_package(package, package, user)
        elif python and _lacks(python, package):
            where = f"{user} needs {package}, which {python} lacks"
            raise ConfigError(where, f"{python} -m pip install {package}")


def _other_python(resolved: Resolved) -> str | None:
    """The job's Python if it is not this one; empty if it cannot be asked from here."""
    profile = resolved.cluster
    if profile.scheduler == "local":
        return None
    if profile.container is not None or profile.archive is not None:
        return ""
    named = os.environ.get("HPC_GPT_PYTHON") or profile.python
    if named is None and profile.venv is None:
        return None
    if profile.venv is None and profile.modules:
        return ""
    own = None if profile.venv is None else os.pathsep.join((f"{profile.venv}/bin", os.environ.get("PATH", "")))
    return shutil.which(named or "python", path=own) or ""


def _lacks(python: str, package: str) -> bool:
    try:
        done = subprocess.run([python, "-c", _FIND, package], capture_output=True, timeout=_ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 3


class RunTracker:
    """The tracker of one attempt on this machine, in a process group of its own."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        self._attempt = attempt
        line = [sys.executable, "-m", "hpc_gpt.report.track", str(run.path), str(attempt.number)]
        with attempt.log.open("ab") as log:
            self._process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
            )
        self._over = False

    def look(self) -> bool:
        """Whether it has ended. If it died, that is a line of the log, once."""
        code = self._process.poll()
        if code and not self._over:
            end = f"signal {-code}" if code < 0 else f"exit code {code}"
            self._say(f"its process ended with {end}; the run goes on without it")
        self._over = self._over or code is not None
        return self._over

    def end(self, limit_s: float) -> None:
        """Lets it send the rest, and kills it if it has not ended in so many seconds."""
        with suppress(OSError):
            self._attempt.ranks_ended.touch()
        end = time.monotonic() + limit_s
        while not self.look() and time.monotonic() < end:
            time.sleep(_POLL_S)
        if not self._over:
            self._over = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._say(f"its process has not ended {limit_s:g} s after the ranks, so it is killed")
        with suppress(OSError):
            self._attempt.ranks_ended.unlink(missing_ok=True)

    def _say(self, words: str) -> None:
        with suppress(OSError), self._attempt.log.open("a", encoding="utf-8") as log:
            log.write(f"track: {words}\n")
