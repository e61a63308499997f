"""What users and Slurm ask of a rank: by signals, and by requests in the attempt's folder. Needs no torch.

Signals only raise flags, which the loop reads at the end of a step; no collective runs here. Python runs a signal
handler only between two of its instructions, and a rank may be in one collective for minutes. So the C-level handler
passes each signal's number through a socket to a thread, which raises the flag at once. The second Ctrl-C ends the
process from that thread, even if the main thread is stuck.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.live import Request, answer, open_requests
from hpc_gpt.runs.run_folder import Attempt

INTERRUPTED_TWICE = 130
_SCONTROL_S = 15
_AGAIN_S = 0.5
_HOLD_S = 0.01
_LOOK_S = 1.0


class Signals:
    """The flags of one rank, raised and never lowered.

    `walltime`: SIGUSR2, which `sbatch --signal` sends before the time limit (SIGUSR1 is NCCL's).
    `terminated`: SIGTERM, a preemption or a cancel; `is_preemption` finds out which.
    `interrupted`: the first SIGINT. The second one ends the process at once with 130.
    """

    def __init__(self) -> None:
        # Called on the second Ctrl-C, before the process ends.
        self.on_quit: Callable[[], None] = lambda: None
        self.walltime = False
        self.terminated = False
        self.interrupted = False
        self._asked = threading.Lock()
        self._preemption: bool | None = None

    def install(self) -> None:
        """Handles the three signals from now on. Call it in the main thread, before anything slow is imported."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._sockets = ours, theirs
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            # set_wakeup_fd works only for signals with a Python handler.
            signal.signal(number, lambda _number, _frame: None)
        threading.Thread(target=self._listen, args=(ours,), name="signals", daemon=True).start()

    def _listen(self, wake: socket.socket) -> None:
        while numbers := wake.recv(64):
            for number in numbers:
                self.receive(number)

    def receive(self, number: int) -> None:
        """Raises the flag of one signal."""
        if number == signal.SIGUSR2:
            self.walltime = True
        elif number == signal.SIGTERM:
            if not self.terminated and os.environ.get("RANK", "0") == "0":
                # At once, because a cancelled job soon leaves Slurm's queue.
                threading.Thread(target=self.is_preemption, name="scontrol", daemon=True).start()
            self.terminated = True
        elif number == signal.SIGINT:
            if self.interrupted:
                try:
                    self.on_quit()
                finally:
                    os._exit(INTERRUPTED_TWICE)
            self.interrupted = True

    def hold(self, steps: int) -> None:
        """Waits for a signal after HPC_GPT_HOLD_AFTER `steps` of an attempt.

        Rehearsals set it: their small run would end before its signal comes.
        """
        while os.environ.get("HPC_GPT_HOLD_AFTER") == str(steps) and not (
            self.walltime or self.terminated or self.interrupted
        ):
            time.sleep(_HOLD_S)

    def is_preemption(self) -> bool:
        """Whether the SIGTERM is a preemption. Asks Slurm once, and keeps the answer."""
        with self._asked:
            if self._preemption is None:
                self._preemption = ask_preemption(os.environ.get("HPC_GPT_JOB") or os.environ.get("SLURM_JOB_ID"))
            return self._preemption


def ask_preemption(job_id: str | None) -> bool:
    """Whether Slurm is preempting this job: `scontrol show job` says that it runs and has a PreemptTime.

    A controller that does not answer is asked again, for 15 s in all. No answer counts as no preemption: a cancel that
    is taken for a preemption would restart a job that the user has ended; the opposite error costs one submission.
    """
    if not job_id:
        return False
    command = ["scontrol", "show", "job", job_id]
    end = time.monotonic() + _SCONTROL_S
    while (left_s := end - time.monotonic()) > 0:
        try:
            answer = subprocess.run(command, capture_output=True, text=True, timeout=left_s, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return False
        if answer.returncode == 0:
            return says_preemption(answer.stdout)
        time.sleep(_AGAIN_S)
    return False


def says_preemption(shown: str) -> bool:
    """Whether `shown`, the output of `scontrol show job`, is of a job that is being preempted.

    SIGNALING is the state of a running job whose SIGTERM has not reached all nodes yet.

    >>> says_preemption("JobState=RUNNING Reason=None PreemptTime=2026-11-20T10:00:00")
    True
    >>> says_preemption("JobState=SIGNALING Reason=None PreemptTime=2026-11-20T10:00:00")
    True
    >>> says_preemption("JobState=COMPLETING Reason=None PreemptTime=None")
    False
    """
    state = re.search(r"\bJobState=(\S+)", shown)
    since = re.search(r"\bPreemptTime=(\S+)", shown)
    if state is None or since is None:
        return False
    return state[1] in ("RUNNING", "SIGNALING") and since[1] not in ("None", "N/A", "Unknown", "(null)")


class Inbox:
    """The requests in an attempt's folder (`runs.live`), which rank 0 reads at the end of a step; none for None."""

    def __init__(self, attempt: Attempt | None) -> None:
        self._attempt = attempt
        self._seen: set[Request] = set()
        self._looked: float | None = None

    def look(self, at_once: bool = False) -> frozenset[str]:
        """The verbs asked for: a save once, a stop or a requeue at every call.

        Lists the folder at most once a second, unless `at_once`.
        """
        now = time.monotonic()
        new: set[Request] = set()
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
                    # It stays in `_seen`: as a new request it would cause save after save on the full disk.
                    print(f"the answer to {verb} was not written: {fault}", flush=True)
                else:
                    self._seen.discard(request)
