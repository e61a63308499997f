"""The probe protocol: the lines that the ranks of a preflight and the process that judges them send to each other.

A rank prints `here` when it starts, `device` with its figures, one `group` for each collective with other ranks, and
`failed` if it cannot continue. It reads the groups on stdin. Slurm carries the lines, so a judgement needs neither a
port nor a shared folder: either may be what is broken.
"""

from __future__ import annotations

import json
from typing import Any

from hpc_gpt.process import seconds_given

# In an attempt's folder: the figures and the verdict.
PREFLIGHT = "preflight.json"
# Variables of a rank's environment: the seconds it may take; a command whose JSON replaces figures.
LIMIT = "HPC_GPT_PREFLIGHT_S"
COMMAND = "HPC_GPT_PROBE_COMMAND"
# In the attempt's folder during the preflight: a file that every node must see, and one file from each node.
SHARED = "preflight"
SEEN_BY_ALL = "seen-by-all"
NODE_FILE = "node-"

_MARK = "hpc-gpt-preflight "


def limit_s() -> float:
    """The seconds that a preflight may take, by HPC_GPT_PREFLIGHT_S; ConfigError if it is no number of seconds."""
    return seconds_given(LIMIT, "180", "300 where torch loads slowly")


def encode(kind: str, **fields: Any) -> str:
    """The line of a message of that kind, without a newline."""
    return _MARK + json.dumps({"kind": kind, **fields})


def decode(line: str) -> dict[str, Any] | None:
    """The fields of a line, including `kind`; None for any other output."""
    at = line.find(_MARK)  # ranks share a stream: the unfinished line of another may come first
    if at < 0:
        return None
    try:
        found = json.loads(line[at + len(_MARK) :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None
