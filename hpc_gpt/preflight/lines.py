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


def preflight_limit_s() -> float:
    """The seconds that a preflight may take, by HPC_GPT_PREFLIGHT_S; ConfigError if it is no number of seconds."""
    return seconds_given("HPC_GPT_PREFLIGHT_S", "180", "300 where torch loads slowly")


def encode(node: str, local: int, **fields: Any) -> str:
    return f"{_MARK}{json.dumps({'node': node, 'local': local, 'time': time.time(), **fields})}\n"


def decode(line: str) -> dict[str, Any] | None:
    """The fields of a line; None for any other output."""
    # Ranks share a stream: the unfinished line of another may come first.
    fields = json_object(line.partition(_MARK)[2]) or {}
    return fields if fields.keys() >= {"node", "local", "time"} else None
