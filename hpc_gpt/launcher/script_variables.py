"""The variables of the submitter's environment that a job script reads: by name, with a salted hash of each value.

A script that is resumed from another shell may find other values, or none. No value is stored.
"""

import hashlib
import os
import re
from collections.abc import Mapping
from typing import Any

_READS = re.compile(r"\$\{?[#!]?([A-Za-z_]\w*)")
_SETS = re.compile(
    r"(?m)(?:^|[;&|(]|\bthen|\bdo|\belse)[ \t]*(?:(?:export|local|declare|typeset|readonly)[ \t]+(?:-\w+[ \t]+)*)?"
    r"([A-Za-z_]\w*)\+?=|\bfor[ \t]+([A-Za-z_]\w*)\b|\bread[ \t]+(?:-\w+[ \t]+)*([A-Za-z_]\w*)"
)
# Variables of the job, of the run, of the shell itself, and of every login.
_NOT_THE_USERS = re.compile(
    r"(?:SLURM|HPC_GPT|BASH)\w*|CUDA_VISIBLE_DEVICES|ROCR_VISIBLE_DEVICES|HOME|USER|LOGNAME|UID|EUID|PWD|OLDPWD|SHELL|PATH"
    r"|LD_LIBRARY_PATH|HOSTNAME|RANDOM|SECONDS|LINENO|PPID|IFS|TMPDIR|TERM|LANG|DISPLAY"
)
_MAX_NAMES = 100


def hash_variables(script: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """The table that provenance.json keeps: `salt`, and `values` {name: hash of its value, None if it is unset} for the
    variables that the text of a script reads and does not set."""
    text = "\n".join(line for line in script.splitlines() if not line.lstrip().startswith("#"))
    is_set = {name for names in _SETS.findall(text) for name in names if name}
    names = [name for name in dict.fromkeys(_READS.findall(text)) if name not in is_set]
    names = [name for name in names if not _NOT_THE_USERS.fullmatch(name)][:_MAX_NAMES]
    salt = os.urandom(8).hex()
    return {"salt": salt, "values": {name: _hash(salt, environment.get(name)) for name in names}}


def describe_changes(table: Mapping[str, Any], environment: Mapping[str, str]) -> str | None:
    """A sentence on the variables that have another value now, or none, than in the table; None if all are the same."""
    values, salt = table.get("values"), str(table.get("salt"))
    differing = []
    for name, stored in values.items() if isinstance(values, dict) else ():
        if _hash(salt, environment.get(name)) != stored:
            state = "differs now" if stored is not None else "is set only now"
            differing.append(f"{name}, which {state if name in environment else 'is unset now'}")
    return f"the script reads {'; '.join(differing)}: at its submission it was otherwise" if differing else None


def _hash(salt: str, value: str | None) -> str | None:
    return None if value is None else hashlib.sha256(f"{salt}{value}".encode(errors="surrogateescape")).hexdigest()[:16]
