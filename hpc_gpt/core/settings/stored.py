"""A run's settings back as an experiment: its tables, the object, and the text of its file."""

from dataclasses import MISSING, asdict, fields
from typing import Any

from hpc_gpt.core.settings.experiment import Experiment
from hpc_gpt.core.settings.key_rules import without_defaults
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.services import SERVICES
from hpc_gpt.core.settings.sized import Sized, model_table, program_tables
from hpc_gpt.core.tables import toml_lines
from hpc_gpt.core.typed_tables import read_tables


def experiment_tables(resolved: Sized) -> dict[str, dict[str, Any]]:
    """The tables of an experiment that resolves to `resolved` with the same profile; open keys are None."""
    profile = resolved.cluster
    job = asdict(resolved.job)
    # `resolve` puts the profile's flags before the experiment's own.
    job["sbatch"] = resolved.job.sbatch[len(profile.sbatch) :]
    job["srun"] = resolved.job.srun[len(profile.srun) :]
    layout = {
        "gpus": resolved.gpus,
        "nodes": resolved.nodes,
        **asdict(resolved.layout),
        "cp": resolved.layout.cp if resolved.layout.cp > 1 else None,
        "ep": resolved.layout.ep if resolved.layout.ep > 1 else None,
        **{name: size or None for name, size in vars(resolved.batch).items()},
        "allow_tp_across_nodes": bool(resolved.ranks_per_node % resolved.layout.tp),
    }
    return {
        "model": {"preset": resolved.preset, **model_table(resolved)},
        "data": asdict(resolved.data),
        "engine": asdict(resolved.engine),
        "layout": layout,
        "train": asdict(resolved.train),
        "job": job,
        **program_tables(resolved),
        **{name: without_defaults(table := getattr(resolved, name), vars(table)) for name in SERVICES},
    }


def experiment_of(resolved: Sized) -> Experiment:
    """The experiment that resolves to `resolved` with the same profile."""
    command = {} if resolved.command is None else {"command": asdict(resolved.command)}
    return read_tables({"name": resolved.name, **experiment_tables(resolved), **command}, Experiment, "")[0]


def experiment_text(resolved: Resolved, comment: str) -> str:
    """The TOML text of that experiment, after a line with `comment`."""
    lines = [f"# {comment}", *toml_lines({"name": resolved.name})]
    kinds = {entry.name: entry.default_factory for entry in fields(Experiment) if entry.default_factory is not MISSING}
    for name, table in experiment_tables(resolved).items():
        if given := toml_lines(without_defaults(kinds[name], table)):
            lines += ["", f"[{name}]", *given]
    return "\n".join(lines) + "\n"
