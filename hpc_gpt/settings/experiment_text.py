"""A resolved run written back as an experiment."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from hpc_gpt.settings.resolve import Resolved

NO_EXPERIMENT = "No EXPERIMENT was named: the defaults, and the options of the command line."


def experiment_tables(resolved: Resolved) -> dict[str, dict[str, Any]]:
    """The tables of an experiment that resolves to `resolved` under the same profile; None where nothing is set."""
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
    return {
        "model": {"preset": resolved.preset, **asdict(resolved.model)},
        "data": asdict(resolved.data),
        "engine": asdict(resolved.engine),
        "layout": layout,
        "train": asdict(resolved.train),
        "job": job,
    }


def experiment_text(resolved: Resolved, comment: str) -> str:
    """The same as TOML, below a line that says where it comes from."""
    lines = [f"# {comment}", f"name = {_toml(resolved.name)}"]
    for name, table in experiment_tables(resolved).items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {_toml(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    """A value as TOML. JSON's strings, numbers and lists are TOML's too, but for the escape of a lone surrogate."""
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
