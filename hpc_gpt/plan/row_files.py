"""Read files of published rows, and records of runs as rows, so that a user's own jobs can calibrate too.

A file of rows is `{"rows": [...]}` or `{"clusters": {name: [...]}}`. A record has the keys of record.json, as the
records of `report --json` do; it is read as plain JSON.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from hpc_gpt.engines import engines
from hpc_gpt.errors import ConfigError
from hpc_gpt.files import read_json
from hpc_gpt.plan.machine import Machine, machine_named, machine_of
from hpc_gpt.plan.row_fields import OURS
from hpc_gpt.plan.rows import LeftOut, Rows, row_of
from hpc_gpt.settings.cluster import ClusterProfile

# Fields of a row that a record has under the same name, and those that it has under another one.
_SAME = ("gpus", "tp", "pp", "dp", "zero_stage", "hidden", "layers", "heads", "vocab", "seq", "recompute", "dtype")
_OTHERWISE = {"micro_bs": "micro_batch", "global_bs": "global_batch", "engine": "engine", "sec_per_iter": "step_s"}
# Switches in a record's `settings`, and the row's fields that they give.
_SWITCHES = {
    "engine.sequence_parallel": "sequence_parallel",
    "engine.sharded_optimizer": "distributed_optimizer",
    "engine.offload": "offload",
    "engine.activation_offload": "act_cpu_offload",
    "engine.partition": "partition",
    "train.optimizer_mode": "optimizer_mode",
}
_ROWS_HINT = 'a rows file is {"rows": [...]} or {"clusters": {"name": [...]}}: hpc-gpt help rows shows one'
_HINT = "give record.json files, report --json files, run folders, the logs folder, or rows like calibration.json's"
_MOST_FOLDERS = 100_000


def read_rows(path: Path) -> Rows:
    """The rows of a file. ConfigError if it cannot be read, or is no file of rows."""
    return rows_of(_content(path, "give a file of rows that can be read", _ROWS_HINT), str(path))


def rows_of(content: object, where: str) -> Rows:
    """The rows of the parsed JSON of the file `where`. Rows of one machine share a Machine."""
    machine = lru_cache(maxsize=1000)(machine_named)
    tables = content if isinstance(content, Mapping) else {}
    clusters = {None: tables["rows"]} if isinstance(tables.get("rows"), list) else tables.get("clusters")
    if not isinstance(clusters, Mapping) or not all(isinstance(rows, list) for rows in clusters.values()):
        raise ConfigError(f"{where}: neither rows nor clusters of rows", _ROWS_HINT)
    return Rows(
        tuple(
            row_of(row, number, None if name is None else str(name), machine)
            for name, rows in clusters.items()
            for number, row in enumerate(rows, 1)
        )
    )


def read_any(path: Path, profile: ClusterProfile | None) -> Rows:
    """The rows of any file or folder that can calibrate: rows, records, runs.

    Records do not state the network between nodes, so they get the profile's machine: ConfigError without a profile. A
    record of another cluster, or of our own run on a CPU, is left out; a foreign record without a device gets the
    profile's.
    """
    if path.is_dir():
        found = [(str(file.parent), _content(file, _HINT, _HINT)) for file in _record_files(path)]
        if not found:
            raise ConfigError(f"{path}: holds no record.json", "hpc-gpt report writes one for each finished run")
        return _rows_of_records(found, profile)
    content = _content(path, _HINT, _HINT)
    tables = content if isinstance(content, Mapping) else {}
    if "rows" in tables or "clusters" in tables:
        return rows_of(tables, str(path))
    if isinstance(tables.get("records"), list):
        return _rows_of_records([(str(path), record) for record in tables["records"]], profile)
    if "schema" in tables and "step_s" in tables:
        return _rows_of_records([(str(path.parent), tables)], profile)
    raise ConfigError(f"{path}: neither records nor rows", _HINT)


def _rows_of_records(records: list[tuple[str, object]], profile: ClusterProfile | None) -> Rows:
    """Records, each with its file or folder, as rows of the profile's machine."""
    if profile is None:
        raise ConfigError("records do not state the network between nodes", "give --cluster, whose profile does")
    machine = machine_of(profile)

    def of_profile(device: str, per_node: int, fabric: str | None) -> Machine:
        if device != machine.device:
            raise ConfigError(f"device is {device}, but profile {profile.name} has {machine.device}")
        return machine

    tables = [(where, record) for where, record in records if isinstance(record, Mapping)]
    return Rows(
        tuple(
            _elsewhere(record, where, profile)
            or row_of(_record_as_row(record, where, profile), number, profile.name, of_profile)
            for number, (where, record) in enumerate(tables, 1)
        )
    )


def _elsewhere(record: Mapping[str, Any], where: str, profile: ClusterProfile) -> LeftOut | None:
    """The record left out if its run folder says another cluster, or if our run used a CPU instead of a GPU."""
    cluster = _dotted(read_json(Path(where) / "resolved.json"), "cluster.name")
    if cluster is not None and cluster != profile.name:
        reason = f"it ran on cluster {cluster!r:.60}, not on {profile.name}"
    elif record.get("dialect") == OURS and record.get("device") is None and profile.device != "cpu":
        reason = f"it ran on a CPU, not on {profile.device}"
    else:
        return None
    return LeftOut(_name_of(record, where), profile.name, profile.name, reason)


def _name_of(record: Mapping[str, Any], where: str) -> str:
    return str(record.get("run") or record.get("name") or where)


def _record_as_row(record: Mapping[str, Any], where: str, profile: ClusterProfile) -> dict[str, Any]:
    """A record's figures as the fields of a row, with the switches of our own runs."""
    settings = record.get("settings")
    row = {name: record.get(name) for name in _SAME}
    row |= {name: record.get(key) for name, key in _OTHERWISE.items()}
    row |= {
        "id": _name_of(record, where),
        "source": profile.name,
        "device": record.get("device") or profile.device,
        "gpus_per_node": profile.gpus_per_node,
        "fabric": profile.fabric,
        "program": record.get("dialect"),
        "untied": _dotted(settings, "model.tied") is False or None,
    }
    row |= {name: value for key, name in _SWITCHES.items() if (value := _dotted(settings, key)) is not None}
    # Of PyTorch's attention kernels only `math` keeps the scores.
    facts = engines().get(str(record.get("engine")))
    own = None if facts and "attention" not in facts.switches else _dotted(settings, "engine.attention")
    if (attention := record.get("attention_used") or own) is not None:
        row["flash_attention"] = attention != "math"
    if _dotted(settings, "engine.compile") not in (None, "none", False):
        row["options"] = "torch.compile"
    stages = record.get("memory_reserved_gib")
    if isinstance(stages, list) and stages and all(isinstance(figure, (int, float)) for figure in stages):
        row |= {"memory_gib": max(stages), "memory_kind": "reserved"}
    return row


def _dotted(tables: object, key: str) -> Any:
    """The value of a key like `engine.offload` in nested tables, or in a table with dotted keys."""
    if not isinstance(tables, Mapping):
        return None
    if key in tables:
        return tables[key]
    head, _, rest = key.partition(".")
    return _dotted(tables.get(head), rest) if rest else tables.get(head)


def _record_files(folder: Path) -> Iterator[Path]:
    """record.json of a run folder, or of every run in a logs folder (a sweep's runs are one folder deeper)."""
    if (folder / "record.json").is_file():
        yield folder / "record.json"
        return
    for pattern in ("*/record.json", "*/*/record.json"):
        yield from sorted(folder.glob(pattern))[:_MOST_FOLDERS]


def _content(path: Path, hint: str, json_hint: str) -> object:
    """A file's JSON. ConfigError if it cannot be read. A number of 400 digits or more becomes infinite, so that only
    its row is refused."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 400 else float(digits))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", hint) from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", json_hint) from None
