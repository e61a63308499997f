"""The small JSON files of a run, and the types of their keys. All reading of them goes through this module.

A file may be half written, edited, or written by another version. A value that its key cannot have is left out, as if
the key were missing; a null and a key that is not listed stay.
"""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.core.files import (
    MOST_BYTES,
    json_lines_from_end,
    json_object,
    last_json_line,
    read_json,
    read_json_lines,
    read_start,
)
from hpc_gpt.core.typed_tables import fits, from_tables

# The name of a host or a Slurm cluster, and a job id in Slurm's form: they become parts of commands and file names.
NODE = re.compile(r"[A-Za-z0-9][\w.-]{0,80}", re.ASCII)
_JOB_ID = re.compile(r"[\w.\[\]+-]{1,64}")
_UNSOUND: Any = object()  # stands for a value that its key cannot have
# The keys per file, by its name up to the first dot or hyphen. No number is negative.
_KEYS: Mapping[str, Mapping[str, Any]] = {
    "attempt": {"job_id": _JOB_ID, "job": _JOB_ID, "slurm_cluster": NODE, "gpus": int, "started": float, "boot": str,
                "uptime": float, "restart": int, "in_job": int},
    "submissions": {"job_id": _JOB_ID, "job": _JOB_ID, "slurm_cluster": NODE, "time": float, "folder": str,
                    "attempts_before": int, "call": str, "lost": str, "element": str, "clusters": str},
    "ended": {"ended": str, "cause": str, "step": int, "time": float, "node": NODE, "code": int,
              "elapsed_s": float},
    "exit": {"code": int, "seconds": float},
    "next": {
        "ended": str, "attempt_ended": str, "cause": str, "why": str, "time": float, "node": NODE, "exclude": [NODE],
        "saved_step": int, "pause_s": float, "begin": float, "retries": int, "elapsed_s": float,
        "damaged_checkpoint": str,
    },
    "seen": {"step": int, "count": int},
    "job": {"job_id": _JOB_ID, "time": float, "pid_start": str},
    "left": {"state": str},
    "outputs": {"files": [str]},
    "trainer": {"resumed_step": int, "device": str, "attention_failed": dict, "experts_by_loop": str},
    "resume": {"path": str, "step": int},
    "measured": {"skipped_shards": int},
    "start": {"start_s": float, "start_parts": dict},
    "metrics": {"step": int, "step_s": float, "steps_planned": int, "time": float},
    "loss": {"time": float},
    "complete": {"step": int, "files": dict, "data": str},
    "sweep": {"id": str, "varied": dict, "round": int},
    "provenance": {"data_beside": str, "experiment_file": str, "versions": dict, "init": dict},
    "resumed_from": {"path": str, "step": int, "branch": bool},
    "branch": {"path": str, "step": int},
    "predicted": {
        "calibrated": bool, "memory_gib": {"stages": [{"allocated": float}]}, "step": {"step_s": float, "band": float},
    },
    "preflight": {"took_s": float, "findings": [{"node": NODE, "words": str}]},
    "bench": {"bench": str, "records": [{}], "rows": [{"cell": str, "ratio": float, "tokens_per_s": [float],
              "tenth_step_s": [float]}]},
    "rows": {"rounds": int, "rows": [{"name": str, "cause": str, "place": int, "submit": str,
             "predicted_step_s": float}]},
    "cancelled": {"user": str, "time": float},
    "excluded": {"nodes": dict},
    "queue": {"words": str, "time": float},
    "track": {"id": str},
    "ds_config": {"zero_optimization": {"stage": int}},
    "processes": {"boot": str, "pid_namespace": str, "processes": dict},
}  # fmt: skip


def _sound(path: Path, tables: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a file, without values that their keys cannot have; job ids become texts."""
    sound: dict[str, Any] = _sound_part(tables, _KEYS[re.split("[.-]", path.name, maxsplit=1)[0]])
    return sound | {"job_id": str(sound["job_id"])} if sound.get("job_id") is not None else sound


def _sound_part(value: Any, kind: Any) -> Any:
    """The value, without the unsound keys of its objects; _UNSOUND if it is of another kind."""
    if isinstance(kind, dict) and isinstance(value, dict):
        parts = {
            key: part if part is None or key not in kind else _sound_part(part, kind[key])
            for key, part in value.items()
        }
        return {key: part for key, part in parts.items() if part is not _UNSOUND}
    if isinstance(kind, list) and isinstance(value, list):
        items = [_sound_part(item, kind[0]) for item in value]
        return items if _UNSOUND not in items else _UNSOUND
    if isinstance(kind, re.Pattern):
        is_sound = fits(value, str | int if kind is _JOB_ID else str) and bool(kind.fullmatch(str(value)[:99]))
    else:
        is_sound = isinstance(kind, type) and fits(value, kind) and (kind not in (int, float) or value >= 0)
    return value if is_sound else _UNSOUND


def read_stored(path: Path) -> dict[str, Any]:
    """The sound keys of a file; empty if the file is missing or is not a JSON object."""
    return _sound(path, read_json(path))


def read_last_stored_line(path: Path) -> dict[str, Any]:
    """The sound keys of the last line of a file that is a JSON object; empty if there is none."""
    return _sound(path, last_json_line(path))


def read_stored_lines(path: Path, last_bytes: int | None = None, first_bytes: int = -1) -> list[dict[str, Any]]:
    """The sound keys of each line of a file, or of its last or first bytes, without lines that are not JSON objects."""
    return [_sound(path, line) for line in read_json_lines(path, last_bytes, first_bytes)]


def stored_lines_from_end(path: Path) -> Iterator[dict[str, Any]]:
    """The sound keys of each line of a file of any size, the last one first."""
    return (_sound(path, line) for line in json_lines_from_end(path))


def read_as(kind: Any, path: Path | str) -> Any:
    """The object of dataclass `kind` in a file; None if the file is missing, damaged or from another version."""
    try:
        return _as(kind, json.loads(read_start(path, MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None


def read_lines_as(kind: Any, path: Path | str, first_bytes: int = -1) -> list[Any]:
    """The objects of dataclass `kind` in the lines of a file, or of its first bytes, without lines that are damaged or
    from another version."""
    try:
        lines = read_start(path, first_bytes).split(b"\n") if first_bytes >= 0 else None
    except OSError:
        return []
    objects = read_json_lines(Path(path)) if lines is None else [json_object(line) for line in lines if line]
    return [made for tables in objects if tables is not None and (made := _as(kind, tables)) is not None]


def _as(kind: Any, tables: Any) -> Any:
    try:
        return from_tables(kind, tables)
    except (ValueError, KeyError, TypeError):
        return None
