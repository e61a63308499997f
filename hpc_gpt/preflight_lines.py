"""What the ranks of a preflight and the one that judges them say to each other: lines of stdout, and one of stdin.

A rank says `here` as it starts, `device` with its figures, one `group` for each exchange with others, and `failed`
where it cannot go on. In between it is told who takes part in the exchanges. Slurm carries the lines, so neither a
port nor a shared folder, which may be what is broken, stands between a node and its verdict.
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
    """A line that says `kind`, without its end."""
    return _MARK + json.dumps({"kind": kind, **fields})


def decode(line: str) -> dict[str, Any] | None:
    """The fields of a line, `kind` among them; None for any other output."""
    at = line.find(_MARK)  # several ranks share a stream: what another left unfinished may stand before it
    if at < 0:
        return None
    try:
        found = json.loads(line[at + len(_MARK) :])
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("kind"), str) else None
