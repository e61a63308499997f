"""A foreign program of one rank, watched for a hang: its steps are those that the log tells of. Needs no torch."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import write_once
from hpc_gpt.train.foreign_log import ForeignLog
from hpc_gpt.train.heartbeat import LEAVING, SAVING, Heartbeat
from hpc_gpt.train.watchdog import Watchdog

_LOOK_S = 1.0
_ABORT_S = 3.0


class ForeignWatch:
    """The watchdog of one rank whose steps are another process's, which writes its stacks when it is aborted."""

    def __init__(self, attempt: Attempt, resolved: Resolved, process: subprocess.Popen[bytes], log: ForeignLog) -> None:
        self._attempt = attempt
        self._train = resolved.train
        self._process = process
        self._log = log
        self._heart = Heartbeat(resolved.train.hang_multiple, resolved.train.hang_floor_s)
        self._looked = 0.0
        self._rank = 0
        self._hangs = False

    def start(self, rank: int, size: int, resumed: int) -> None:
        self._rank, self._heart.step = rank, resumed
        Watchdog(self._attempt, rank, size, self._heart, self._leave, stands=self._stands).start()

    def look(self) -> None:
        """Looks, at most once a second, how far the log of the rank that prints the iterations tells it is."""
        now = time.monotonic()
        if self._heart.phase == LEAVING or now < self._looked + _LOOK_S:
            return
        self._looked = now
        step, before = int(self._attempt.last_metrics().get("step") or 0), self._heart.step
        if step <= before:
            return
        self._heart.stepped(step, step - before)
        # Evaluations and saves are in no line, and lie before the next.
        until = step + self._train.log_every
        if any(every and until // every * every >= step for every in (self._train.eval_every, self._train.save_every)):
            self._heart.enter(SAVING)

    def leaving(self) -> None:
        """The program is asked to end, or has ended."""
        if self._heart.phase != LEAVING:
            self._heart.enter(LEAVING)
        if self._hangs:  # the watchdog's thread ends this process
            threading.Event().wait()

    def _stands(self) -> tuple[str, str]:
        """What the program is in, as far as that can be seen from outside."""
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = "?"
        if state in "tT":
            return "", "a process that is stopped"
        return "its program", f"process {self._process.pid}"

    def _leave(self, words: str) -> None:
        """From the watchdog's thread: the program writes its stacks, and both end."""
        self._hangs = True
        print(words, flush=True)
        self._process.send_signal(signal.SIGABRT)
        until = time.monotonic() + _ABORT_S
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        self._process.kill()
        self._log.finish()
        if stacks := self._log.stacks():
            with contextlib.suppress(RunFolderError):
                write_once(self._attempt.stacks / f"{self._rank}.txt", stacks)
        os._exit(1)
