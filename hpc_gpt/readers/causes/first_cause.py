"""The first cause of an attempt's end, from the logs of all its ranks.

The rules, in this order:

1. A line that several patterns match is one failure: the one of the most telling class.
2. What training went on after, by two steps or more in the same log, was survived and ended nothing.
3. What one failure brings about elsewhere (an echo: a closed connection, a SIGTERM, `Exited with exit code 1`) is
   never the cause, unless nothing else is there; then the first of them is, and `sure` says so.
4. In one file the first line counts, but for a collective that timed out or a cancel right before a failure of a
   rank that says why.
5. Between files the time of day counts if all have one. Within two seconds clocks may differ: the more telling
   class goes first then, and `sure` says so. Without times the more telling class does.
6. If a collective timed out, the rank is to blame that did not report it, or is at an earlier one than the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hpc_gpt.readers.causes.blame import (
    FIRST_OBSERVED,
    join_blocks,
    node_of,
    nodes_of_ranks,
    only_one_that_left,
    rank_of_file,
    rank_to_blame,
)
from hpc_gpt.readers.logs.part import Failure, Part
from hpc_gpt.runs.state import OF_SCHEDULER
from hpc_gpt.secrets import hide_secrets

SKEW_S = 2.0
NEAR_LINES = 200
SURVIVED_STEPS = 2
_KILLED = re.compile(r"\bKilled\b|\bSIGKILL\b|\bexit ?code:? (?:= )?(?:137|-9)\b|exitcode: -9\b")
# What a rank says whose collective failed: the reason comes after it, or is another rank's.
_OF_COLLECTIVES = re.compile(r"\bNCCL error\b|\bDistBackendError\b")
_NO_WORD = "nothing says why the log ends"
# How telling a class is: what explains other failures goes before what other failures explain.
_TELLING = (
    "gpu_memory",
    "host_memory",
    "disk_full",
    "nan",
    "data",
    "node_failure",
    "user_error",
    "walltime",
    "preempted",
    "requeued",
    "stopped",
    "error",
    "cancelled",
    "hang",
    "collective_timeout",
)


@dataclass
class Cause:
    """How an attempt ended, and why.

    `ended`: a class of state.ENDED, `unknown` if nothing says. `words`: the cause in one line, in the log's words
    after the rank's number; fit to be shown, without secrets. `failure`: where the log says it, None without one.
    `node`, `rank`: whose it is, if that can be told; `blames_rank`: the rank was found by its silence. `ordered`: every
    failure, one a line: the cause first, then what else went wrong in the order of the time, then what was survived,
    then the echoes. `sure`: empty if the log says it, else what it rests on.
    """

    ended: str
    words: str
    failure: Failure | None = None
    node: str | None = None
    ordered: list[Failure] = field(default_factory=list)
    rank: int | None = None
    survived: list[Failure] = field(default_factory=list)
    sure: str = ""
    blames_rank: bool = False

    @property
    def failed_node(self) -> str | None:
        """The node, where it is the node's fault: to be left out next time."""
        blamed = self.ended == "node_failure" or (self.ended in ("hang", "collective_timeout") and self.blames_rank)
        return self.node if blamed else None

    @property
    def echoes(self) -> list[Failure]:
        """What followed from the cause, or is named as a consequence."""
        return [failure for failure in self.ordered if failure.echo and failure != self.failure]


def first_cause(parts: Sequence[Part], reached_end: bool) -> Cause:
    """The first cause over the parts of one attempt: all files of all its ranks, its scheduler's words among them.

    `reached_end`: the steps it was to train were all trained. Then only a failure after the last step counts.
    """
    failures: list[Failure] = []
    survived: list[Failure] = []
    open_: list[Failure] = []
    for part in parts:
        rank, survived_before = rank_of_file(part.file), _survived_before(part, reached_end)
        for failure in join_blocks(one_a_line([*part.failures, *_said_ends(part)])):
            failure = replace(failure, rank=rank) if failure.rank is None and rank is not None else failure
            failures.append(failure)
            (survived if failure.place.line < survived_before else open_).append(failure)
    causes = _ordered([failure for failure in open_ if not failure.echo], parts)
    echoes = [failure for failure in open_ if failure.echo]
    chosen, sure = _choose(causes)
    done = reached_end or any(ended == "done" for part in parts for ended, _ in part.ends)
    if chosen is None and done:
        return Cause("done", "", None, None, [*survived, *echoes], survived=survived)
    if chosen is None and echoes:
        chosen = min(echoes, key=_aftermath)
        sure = "only its consequences are in the logs"
    if chosen is None:
        return Cause("unknown", _NO_WORD, None, None, survived, survived=survived)
    nodes = nodes_of_ranks(failures)
    rank, why, node = chosen.rank, "", None
    if chosen.ended in ("collective_timeout", "hang"):
        blamed, why = rank_to_blame([failure for failure in failures if failure.ended == chosen.ended], parts)
        rank = chosen.rank if blamed is None else blamed
    if chosen.ended not in OF_SCHEDULER:
        left = only_one_that_left(echoes) if rank is None else None
        if left is not None and left is not chosen:
            rank = left.rank
            sure = "; ".join(filter(None, (sure, "the rank is the one that the launcher says ended first")))
        node = node_of(chosen, rank, nodes, parts, why != "")
    if chosen.ended == "error" and _KILLED.search(chosen.words):
        sure = "; ".join(filter(None, (sure, "nothing says who killed it: most often the kernel, for want of memory")))
    rest = [failure for failure in [*causes, *survived, *echoes] if failure is not chosen]
    words = one_line(chosen.words)
    number = rank if chosen.rank is None else chosen.rank
    if number is not None and f"ank {number}" not in words and f"task {number}" not in words:
        words = f"rank {number}: {words}"
    if why:
        words = f"{words}; {why}"
    return Cause(chosen.ended, words, chosen, node, [chosen, *rest], rank, survived, sure, why != "")


def _aftermath(failure: Failure) -> tuple[bool, bool, bool, bool]:
    """Of consequences alone: a process' own end before its peers' words, then what names a rank and a node."""
    ended_by_others = failure.ended in ("cancelled", "stopped", "collective_timeout")
    first = failure.words.endswith(FIRST_OBSERVED)
    return ended_by_others, not first, failure.node is None, failure.rank is None


def one_line(words: str) -> str:
    """A failure's words fit to be shown: one line, no control characters, no secrets.

    >>> one_line("RuntimeError:\\x1b[31m  bad\\x00 token=hf_abcdefghijklmnopqrstu")
    'RuntimeError: [31m bad token=[removed]'
    """
    printable = "".join(letter if letter.isprintable() else " " for letter in words)
    return hide_secrets(" ".join(printable.split()))[:400]


def one_a_line(failures: Iterable[Failure]) -> list[Failure]:
    """The failures in the order of their lines, of those on one line the most telling."""
    best: dict[tuple[str, int], Failure] = {}
    for failure in failures:
        place = (failure.place.file, failure.place.line)
        if place not in best or _plainness(failure) < _plainness(best[place]):
            best[place] = failure
    return sorted(best.values(), key=lambda failure: failure.place.line)


def _plainness(failure: Failure) -> tuple[bool, bool]:
    # That a line is a consequence is said by a pattern of its own, so it is worth more than the exception's bare name.
    return failure.ended == "error" and not failure.echo, failure.ended == "error"


def _said_ends(part: Part) -> list[Failure]:
    """What a program says of its own end, if that is no success."""
    return [
        Failure(ended, f"the log says that it ended: {ended}", place) for ended, place in part.ends if ended != "done"
    ]


def _survived_before(part: Part, reached_end: bool) -> int:
    """The line before which a part's failures ended nothing, for training continued after it; 0 without one."""
    needed = 1 if reached_end else SURVIVED_STEPS
    found = [0, *(where.line for ended, where in part.ends if ended == "done")]
    found += [fact.place.line for fact in part.totals.values() if fact.place.file == part.file]
    for steps in part.steps.values():
        # Of many lines a sample is kept: each is one of several.
        enough = needed if steps.stride == 1 else 1
        found += [int(steps.line[-enough])] if len(steps) >= enough else []
    if len(part.progress) >= needed:
        found.append(part.progress[-needed][2])
    return max(found)


def _telling(failure: Failure) -> int:
    return _TELLING.index(failure.ended) if failure.ended in _TELLING else len(_TELLING)


def _ordered(causes: Sequence[Failure], parts: Sequence[Part]) -> list[Failure]:
    """The failures that are no echoes, by time of day if all have one, else file by file in the order of lines."""
    order = {part.file: number for number, part in reversed(list(enumerate(parts)))}
    if causes and all(failure.at is not None for failure in causes):
        return sorted(causes, key=lambda failure: failure.at or 0.0)
    return sorted(causes, key=lambda failure: (order.get(failure.place.file, 0), failure.place.line))


def _choose(causes: Sequence[Failure]) -> tuple[Failure | None, str]:
    """(the first cause, what it rests on) of failures that are no echoes."""
    by_file: dict[str, list[Failure]] = {}
    for failure in causes:
        by_file.setdefault(failure.place.file, []).append(failure)
    heads = [_head(sorted(chain, key=lambda failure: failure.place.line)) for chain in by_file.values()]
    if len(heads) <= 1:
        return heads[0] if heads else (None, "")
    timed = [failure.at for failure, _ in heads if failure.at is not None]
    if len(timed) < len(heads):
        chosen, sure = min(heads, key=lambda head: (*_without_times(head[0]), head[0].at or math.inf))
        others = {failure.ended for failure, _ in heads} - {chosen.ended}
        note = f"the files give no times to compare; {chosen.ended} goes before {', '.join(sorted(others))}"
        return chosen, sure or (note if others else "")
    first = min(timed)
    near = [head for head in heads if head[0].at is not None and head[0].at - first <= SKEW_S]
    chosen, sure = min(near, key=lambda head: (_telling(head[0]), head[0].at))
    apart = {failure.ended for failure, _ in near} - {chosen.ended}
    if apart and not sure:
        sure = f"{', '.join(sorted(apart))} within {SKEW_S:.0f} s of it, by clocks that may differ by as much"
    return chosen, sure


def _without_times(failure: Failure) -> tuple[int, int]:
    # A rank's bare exception without a time may well come of the signal that the scheduler sent it.
    return (_telling(replace(failure, ended="cancelled")), 0) if failure.ended == "error" else (_telling(failure), 0)


def _head(chain: Sequence[Failure]) -> tuple[Failure, str]:
    """The first of one file's failures, or one right after it that explains it."""
    head = chain[0]
    for other in chain[1:]:
        if not _is_near(head, other):
            break
        if _explains(other, head):
            return other, f"printed {other.place.line - head.place.line} lines after {head.ended}, which it explains"
    return head, ""


def _is_near(head: Failure, other: Failure) -> bool:
    if head.at is not None and other.at is not None:
        return abs(other.at - head.at) <= SKEW_S
    return other.place.line - head.place.line <= NEAR_LINES


def _explains(other: Failure, head: Failure) -> bool:
    if head.ended in ("collective_timeout", "hang"):
        # Timeouts take minutes: what comes after one without a time of its own came of the abort, but for these.
        return other.ended in ("gpu_memory", "host_memory", "node_failure", "disk_full") and other.rank != head.rank
    if head.ended == "cancelled":
        return other.ended in ("walltime", "preempted", "requeued", "node_failure", "host_memory")
    if head.ended != "error":
        return False
    if _OF_COLLECTIVES.search(head.words):
        return _telling(other) < _telling(head)
    other_rank = other.rank is not None and head.rank is not None and other.rank != head.rank
    return other_rank and other.ended in ("gpu_memory", "host_memory", "node_failure")
