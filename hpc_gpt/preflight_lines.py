"""The lines between the ranks of a preflight and their judge: on the ranks' stdout, and one line on their stdin.

A rank sends `here` when it starts, `device` with its figures, one `group` for each exchange with others, and `failed`
if it cannot continue. It reads one line with the plan of the exchanges. Slurm transports the lines, so the verdict on a
node needs neither a port nor a shared folder, which may be what is broken.
"""

from __future__ import annotations

import json
from typing import Any

# In an attempt's folder: the figures and the verdict.
PREFLIGHT = "preflight.json"
# In the environment of a rank: how long it may take, in seconds; a command whose JSON replaces figures.
LIMIT = "HPC_GPT_PREFLIGHT_S"
COMMAND = "HPC_GPT_PROBE_COMMAND"
# In the run's attempt folder while the preflight runs: a file that every node must see, and one from each node.
SHARED = "preflight"
SEEN_BY_ALL = "seen-by-all"
NODE_FILE = "node-"

_MARK = "hpc-gpt-preflight "


def encode(kind: str, **fields: Any) -> str:
    """A line of that kind, without its newline."""
    return _MARK + json.dumps({"kind": kind, **fields})


def decode(line: str) -> dict[str, Any] | None:
    """The fields of a line, `kind` among them; None for any other output."""
    at = line.find(_MARK)  # several ranks share a stream: an unfinished line of another may come before it
    if at < 0:
        return None
    try:
        found = json.loads(line[at + len(_MARK) :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None
