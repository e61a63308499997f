"""torchelastic's report of a failed group: lines of one rank's host, number and exit code, joined to one failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import replace

from hpc_gpt.readers.part import Failure

FIRST_OBSERVED = "the first that its launcher saw fail"
_ROOT = re.compile(r"^Root Cause ")
_HOST = re.compile(r"^host +: ")
_RANK = re.compile(r"^rank +: \d+ \(local_rank: ")
_EXIT = re.compile(r"^exitcode +: (-?\d+)")
_LONGEST_BLOCK = 8  # lines


def join_blocks(failures: Sequence[Failure]) -> list[Failure]:
    """The failures, ascending by line, with each block of the report as one: its rank, its node, its exit code.

    The block below `Root Cause` says that it was the first observed.
    """
    joined: list[Failure] = []
    host: Failure | None = None
    rank: Failure | None = None
    root: Failure | None = None
    for failure in failures:
        if _ROOT.match(failure.words):
            root = failure
        elif _HOST.match(failure.words):
            host, rank = failure, None
        elif _RANK.match(failure.words):
            rank = failure
        elif _EXIT.match(failure.words) and rank is not None and _near(failure, rank):
            node = host.node if host is not None and _near(failure, host) else None
            words = f"rank {rank.rank} {_how(failure)}"
            if root is not None and _near(failure, root):
                words = f"{words}, {FIRST_OBSERVED}"
            joined.append(replace(failure, words=words, rank=rank.rank, node=None if node == "localhost" else node))
            host = rank = root = None
        else:
            joined.append(failure)
    return joined


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


def _near(failure: Failure, other: Failure) -> bool:
    return 0 < failure.place.line - other.place.line <= _LONGEST_BLOCK
