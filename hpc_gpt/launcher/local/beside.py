"""Processes beside the ranks of a run on this machine. They end with the run, or with its supervisor."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

from hpc_gpt.core.ends.exit_status import exit_code_text
from hpc_gpt.core.process import die_with_parent
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.resolved import Resolved

# Once the ranks have ended, the processes beside them get so many seconds: usually, and if the run was cancelled.
LIMIT_S, CANCELLED_S = 30.0, 5.0
_POLL_S = 0.05


class BesideRanks:
    """A process beside the ranks, in a process group of its own; `word` begins its lines in the log."""

    def __init__(self, word: str, module: str, run: RunFolder, attempt: Attempt) -> None:
        self._word, self._attempt = word, attempt
        line = [sys.executable, "-m", module, str(run.path), str(attempt.number)]
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
        """Returns whether the process has ended. If it failed, a line in the log says so, once."""
        code = self._process.poll()
        if code and not self._over:
            self._say(f"its process ended with {exit_code_text(code)}; the run goes on without it")
        self._over = self._over or code is not None
        return self._over

    def end(self, until: float, limit_s: float) -> None:
        """Waits for the process until the time `until`, `limit_s` after the ranks, and then kills it."""
        while not self.look() and time.monotonic() < until:
            time.sleep(_POLL_S)
        if not self._over:
            self._over = True
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._say(f"its process has not ended {limit_s:g} s after the ranks, so it is killed")

    def _say(self, text: str) -> None:
        with suppress(OSError), self._attempt.log.open("a", encoding="utf-8") as log:
            log.write(f"{self._word}: {text}\n")


def start_beside(run: RunFolder, attempt: Attempt, resolved: Resolved) -> list[BesideRanks]:
    """Starts the follower of `[after]`, if the run has the table."""
    return [BesideRanks("after", "hpc_gpt.launcher.after", run, attempt)] if resolved.after.is_asked else []


def end_beside(processes: Sequence[BesideRanks], attempt: Attempt, limit_s: float) -> None:
    """Tells the processes that the ranks have ended, waits `limit_s` seconds for them, and kills those that still
    run."""
    if not processes:
        return
    until = time.monotonic() + limit_s
    with suppress(OSError):
        attempt.ranks_ended.touch()
    for process in processes:
        process.end(until, limit_s)
    with suppress(OSError):
        attempt.ranks_ended.unlink(missing_ok=True)
