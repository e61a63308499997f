"""The probe protocol: the lines that the ranks of a preflight send to the process that judges them.

A line has the rank's `node`, its number there (`local`) and the `time`: the first when the rank starts. Then come its
`figures`, its `transfer`s with other ranks as they begin and as they have a rate, `done`, and `failed` if it cannot
continue. It reads the plan of the transfers on stdin. Slurm carries the lines, so a judgement needs neither a port nor
a shared folder: either may be what is broken.
"""

from __future__ import annotations

import json
import time
from typing import Any

from hpc_gpt.files import json_object
from hpc_gpt.process import seconds_given

# In an attempt's folder: the figures and the verdict.
PREFLIGHT = "preflight.json"
# A variable of a rank's environment: a command whose JSON replaces figures.
COMMAND = "HPC_GPT_PROBE_COMMAND"
# In the attempt's folder during the preflight: a file that every node must see, and one file from each node.
SHARED = "preflight"
SEEN_BY_ALL = "seen-by-all"
NODE_FILE = "node-"

_MARK = "hpc-gpt-preflight "
# What the fields of a line are. A transfer is its kind, axis, ranks, and rate or None.
_FIELDS: dict[str, Any] = {
    "node": str,
    "local": int,
    "time": int | float,
    "figures": dict,
    "port": int | None,
    "transfer": list,
    "failed": str,
    "trace": str,
}


def preflight_limit_s() -> float:
    """The seconds that a preflight may take, by HPC_GPT_PREFLIGHT_S; ConfigError if it is no number of seconds."""
    return seconds_given("HPC_GPT_PREFLIGHT_S", "180", "300 where torch loads slowly")


def encode(node: str, local: int, **fields: Any) -> str:
    return f"{_MARK}{json.dumps({'node': node, 'local': local, 'time': time.time(), **fields})}\n"


def decode(line: str) -> dict[str, Any] | None:
    """The fields of a line; None for any other output, and for a line without the fields that a rank sends."""
    # Ranks share a stream: the unfinished line of another may come first.
    fields = json_object(line.partition(_MARK)[2])
    return fields if _is_sent(fields) else None


def _is_sent(fields: Any) -> bool:
    """Whether a rank can have sent these fields."""
    return (
        isinstance(fields, dict)
        and fields.keys() >= {"node", "local", "time"}
        and ("figures" in fields) == ("port" in fields)
        and all(isinstance(value, _FIELDS.get(name, object)) for name, value in fields.items())
        and ("transfer" not in fields or _is_transfer(fields["transfer"]))
    )


def _is_transfer(parts: list[Any]) -> bool:
    match parts:
        case [str(), str(), [*ranks], int() | float() | None]:
            return all(isinstance(rank, int) for rank in ranks)
    return False
