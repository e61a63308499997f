"""Completes a run folder that a plain `sbatch job.sh` made: it has job.sh and resolved.json, and lacks the rest."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hpc_gpt.ds_config import ENGINES, deepspeed_config
from hpc_gpt.provenance import collect
from hpc_gpt.resolve import Resolved
from hpc_gpt.run_folder import RunFolder, write_once


def complete_run(run: RunFolder, resolved: Resolved) -> None:
    """Writes experiment.toml, provenance.json and a DeepSpeed engine's ds_config.json where they are missing.

    Raises RunFolderError where the folder cannot be written.
    """
    if not (run.path / "experiment.toml").exists():
        write_once(run.path / "experiment.toml", experiment_text(resolved))
    if resolved.engine.name in ENGINES and not (run.path / "ds_config.json").exists():
        write_once(run.path / "ds_config.json", json.dumps(deepspeed_config(resolved), indent=1) + "\n")
    if not (run.path / "provenance.json").exists():
        write_once(run.path / "provenance.json", json.dumps(collect(), indent=1) + "\n")


def experiment_text(resolved: Resolved) -> str:
    """An experiment that resolves to `resolved` under the same cluster profile, as TOML."""
    profile = resolved.cluster
    job = asdict(resolved.job)
    # What resolving lays under the experiment's own flags is taken off again.
    job["sbatch"] = resolved.job.sbatch[len(profile.sbatch) :]
    job["srun"] = resolved.job.srun[len(profile.srun) :]
    per_node = resolved.ranks_per_node
    layout = {
        "gpus": resolved.gpus,
        "nodes": resolved.nodes,
        **asdict(resolved.layout),
        **asdict(resolved.batch),
        "allow_tp_across_nodes": bool(per_node % resolved.layout.tp),
    }
    tables: dict[str, dict[str, Any]] = {
        "model": {"preset": resolved.preset, **asdict(resolved.model)},
        "data": asdict(resolved.data),
        "engine": asdict(resolved.engine),
        "layout": layout,
        "train": asdict(resolved.train),
        "job": job,
    }
    lines = ["# Written by the trainer from resolved.json.", f"name = {_toml(resolved.name)}"]
    for name, table in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML. JSON's strings, numbers and lists are TOML's too, but for the escape of a lone surrogate."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
