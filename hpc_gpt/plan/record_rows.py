"""Records of runs as rows, so that what one's own jobs took calibrates like what others published.

A record is record.json's keys, or one of `report --json`'s records. It is read as JSON alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.machine import Machine
from hpc_gpt.plan.machines import machine_of
from hpc_gpt.plan.row_words import OURS
from hpc_gpt.plan.rows import LeftOut, Rows, read_rows_json, row_of, rows_of
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.small_files import read_json

# A row's field by the record's key.
_SAME = ("gpus", "tp", "pp", "dp", "zero_stage", "hidden", "layers", "heads", "vocab", "seq", "recompute", "dtype")
_OTHERWISE = {"micro_bs": "micro_batch", "global_bs": "global_batch", "engine": "engine", "sec_per_iter": "step_s"}
# Switches of the experiment, as a record keeps them in `settings`, and the row's fields they become.
_SWITCHES = {
    "engine.sequence_parallel": "sequence_parallel",
    "engine.sharded_optimizer": "distributed_optimizer",
    "engine.offload": "offload",
    "engine.activation_offload": "act_cpu_offload",
    "engine.partition": "partition",
    "train.optimizer_mode": "optimizer_mode",
}
_HINT = "give record.json files, report --json files, run folders, the logs folder, or rows like calibration.json's"
_MOST_FOLDERS = 100_000


def read_any(path: Path, profile: ClusterProfile | None) -> Rows:
    """The rows of a file or folder of any kind that can calibrate.

    Records take the profile's machine, since they do not say what joins nodes: ConfigError where there is no profile.
    One of another cluster, or of our own on a CPU, is left out; a foreign one that states no device is the profile's.
    """
    if path.is_dir():
        found = [(str(file.parent), _content(file)) for file in _record_files(path)]
        if not found:
            raise ConfigError(f"{path}: holds no record.json", "hpc-gpt report writes one for each finished run")
        return records_as_rows([(where, tables) for where, tables in found if isinstance(tables, Mapping)], profile)
    content = _content(path)
    if isinstance(content, Mapping) and ("rows" in content or "clusters" in content):
        return rows_of(content, str(path))
    records = content.get("records") if isinstance(content, Mapping) else None
    if isinstance(records, list):
        return records_as_rows([(str(path), tables) for tables in records if isinstance(tables, Mapping)], profile)
    if isinstance(content, Mapping) and "schema" in content and "step_s" in content:
        return records_as_rows([(str(path.parent), content)], profile)
    raise ConfigError(f"{path}: neither records nor rows", _HINT)


def records_as_rows(records: list[tuple[str, Mapping[str, Any]]], profile: ClusterProfile | None) -> Rows:
    """Records, each with where it is from, as rows of the profile's machine."""
    if profile is None:
        raise ConfigError("records do not say what joins the nodes", "give --cluster, whose profile does")
    machine = machine_of(profile)

    def of_profile(device: str, per_node: int, fabric: str | None) -> Machine:
        if device != machine.device:
            raise ConfigError(f"device is {device}, but profile {profile.name} has {machine.device}")
        return machine

    return Rows(
        tuple(
            _elsewhere(tables, where, profile)
            or row_of(record_as_row(tables, where, profile), number, profile.name, of_profile)
            for number, (where, tables) in enumerate(records, 1)
        )
    )


def _elsewhere(record: Mapping[str, Any], where: str, profile: ClusterProfile) -> LeftOut | None:
    """A record that another cluster left, by the settings in its run folder, or a CPU in a GPU's place."""
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


def record_as_row(record: Mapping[str, Any], where: str, profile: ClusterProfile) -> dict[str, Any]:
    """A record's figures under a row's fields."""
    row = {name: record.get(name) for name in _SAME}
    row |= {name: record.get(key) for name, key in _OTHERWISE.items()}
    row["id"] = _name_of(record, where)
    row["source"] = profile.name
    row["device"] = record.get("device") or profile.device
    row["gpus_per_node"] = profile.gpus_per_node
    row["fabric"] = profile.fabric
    row["program"] = record.get("dialect")
    row |= _of_settings(record.get("settings"), row["engine"])
    if record.get("attention_used") is not None:
        row["flash_attention"] = record["attention_used"] != "math"
    stages = record.get("memory_reserved_gib")
    if isinstance(stages, list) and stages and all(isinstance(figure, (int, float)) for figure in stages):
        row |= {"memory_gib": max(stages), "memory_kind": "reserved"}
    return row


def _of_settings(settings: object, engine: object) -> dict[str, Any]:
    """What the switches of one of our own runs say; empty for a run that has none."""
    row = {name: value for key, name in _SWITCHES.items() if (value := _dotted(settings, key)) is not None}
    attention = _dotted(settings, "engine.attention")
    if attention is not None and engine != "megatron-lm":
        # PyTorch's kernels, of which `math` alone keeps the scores, on any device.
        row["flash_attention"] = attention != "math"
    if _dotted(settings, "engine.compile") not in (None, "none", False):
        row["options"] = "torch.compile"
    if _dotted(settings, "model.tied") is False:
        row["untied"] = True
    return row


def _dotted(tables: object, key: str) -> Any:
    """`engine.offload` of nested tables or of a table with dotted keys."""
    if not isinstance(tables, Mapping):
        return None
    if key in tables:
        return tables[key]
    head, _, rest = key.partition(".")
    return _dotted(tables.get(head), rest) if rest else tables.get(head)


def _record_files(folder: Path) -> Iterator[Path]:
    """record.json of a run folder, or of every run of a logs folder (sweeps' runs lie one folder deeper)."""
    if (folder / "record.json").is_file():
        yield folder / "record.json"
        return
    for pattern in ("*/record.json", "*/*/record.json"):
        for count, file in enumerate(sorted(folder.glob(pattern))):
            if count >= _MOST_FOLDERS:
                return
            yield file


def _content(path: Path) -> object:
    try:
        return read_rows_json(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise ConfigError(f"{path}: {fault.strerror or fault}", _HINT) from None
    except (ValueError, RecursionError) as fault:
        raise ConfigError(f"{path}: no JSON: {str(fault)[:200]}", _HINT) from None
