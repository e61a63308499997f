"""Completes a run folder that a plain `sbatch job.sh` made: it has job.sh and resolved.json, and lacks the rest."""

from __future__ import annotations

import json

from hpc_gpt.runs.provenance import collect
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.settings.ds_config import ENGINES, deepspeed_config
from hpc_gpt.settings.resolve import Resolved, experiment_text
from hpc_gpt.small_files import write_once


def complete_run(run: RunFolder, resolved: Resolved) -> None:
    """Writes experiment.toml, provenance.json and a DeepSpeed engine's ds_config.json where they are missing.

    Raises RunFolderError where the folder cannot be written.
    """
    if not (run.path / "experiment.toml").exists():
        write_once(
            run.path / "experiment.toml", experiment_text(resolved, "Written by the trainer from resolved.json.")
        )
    if resolved.engine.name in ENGINES and not (run.path / "ds_config.json").exists():
        write_once(run.path / "ds_config.json", json.dumps(deepspeed_config(resolved), indent=1) + "\n")
    if not (run.path / "provenance.json").exists():
        write_once(run.path / "provenance.json", json.dumps(collect(), indent=1) + "\n")
