"""Which ends mend themselves when the same job starts again, and how long to wait before it does: the one table."""

from __future__ import annotations

import re
from dataclasses import dataclass

# A pause doubles with every failure that follows another, up to this.
LONGEST_PAUSE_S = 3600
# So many attempts in a row that leave no newer checkpoint end a run.
MOST_WITHOUT_PROGRESS = 2
# So many where nodes failed, each of which the next attempt has done without.
MOST_NODE_FAILURES = 5


@dataclass(frozen=True)
class Retry:
    """What a chain does after an attempt that ended so.

    `goes_on`: whether another attempt can mend it. `fails`: whether it was a failure, before whose retry there is a
    pause. `most`: so many such attempts in a row without a newer checkpoint end the run; 0 for what Slurm or the user
    ended early, which does not count.
    """

    goes_on: bool
    fails: bool = False
    most: int = 0


_STOPS = Retry(False)
_AT_ONCE = Retry(True)
_FAILURE = Retry(True, fails=True, most=MOST_WITHOUT_PROGRESS)

# In the order of record.ENDED, for every class that an attempt can end with.
RETRIES: dict[str, Retry] = {
    "done": _STOPS,
    "stopped": _STOPS,
    "walltime": Retry(True, most=MOST_WITHOUT_PROGRESS),
    "preempted": _AT_ONCE,
    "requeued": _AT_ONCE,
    "cancelled": _STOPS,
    "refused": _STOPS,
    "budget": _STOPS,
    "no_progress": _STOPS,
    "gpu_memory": _STOPS,
    "host_memory": _STOPS,
    "collective_timeout": _FAILURE,
    "hang": _FAILURE,
    "node_failure": Retry(True, fails=True, most=MOST_NODE_FAILURES),
    "nan": _STOPS,
    "data": _STOPS,
    "disk_full": _STOPS,
    "user_error": _STOPS,
    "error": _FAILURE,
    "unknown": _FAILURE,
}

# What the program itself says of a slip of its author's: started again, it says the same.
MISTAKES = (
    "ImportError",
    "ModuleNotFoundError",
    "NameError",
    "UnboundLocalError",
    "TypeError",
    "AttributeError",
    "SyntaxError",
    "IndentationError",
    "TabError",
    "NotImplementedError",
    "ZeroDivisionError",
)
_RAISED = re.compile(rf"(?:^|[\s:;.])({'|'.join(MISTAKES)})(?::|$|\s)")


def is_mistake(cause: str | None) -> bool:
    """Whether the words of an `error` name an exception that a rank raised for a mistake in the program.

    >>> is_mistake("rank 2: NameError: name 'x' is not defined"), is_mistake("rank 2: RuntimeError: CUDA error")
    (True, False)
    """
    return bool(cause) and _RAISED.search(cause or "") is not None


def words_of(ended: str) -> str:
    """What a chain does after such an end.

    >>> words_of("walltime"), words_of("hang"), words_of("nan")
    ('goes on at once', 'goes on after a pause', 'stops')
    """
    retry = RETRIES.get(ended, _STOPS)
    if not retry.goes_on:
        return "stops"
    return "goes on after a pause" if retry.fails else "goes on at once"


def pause_s(first_s: float, failures: int) -> float:
    """Seconds to wait before the retry that follows so many failures in a row.

    >>> [pause_s(30, failures) for failures in (0, 1, 2, 3, 20, 9999)]
    [0.0, 30.0, 60.0, 120.0, 3600.0, 3600.0]
    """
    if failures < 1:
        return 0.0
    return float(min(LONGEST_PAUSE_S, max(0.0, first_s) * 2 ** min(failures - 1, 30)))
