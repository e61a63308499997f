"""What is asked of a rank from outside: walltime ahead, the end of the job, Ctrl-C. Flags only, read at a step's edge.

Python runs a signal handler between two lines of Python, and a rank may stand in one collective for minutes. So the
C-level handler passes each signal's number through a socket to a thread, which raises the flag at once; the second
Ctrl-C leaves from that thread even when the main thread is stuck. No collective runs here.
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

INTERRUPTED_TWICE = 130
_SCONTROL_S = 15
_AGAIN_S = 0.5
_HOLD_S = 0.01


class Signals:
    """The flags of one rank, raised and never lowered.

    `walltime`: SIGUSR2, which `sbatch --signal` sends ahead of the time limit (SIGUSR1 is NCCL's).
    `terminated`: SIGTERM, a preemption or a cancel; `is_preemption` tells which.
    `interrupted`: SIGINT once. The second one ends the process with 130 there and then.
    """

    def __init__(self) -> None:
        # What is still to be done before the second Ctrl-C ends the process.
        self.on_quit: Callable[[], None] = lambda: None
        self.walltime = False
        self.terminated = False
        self.interrupted = False
        self._asked = threading.Lock()
        self._preemption: bool | None = None

    def install(self) -> None:
        """Takes the three signals over; from the main thread, and before anything slow is imported."""
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._sockets = ours, theirs
        for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            # The wake-up needs a handler of Python's; the thread does the work.
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
                # Asked at once: a cancelled job soon leaves the queue, and then nobody knows of it.
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
        """In a rehearsal, whose small run would be over before its signal comes: waits for one after the first
        HPC_GPT_HOLD_AFTER `steps` of an attempt."""
        while os.environ.get("HPC_GPT_HOLD_AFTER") == str(steps) and not (
            self.walltime or self.terminated or self.interrupted
        ):
            time.sleep(_HOLD_S)

    def is_preemption(self) -> bool:
        """Whether the SIGTERM is a preemption: asks Slurm the first time, and remembers the answer."""
        with self._asked:
            if self._preemption is None:
                self._preemption = ask_preemption(os.environ.get("HPC_GPT_JOB") or os.environ.get("SLURM_JOB_ID"))
            return self._preemption


def ask_preemption(job_id: str | None) -> bool:
    """Whether Slurm is preempting this job: `scontrol show job` says that it runs and has a PreemptTime.

    A controller that does not answer is asked again, for 15 s in all. Without an answer it is none: a cancel taken
    for a preemption would bring the job back from the dead, while the reverse costs one submission.
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
    """Whether the text of `scontrol show job` is that of a job being preempted.

    SIGNALING is a running job whose SIGTERM is still being handed out, as to a node that is slow to answer.

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
