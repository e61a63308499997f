"""Whose fault it was: the rank that a timeout or a launcher points at, and the node that a rank ran on."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hpc_gpt.readers.logs.part import Failure, Part

# torchelastic's report of a failed group: lines of one rank's host, number and exit code.
FIRST_OBSERVED = "the first that its launcher saw fail"
_ROOT = re.compile(r"^Root Cause ")
_HOST = re.compile(r"^host +: ")
_RANK = re.compile(r"^rank +: \d+ \(local_rank: ")
_EXIT = re.compile(r"^exitcode +: (-?\d+)")
_LONGEST_BLOCK = 8  # lines
_SEQUENCE = re.compile(r"SeqNum=(\d{1,12})")
_MISSING = re.compile(r"\bRanks? (\d{1,7})(?:, ?\d{1,7}){0,3} failed to pass monitoredBarrier")
# Our own watchdog's message: the rank without a heartbeat, or the one that is late.
_STANDS = re.compile(
    r"hang: no rank made a step for \d{1,9} s; ranks? (\d{1,7})[-\d, .()]{0,120} on \S{1,80} (is|are) "
)
_OF = re.compile(r"OpType=([A-Z_a-z]{1,40})")
_NODE_IN_FILE = re.compile(r"(?:^|[/_.-])([a-z][a-z0-9-]{0,30}\d)(?=\.(?:out|err|log|txt)$)")
_LEFT = re.compile(r"\bexit code \d|\bended by signal (?!15\b)\d|\bexited on signal \d")
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9.-]{0,63}")
_RANK_IN_FILE = re.compile(r"(?:^|[/_.\[-])(?<!local[_-])rank[_.-]?(\d{1,7})(?=$|[/_.\]-])", re.IGNORECASE)
# More ranks than this share that did not report are no one's fault.
_FEW = 0.25


def nodes_of_ranks(failures: Sequence[Failure]) -> dict[int, str]:
    """{rank: node}, from every line that names both, as srun's and torchelastic's do."""
    found: dict[int, str] = {}
    for failure in failures:
        if failure.rank is not None and failure.node:
            found.setdefault(failure.rank, failure.node)
    return found


def rank_of_file(file: str) -> int | None:
    """The rank whose log a file is by its name.

    >>> [rank_of_file(name) for name in ("logs/rank_3.log", "rank12/stderr", "local_rank_1.log", "ranks.log")]
    [3, 12, None, None]
    """
    found = _RANK_IN_FILE.findall(file)
    return int(found[-1]) if found else None


def world_size(parts: Sequence[Part]) -> int | None:
    """Ranks of the attempt, as the log states it; None if it does not."""
    for part in parts:
        fact = part.fact("gpus")
        if fact is not None and isinstance(fact.value, int) and 0 < fact.value < 10_000_000:
            return fact.value
    return None


def rank_to_blame(timeouts: Sequence[Failure], parts: Sequence[Part]) -> tuple[int | None, str]:
    """(the rank that kept the others waiting, why it is that one) of a collective that timed out; (None, "").

    In this order: the rank that our own watchdog names, or a barrier; the one that reports an earlier collective than
    all others; the ranks that report nothing while all others do, the first of them.
    """
    for failure in timeouts:
        if named := _STANDS.search(failure.words):
            return int(named[1]), f"the ranks' beats name rank {named[1]}"
        if named := _MISSING.search(failure.words):
            return int(named[1]), f"rank {named[1]} did not come to the barrier"
    reports: dict[int, Failure] = {}
    for failure in timeouts:
        if failure.rank is not None:
            reports.setdefault(failure.rank, failure)
    numbers = {rank: int(found[1]) for rank, failure in reports.items() if (found := _SEQUENCE.search(failure.words))}
    if len(numbers) > 2:
        behind = [rank for rank, number in numbers.items() if number == min(numbers.values())]
        if len(behind) <= max(1, int(_FEW * len(numbers))) and len(set(numbers.values())) > 1:
            most = max(set(numbers.values()), key=list(numbers.values()).count)
            doing = _OF.search(reports[behind[0]].words)
            where = f"collective {numbers[behind[0]]}" + (f" ({doing[1]})" if doing else "")
            return behind[0], f"rank {behind[0]} is at {where}, the others at {most}"
    size = world_size(parts)
    if size is None and reports and len(reports) == max(reports):
        size = max(reports) + 1  # one rank below the highest is silent
    if size is None or len(reports) < 2 or size > 100_000:
        return None, ""
    silent = [rank for rank in range(size) if rank not in reports]
    if silent and len(silent) <= max(1, int(_FEW * size)):
        one = len(silent) == 1
        ranks = ", ".join(map(str, silent[:8])) + (", …" if len(silent) > 8 else "")
        return silent[0], f"rank{'' if one else 's'} {ranks} did not report it, {len(reports)} of {size} ranks did"
    return None, ""


def only_one_that_left(echoes: Sequence[Failure]) -> Failure | None:
    """What a launcher says of the one rank that ended of itself with an error, or first; None if it names several."""
    left = [failure for failure in echoes if failure.rank is not None and _LEFT.search(failure.words)]
    if root := [failure for failure in left if failure.words.endswith(FIRST_OBSERVED)]:
        return root[0]
    alone = len({failure.rank for failure in left}) == 1 and not any("tasks " in failure.words for failure in left)
    return left[0] if alone else None


def node_of(
    failure: Failure, rank: int | None, nodes: Mapping[int, str], parts: Sequence[Part], blamed: bool
) -> str | None:
    """The node of a failure: the one its line names, else its rank's, else its file's, else the only one there is."""
    if failure.node and not blamed:
        return failure.node
    if rank is not None and rank in nodes:
        return nodes[rank]
    if failure.ended == "node_failure":
        every = (each for part in parts for each in part.failures if each.node and not each.echo)
        if (other := next((each for each in every if each.ended == "node_failure"), None)) is not None:
            return other.node
    if blamed:
        return None
    in_name = _NODE_IN_FILE.search(failure.place.file)
    if in_name and in_name[1] in _named(parts):
        return in_name[1]
    lists = {str(fact.value) for part in parts for fact in part.facts.get("node_list", [])}
    only = next(iter(lists)) if len(lists) == 1 else ""
    return only if _WORD.fullmatch(only) else None


def _named(parts: Sequence[Part]) -> set[str]:
    """Every node that a failure or a list of nodes names."""
    lists = " ".join(str(fact.value) for part in parts for fact in part.facts.get("node_list", []))
    return {failure.node for part in parts for failure in part.failures if failure.node} | set(_WORD.findall(lists))


# --- torchelastic's report of a failed group


def join_blocks(failures: Sequence[Failure]) -> list[Failure]:
    """The failures, ascending by line, with each whole block as one: its rank, its node, its exit code.

    The block below `Root Cause` says that it was the first observed. Lines of a block that was cut off stay as they
    are.
    """
    joined: list[Failure] = []
    begun: list[Failure] = []
    for failure in failures:
        another = _HOST.match(failure.words) and any(_HOST.match(each.words) for each in begun)
        if begun and (another or not 0 < failure.place.line - begun[0].place.line <= _LONGEST_BLOCK):
            joined += begun
            begun = []
        if failure.echo and any(regex.match(failure.words) for regex in (_ROOT, _HOST, _RANK)):
            begun.append(failure)
        elif begun and _EXIT.match(failure.words) and (whole := _joined(begun, failure)):
            joined.append(whole)
            begun = []
        else:
            joined.append(failure)
    return sorted([*joined, *begun], key=lambda failure: failure.place.line)


def _joined(begun: Sequence[Failure], end: Failure) -> Failure | None:
    rank = next((failure.rank for failure in begun if _RANK.match(failure.words)), None)
    if rank is None:
        return None
    node = next((failure.node for failure in begun if _HOST.match(failure.words)), None)
    words = f"rank {rank} {_how(end)}"
    if any(_ROOT.match(failure.words) for failure in begun):
        words = f"{words}, {FIRST_OBSERVED}"
    return replace(end, words=words, rank=rank, node=None if node == "localhost" else node)


def _how(failure: Failure) -> str:
    found = _EXIT.match(failure.words)
    code = int(found[1]) if found else 0
    try:
        return (
            f"was ended by signal {-code} ({signal.Signals(-code).name})"
            if code < 0
            else f"ended with exit code {code}"
        )
    except ValueError:
        return f"was ended by signal {-code}"
