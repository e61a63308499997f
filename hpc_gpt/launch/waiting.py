"""Following a run, or the runs of a sweep, to the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from shlex import quote

from hpc_gpt.errors import JobFailed
from hpc_gpt.launch.status import RunStatus, read_status
from hpc_gpt.launch.sweep_status import count_states
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.terminal import ProgressLine

GOOD_ENDS = ("done", "stopped", "budget")
LOCAL_POLL_S = 0.5
SLURM_POLL_S = 5.0
UNKNOWN_S = 30.0


def wait_for(run: RunFolder, interrupts: int = 0) -> RunStatus:
    """Prints progress until the run has ended and gives its last status. `interrupts`: Ctrl-Cs that came before.

    Ctrl-C asks the run to save and stop (a waiting job is cancelled), a second one cancels it, a third ends the wait at
    once; KeyboardInterrupt then goes on. Raises JobFailed where the run ended in anything but a good end.
    """
    (status,) = follow([run], lambda statuses: describe(statuses[0]), interrupts)
    end = f"run {run.run_id}: {describe(status)}"
    if status.state not in GOOD_ENDS:
        raise JobFailed(f"{end}" + (f"; {status.cause}" if status.cause else ""), f"hpc-gpt logs {run.run_id}")
    sys.stderr.write(f"{end}\nnext: hpc-gpt report {quote(str(run.path))}\n")
    return status


def wait_for_all(runs: Sequence[RunFolder], interrupts: int = 0) -> list[RunStatus]:
    """As wait_for, for the runs of a sweep: prints how many stand where, and a Ctrl-C is for all of them.

    Raises JobFailed where any ended in anything but a good end.
    """
    statuses = follow(runs, count_states, interrupts)
    bad = [status for status in statuses if status.state not in GOOD_ENDS]
    if bad:
        ends = [f"run {each.run}: {each.row or each.name} {describe(each)}" for each in bad]
        raise JobFailed("\n".join(ends), f"hpc-gpt logs {bad[0].run}")
    return statuses


def follow(runs: Sequence[RunFolder], words: Callable[[Sequence[RunStatus]], str], interrupts: int) -> list[RunStatus]:
    """Shows `words` of the runs whenever they change until every run has ended, and gives their last statuses."""
    seen = ""
    unknown_since: float | None = None
    answered = 0
    statuses: list[RunStatus] = []
    line = ProgressLine()
    while True:
        try:
            if answered < interrupts:
                _interrupt(runs, interrupts, statuses)
                answered = interrupts
            statuses = read_status(runs)
            now = words(statuses)
            if now != seen:
                line.show(now)
                seen = now
            if not all(status.is_over for status in statuses):
                unknown_since = None
            elif all(status.state != "unknown" for status in statuses):
                break
            else:  # for a moment a job is unknown, while Slurm moves it between its lists
                unknown_since = unknown_since or time.monotonic()
                if time.monotonic() - unknown_since > UNKNOWN_S:
                    break
            time.sleep(LOCAL_POLL_S if statuses[0].scheduler == "local" else SLURM_POLL_S)
        except KeyboardInterrupt:  # also in the middle of answering the one before
            interrupts += 1
            if interrupts > 2:
                line.end()
                raise
    line.end()
    if interrupts:
        raise KeyboardInterrupt
    return statuses


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


def _stop_words(runs: Sequence[RunFolder]) -> str:
    saving = sum(run.resolved().train.save_last for run in runs)
    if saving == len(runs):
        return "save and stop"
    unsaved = "unsaved" if not saving else f"{len(runs) - saving} of them unsaved"
    return f"stop, {unsaved}: train.save_last is false"


def _interrupt(runs: Sequence[RunFolder], count: int, statuses: Sequence[RunStatus]) -> None:
    """First Ctrl-C: save, where the run does that at its end, and stop. Second: quit, without asking for the state
    first, as there may be a third."""
    from hpc_gpt.launch.control import cancel_run, interrupt_run

    begin = "\n" if sys.stderr.isatty() else ""  # behind the terminal's ^C
    what = "the run is" if len(runs) == 1 else f"the {len(runs)} runs are"
    if count == 1:
        sys.stderr.write(f"{begin}Ctrl-C: {what} asked to {_stop_words(runs)}; once more cancels\n")
        for run, status in zip(runs, read_status(runs), strict=True):
            interrupt_run(run, status)
    else:
        sys.stderr.write(f"{begin}Ctrl-C again: {what} cancelled\n")
        for run, status in zip(runs, statuses or read_status(runs), strict=True):
            cancel_run(run, status)
