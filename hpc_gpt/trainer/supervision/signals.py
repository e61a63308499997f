"""Requests of users and Slurm to a rank: signals, and request files in the attempt's folder. Needs no torch.

Signals only raise flags, which the loop reads at the end of a step; no collective runs here. Python runs a signal
handler only between two of its instructions, and a rank may be in one collective for minutes. So the C-level handler
passes each signal's number through a socket to a thread, which raises the flag at once. The second Ctrl-C ends the
process from that thread, even if the main thread is stuck.
"""

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from hpc_gpt.core.ends.end_policy import SIGNALS
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.processes.requests import RunRequest, answer, open_requests
from hpc_gpt.core.runs.run_folder import Attempt

INTERRUPTED_TWICE = 130
_SCONTROL_S = 15
_AGAIN_S = 0.5
_LOOK_S = 1.0


class Signals:
    """The reasons of `end_policy.SIGNALS` that were `raised` on one rank; none is ever lowered.

    `terminated_at`: the epoch second of a SIGTERM; `end_policy.class_of_sigterm` finds out who sent it. The second
    SIGINT ends the process at once with 130.
    """

    def __init__(self) -> None:
        # Called on the second Ctrl-C, before the process ends.
        self.on_quit: Callable[[], None] = lambda: None
        self.raised: set[str] = set()
        self.terminated_at: float | None = None
        self._asked = threading.Lock()
        self._shown: str | None = None

    def install(self) -> None:
        """Begins to handle the signals. Call it in the main thread, before anything slow is imported."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._sockets = ours, theirs
        for number in SIGNALS:
            # set_wakeup_fd works only for signals with a Python handler.
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._listen, args=(ours,), name="signals", daemon=True).start()

    def _listen(self, wake: socket.socket) -> None:
        while numbers := wake.recv(64):
            for number in numbers:
                self.receive(number)

    def receive(self, number: int) -> None:
        """Raises the reason that belongs to a signal."""
        if number == signal.SIGTERM and self.terminated_at is None:
            self.terminated_at = time.time()
            if os.environ.get("RANK", "0") == "0":
                # At once, because a cancelled job soon leaves Slurm's queue.
                threading.Thread(target=self.job_at_sigterm, name="scontrol", daemon=True).start()
        if number == signal.SIGINT and "interrupted" in self.raised:
            try:
                self.on_quit()
            finally:
                os._exit(INTERRUPTED_TWICE)
        if reason := SIGNALS.get(signal.Signals(number)):
            self.raised.add(reason)

    def job_at_sigterm(self) -> str:
        """The job as Slurm showed it at the SIGTERM. Asks Slurm once, and caches the answer."""
        with self._asked:
            if self._shown is None:
                self._shown = show_job(os.environ.get("HPC_GPT_JOB") or os.environ.get("SLURM_JOB_ID"))
            return self._shown


def show_job(job_id: str | None) -> str:
    """The output of `scontrol show job`; empty without a job or an answer.

    If the controller does not answer, it is asked again, for 15 s in all.
    """
    if not job_id:
        return ""
    command = ["scontrol", "show", "job", job_id]
    end = time.monotonic() + _SCONTROL_S
    while (left_s := end - time.monotonic()) > 0:
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return ""
        if answer.returncode == 0:
            return answer.stdout
        time.sleep(_AGAIN_S)
    return ""


class Inbox:
    """The requests in an attempt's folder (`core.processes.requests`). Rank 0 reads them at the end of a step; without
    an attempt there are none."""

    def __init__(self, attempt: Attempt | None) -> None:
        self._attempt = attempt
        self._seen: set[RunRequest] = set()
        self._looked: float | None = None

    def look(self, at_once: bool = False) -> frozenset[str]:
        """The requested verbs: a save once, a stop or a requeue at every call.

        Lists the folder at most once a second, unless `at_once`.
        """
        now = time.monotonic()
        new: set[RunRequest] = set()
        if self._attempt is not None and (at_once or self._looked is None or now >= self._looked + _LOOK_S):
            self._looked = now
            new = set(open_requests(self._attempt)) - self._seen
            self._seen |= new
        return frozenset(request.verb for request in self._seen if request.verb != "save" or request in new)

    def answer(self, verb: str, step: int, done: bool, text: str = "") -> None:
        """Answers all requests of that verb. An answer that cannot be written does not stop the training."""
        for request in sorted(self._seen):
            if request.verb == verb and self._attempt is not None:
                try:
                    answer(self._attempt, request, step, done, text)
                except RunFolderError as fault:
                    # The request stays in `_seen`. As a new one it would cause save after save on the full disk.
                    print(f"the answer to {verb} was not written: {fault}", flush=True)
                else:
                    self._seen.discard(request)
