"""Following one run to its end."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any

from hpc_gpt.errors import JobFailed
from hpc_gpt.run_folder import RunFolder
from hpc_gpt.status import LIVE, NO_ANSWER, RunStatus, read_status

GOOD_ENDS = ("done", "stopped", "budget")
LOCAL_POLL_S = 0.5
SLURM_POLL_S = 5.0
UNKNOWN_S = 30.0


def wait_for(run: RunFolder) -> RunStatus:
    """Prints progress until the run has ended and gives its last status.

    Ctrl-C asks the run to save and stop (a waiting job is cancelled), a second one cancels it; KeyboardInterrupt then
    goes on. Raises JobFailed where the run ended in anything but a good end.
    """
    from hpc_gpt.terminal import progress_line

    seen: tuple[Any, ...] = ()
    unknown_since: float | None = None
    interrupts = 0
    line = progress_line()
    while True:
        try:
            status = read_status([run])[0]
            now = (status.state, status.step, status.loss)
            if now != seen:
                line.show(describe(status))
                seen = now
            if status.state in LIVE or status.cause == NO_ANSWER:
                unknown_since = None
            elif status.state != "unknown":
                break
            else:  # for a moment a job is unknown, while Slurm moves it between its lists
                unknown_since = unknown_since or time.monotonic()
                if time.monotonic() - unknown_since > UNKNOWN_S:
                    break
            time.sleep(LOCAL_POLL_S if status.scheduler == "local" else SLURM_POLL_S)
        except KeyboardInterrupt:
            interrupts += 1
            _interrupt(run, interrupts)
    line.end()
    if interrupts:
        raise KeyboardInterrupt
    end = f"run {run.run_id}: {describe(status)}"
    if status.state not in GOOD_ENDS:
        raise JobFailed(f"{end}" + (f"; {status.cause}" if status.cause else ""), f"hpc-gpt logs {run.run_id}")
    sys.stderr.write(f"{end}\nnext: hpc-gpt report {run.path}\n")
    return status


def describe(status: RunStatus) -> str:
    """`running  step 20/200  loss 3.214  5120 tokens/s`."""
    parts = [status.state]
    if status.step is not None:
        parts.append(f"step {status.step}/{status.steps}")
    if status.loss is not None:
        parts.append(f"loss {status.loss:.4f}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:.0f} tokens/s")
    if status.state == "pending" and status.cause:
        parts.append(f"({status.cause})")
    return "  ".join(parts)


def _interrupt(run: RunFolder, count: int) -> None:
    """First Ctrl-C: save and stop. Second: quit."""
    from hpc_gpt.cancel import cancel_run, interrupt_run

    begin = "\n" if sys.stderr.isatty() else ""  # behind the terminal's ^C
    if count == 1:
        sys.stderr.write(f"{begin}Ctrl-C: the run saves and stops; once more quits it\n")
        interrupt_run(run)
    elif count == 2:
        sys.stderr.write(f"{begin}Ctrl-C again: cancelled\n")
        signal.signal(signal.SIGINT, signal.default_int_handler)
        cancel_run(run)
