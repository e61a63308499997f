"""The choice of the cause among several failures: the first, or one that explains it (`causes` has the rules)."""

import math
import re
from collections.abc import Sequence

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.reader.failures.part_failures import SKEW_S, by_clock, is_specific
from hpc_gpt.reader.lines.part import Failure, Part

_NEAR_LINES = 200
_ONE_FAILURE_LINES, _ONE_TRACEBACK_LINES = 20, 60
_ENDING_S = 60.0  # Slurm may let ranks run this long after its signal (KillWait is 30 by default)
# Exceptions that are a program's own fault. Exceptions about `None` also occur while a process is torn down.
_OWN_FAULT = re.compile(
    r"^(?:(?:KeyError|IndexError|AssertionError|ZeroDivisionError|NotImplementedError|RecursionError|OverflowError)\b"
    r"|(?:AttributeError|TypeError)\b(?!.{0,80}NoneType)"
    r"|RuntimeError: (?:The (?:expanded )?size of |shape |mat1 and mat2|Expected all tensors))"
)
# Failures of a process that never began: it was not one of the ranks that trained.
NEVER_BEGAN = re.compile(
    r"^(?:[^:]{1,200}: ){1,2}(?:(?:command )?not found$|No such file or directory|Permission denied|unbound variable)"
    r"|^sbatch: error|^srun: error: Unable to create step|\bexecve\(\)|: can't open file '"
)
# Three kinds of messages: a signal was received; such a message that is not of the signal which a launcher sends when a
# rank dies; a rank died.
_RECEIVED = re.compile(
    r"(?i)\b(?:received|caught|got|by)\b.{0,40}?"
    r"(?:\bsignal:? (?:1|2|10|12|15)\b|SIG(?:TERM|INT|HUP|USR[12]|XCPU)|death signal)|KeyboardInterrupt|^\*\*\* STEP "
)
_OUTSIDE = re.compile(r"SignalException|KeyboardInterrupt|^\*\*\* STEP ")
_DIED = re.compile(r"\bexit ?code:? (?:= |: )?-(?!15\b|2\b)\d|ended by signal (?!15\b|2\b)|exited on signal")
# Messages of a rank whose collective failed: the reason follows, or is on another rank.
IN_COLLECTIVE = re.compile(r"\bNCCL error\b|\bDistBackendError\b")
# A link's fault; the peers of a process that died print the same.
LINK = re.compile(r"\bNET/(?:IB|OFI)\b|\bTransport retry count|^libfabric:|\bOFI poll failed\b")
# A fault as a program sees it, and as the GPU's driver reports it.
_OF_GPU = re.compile(
    r"\bHW Exception by GPU|\bMemory access fault by GPU|\bHSA_STATUS_ERROR_|\b(?:CUDA|HIP|SYCL) error\b"
)
_OF_DRIVER = re.compile(r"\bamdgpu\b|^NVRM: Xid|\bi915\b|^xe 0000:")


def from_outside(causes: Sequence[Failure], echoes: Sequence[Failure], chosen: Failure) -> Failure | None:
    """The end from outside, the scheduler's message or a signal, if it is the cause rather than `chosen`; else None."""
    limit = next((failure for failure in causes if failure.ended == "walltime"), None)
    if chosen.ended == "walltime":
        return None
    if limit is not None and chosen.at is not None and limit.at is not None:
        return limit if limit.at - chosen.at <= _ENDING_S else None
    if meaning(chosen.ended).no_signal or meaning(chosen.ended).by_scheduler:
        return None if limit is None or meaning(chosen.ended).no_signal else limit
    if limit is not None:
        explains_itself = chosen.ended in ("user_error", "data") or bool(_OWN_FAULT.match(chosen.message))
        explains_itself = explains_itself and not NEVER_BEGAN.search(chosen.message)  # of a command beside the training
        earlier = chosen.place.file == limit.place.file and chosen.place.line < limit.place.line
        return None if earlier and explains_itself else limit
    return signal_before(echoes, [chosen])


def signal_before(echoes: Sequence[Failure], failures: Sequence[Failure]) -> Failure | None:
    """The first signal from outside in the logs, if all `failures` come after it; else None.

    If a rank died, a launcher also sends SIGTERM to the others: then it is not a signal from outside.
    """
    died = any(_DIED.search(one.message) for one in echoes)
    signals = (one for one in echoes if _RECEIVED.search(one.message) and (not died or _OUTSIDE.search(one.message)))
    if (first := next(signals, None)) is None:
        return None
    # torchrun says last of all that it was ended by a signal.
    last = "SignalException" in first.message and all(one.echo for one in failures)
    return first if last or all(_is_after(one, first) for one in failures) else None


def _is_after(failure: Failure, first: Failure) -> bool:
    if failure.at is not None and first.at is not None:
        return failure.at >= first.at
    return failure.place.file == first.place.file and failure.place.line > first.place.line


def by_time(causes: Sequence[Failure], parts: Sequence[Part]) -> list[Failure]:
    """The failures sorted by time of day if all have one, else by file and line."""
    order = {part.file: number for number, part in reversed(list(enumerate(parts)))}
    if causes and all(failure.at is not None for failure in causes):
        return sorted(causes, key=lambda failure: failure.at or 0.0)
    return sorted(causes, key=lambda failure: (order.get(failure.place.file, 0), failure.place.line))


def choose(causes: Sequence[Failure]) -> tuple[Failure | None, str]:
    """Returns (the first cause, what it is inferred from) among failures that are not echoes."""
    by_file: dict[str, list[Failure]] = {}
    for failure in causes:
        by_file.setdefault(failure.place.file, []).append(failure)
    heads = [_head(by_clock(sorted(chain, key=lambda failure: failure.place.line))) for chain in by_file.values()]
    if len(heads) <= 1:
        return heads[0] if heads else (None, "")
    timed = [failure.at for failure, _ in heads if failure.at is not None]
    if len(timed) < len(heads):
        # An exception without a time may be the effect of the scheduler's signal: it ranks as a cancellation.
        chosen, sure = min(
            heads,
            key=lambda head: (
                meaning("cancelled" if head[0].ended == "error" else head[0].ended).precedence,
                head[0].at or math.inf,
            ),
        )
        others = {failure.ended for failure, _ in heads} - {chosen.ended}
        note = f"the files give no times to compare; {chosen.ended} goes before {', '.join(sorted(others))}"
        return chosen, sure or (note if others else "")
    first = min(timed)
    near = [head for head in heads if head[0].at is not None and head[0].at - first <= SKEW_S]
    chosen, sure = min(near, key=lambda head: (meaning(head[0].ended).precedence, head[0].at))
    other_classes = {failure.ended for failure, _ in near} - {chosen.ended}
    if other_classes and not sure:
        sure = f"{', '.join(sorted(other_classes))} within {SKEW_S:.0f} s of it, by clocks that may differ by as much"
    return chosen, sure


def _head(chain: Sequence[Failure]) -> tuple[Failure, str]:
    """The first failure of a file, or one right after it that explains it."""
    head, ranks = chain[0], max(1, len({failure.rank for failure in chain} - {None}))
    for other in chain[1:]:
        if not _is_near(head, other):
            break
        if _explains(other, head):
            return other, f"printed {other.place.line - head.place.line} lines after {head.ended}, which it explains"
        if head.ended == "error" and _are_one(head, other, ranks) and is_own(other) and is_specific(other):
            return other, ""
    return head, ""


def _are_one(head: Failure, other: Failure, ranks: int) -> bool:
    """Whether two failures of a file, in which so many ranks fail, are lines of one: near each other, or both raised by
    a rank, as the second may be raised while the first is handled."""
    raised = head.raised_in and other.raised_in and head.rank is not None
    lines = _ONE_TRACEBACK_LINES if raised else _ONE_FAILURE_LINES
    return head.rank == other.rank and abs(other.place.line - head.place.line) <= lines * ranks


def is_own(failure: Failure) -> bool:
    """Whether the failure is of a rank's own process or node: no wait, no end by the scheduler, no lost peer."""
    row = meaning(failure.ended)
    of_peer = LINK.search(failure.message) or IN_COLLECTIVE.search(failure.message)
    return not (row.victim or row.by_scheduler or of_peer)


def is_shell_line(failure: Failure) -> bool:
    """Whether the failure is a line of a shell, or of a command in a script, that finds no command or file."""
    return failure.rank is None and not failure.echo and bool(NEVER_BEGAN.search(failure.message))


def is_later(failure: Failure, other: Failure) -> bool:
    """Whether the logs show that `failure` came after `other`."""
    if failure.at is not None and other.at is not None:
        return failure.at - other.at > SKEW_S
    is_same_rank = failure.rank is not None and failure.rank == other.rank and failure.place.file == other.place.file
    return is_same_rank and failure.place.line > other.place.line


def _is_near(head: Failure, other: Failure) -> bool:
    if head.at is not None and other.at is not None:
        return abs(other.at - head.at) <= SKEW_S
    return other.place.line - head.place.line <= _NEAR_LINES


def _explains(other: Failure, head: Failure) -> bool:
    if head.ended == "error" and _OF_GPU.search(head.message) and _OF_DRIVER.search(other.message):
        return other.ended == "node_failure"
    if head.ended == "error" and IN_COLLECTIVE.search(head.message):
        return meaning(other.ended).precedence < meaning("error").precedence
    if LINK.search(other.message):
        return False
    # Timeouts take minutes: a failure after one, without a time, is a consequence unless it explains the timeout.
    explains = head.ended in meaning(other.ended).explains
    if head.ended == "error":
        return explains and other.rank is not None and head.rank is not None and other.rank != head.rank
    return explains and (head.ended == "cancelled" or other.rank != head.rank)
