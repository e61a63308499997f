"""A run's settings in one row, and those in which two runs differ."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hpc_gpt.runs.record import Record
from hpc_gpt.secrets import without_secrets

# Keys of a record that are settings, those that decide speed first. What follows them is `settings.*`.
SETTING_KEYS = (
    "device", "gpus", "nodes", "engine", "tp", "pp", "dp", "zero_stage", "micro_batch", "micro_batches",
    "global_batch", "seq", "params", "hidden", "layers", "heads", "vocab", "recompute", "dtype", "attention_used",
)  # fmt: skip
# Of our own runs these stand in `settings` as well.
_TWICE = frozenset(("engine.name", "engine.zero_stage", "engine.recompute", "train.dtype"))
# What foreign logs say of a run beside its settings.
_FIGURES = frozenset(("timers_ms",))
# What in a setting's key says that it decides speed, and which words of it that it only names things.
_FAST = re.compile(
    r"parallel|zero|stage|offload|recompute|checkpoint_activ|checkpoint_num|attention|flash|compile|fus|overlap|bucket"
    r"|prefetch|batch|accumulation|nccl|precision|bf16|fp16|fp8|tf32|worker|reshard|optimizer|experts|capacity"
)
_NAMING = (
    "path", "paths", "dir", "folder", "file", "files", "save", "load", "name", "project", "entity", "wandb",
    "tensorboard", "log", "logging", "host", "hostname", "addr", "port", "rank", "time", "date", "title", "version",
    "user", "tag", "output", "exit", "prompt", "resumed", "sweep", "interval",
)  # fmt: skip
_SWITCHES = {"true": 1.0, "yes": 1.0, "on": 1.0, "false": 0.0, "no": 0.0, "off": 0.0, "none": 0.0, "null": 0.0}


@dataclass(frozen=True)
class Apart:
    """A setting that two runs do not share; None where one does not state it."""

    key: str
    a: Any
    b: Any

    @property
    def is_stated(self) -> bool:
        """Whether both state it: only then do they differ for certain."""
        return self.a is not None and self.b is not None


def flat_settings(record: Record) -> dict[str, Any]:
    """Every stated setting under a dotted key, versions too, in the order of SETTING_KEYS; without secrets."""
    found = {key: getattr(record, key) for key in SETTING_KEYS}
    own = _flat(without_secrets({key: value for key, value in record.settings.items() if key not in _FIGURES}))
    found |= {key: value for key, value in own.items() if key not in _TWICE and key not in found}
    found |= {"node_list": record.node_list}
    found |= {f"versions.{key}": value for key, value in record.versions.items()}
    return {key: value for key, value in found.items() if value is not None}


def settings_apart(a: Record, b: Record) -> list[Apart]:
    """The settings in which two runs differ, what decides speed first; at the end what only one of them states."""
    of_a, of_b = flat_settings(a), flat_settings(b)
    found = [
        Apart(key, of_a.get(key), of_b.get(key))
        for key in {**of_a, **of_b}
        if _plain(of_a.get(key)) != _plain(of_b.get(key))
    ]
    if a.config_hash and b.config_hash and a.config_hash != b.config_hash:
        found.append(Apart("config_hash", a.config_hash, b.config_hash))
    return sorted(found, key=_weight)


def _weight(apart: Apart) -> tuple[bool, int, int]:
    known = {key: place for place, key in enumerate(SETTING_KEYS)}
    if apart.key in known:
        return not apart.is_stated, 0, known[apart.key]
    if apart.key == "config_hash":
        return not apart.is_stated, 5, 0
    if apart.key == "node_list" or apart.key.startswith("versions."):
        return not apart.is_stated, 3, 0
    key = apart.key.lower()
    if any(word in _NAMING for word in re.split(r"[^a-z0-9]+", key)):
        return not apart.is_stated, 4, 0
    return not apart.is_stated, 1 if _FAST.search(key) else 2, 0


def _flat(settings: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for quoted, value in settings.items():
        key = str(quoted).strip("\"' ")
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{before}{key}.")
        elif isinstance(value, list | tuple):
            flat[f"{before}{key}"] = json.dumps(value, default=str)
        else:
            flat[f"{before}{key}"] = value
    return flat


def _plain(value: Any) -> Any:
    """The value for a comparison: what one program prints as `False` is 0, `false` or `None` in another."""
    if isinstance(value, str):
        text = value.strip().lower()
        if text in _SWITCHES:
            return _SWITCHES[text]
        try:
            value = float(text)
        except ValueError:
            # A list of one, as argparse makes it of nargs="*".
            return text[2:-2] if text.startswith(("['", '["')) and text.count(",") == 0 else text
    if isinstance(value, bool | int | float):
        return "nan" if math.isnan(value) else float(value)
    return value
