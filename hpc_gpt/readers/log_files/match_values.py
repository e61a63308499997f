"""What a match of a pattern says, by field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hpc_gpt.readers.fields import STEP_FIELDS, scaled
from hpc_gpt.readers.log_files.spans import field_spans
from hpc_gpt.readers.pattern import Pattern
from hpc_gpt.secrets import hide_secrets

LONGEST_TEXT = 1000  # characters of a value


def values_of(line: str, match: re.Match[str], pattern: Pattern) -> dict[str, float | str]:
    """What a match says, by field: figures in the fields' own units, and texts."""
    texts = {name: line[slice(*span)] for name, span in field_spans(line, match, pattern).items()}
    if pattern.kind == "timers":
        return dict(texts)
    stated = {name: float(value) for name, value in pattern.facts.items() if name in STEP_FIELDS}
    return stated | {found[0]: found[1] for name, text in texts.items() if (found := scaled(name, text)) is not None}


def row_of(values: Mapping[str, float | str], at: float | None) -> dict[str, float]:
    """The fields of a line of steps."""
    row = {name: value for name, value in values.items() if name in STEP_FIELDS and isinstance(value, float)}
    return row if at is None else {"at": at} | row


def float_of(values: Mapping[str, float | str], name: str) -> float | None:
    """A field's figure, None without one."""
    value = values.get(name)
    return value if isinstance(value, float) else None


def cut(value: Any) -> Any:
    """The value, a text of bounded length and without what may be a secret: what is found may be kept on disk."""
    return hide_secrets(value[:LONGEST_TEXT]) if isinstance(value, str) else value
