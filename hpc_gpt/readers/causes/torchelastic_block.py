"""torchelastic's report of a failed group: lines of one rank's host, number and exit code, joined to one failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from hpc_gpt.readers.logs.part import Failure

FIRST_OBSERVED = "the first that its launcher saw fail"
_ROOT = re.compile(r"^Root Cause ")
_HOST = re.compile(r"^host +: ")
_RANK = re.compile(r"^rank +: \d+ \(local_rank: ")
_EXIT = re.compile(r"^exitcode +: (-?\d+)")
_LONGEST_BLOCK = 8  # lines


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
