"""Which model, layout and arithmetic a checkpoint is of: a small model.json in it, compared before anything loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_gpt.errors import CheckpointError
from hpc_gpt.resolve import Resolved

NAME = "model.json"


def identity(resolved: Resolved) -> dict[str, Any]:
    """What must agree for a checkpoint to be loaded, by the names a user gives them."""
    engine = resolved.engine
    return {
        **{f"model.{key}": value for key, value in asdict(resolved.model).items()},
        **{f"layout.{key}": value for key, value in asdict(resolved.layout).items()},
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "train.dtype": resolved.train.dtype,
        "train.optimizer": resolved.train.optimizer,
    }


def write_identity(folder: Path, resolved: Resolved, step: int) -> None:
    """Writes model.json into the checkpoint; one rank does."""
    text = json.dumps({"step": step, **identity(resolved)}, indent=1) + "\n"
    (folder / NAME).write_text(text, encoding="utf-8")


def check_identity(folder: Path, resolved: Resolved) -> None:
    """CheckpointError, with every difference named, unless the checkpoint is of this model and layout."""
    try:
        saved = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"{folder}: {NAME} cannot be read: {fault}",
            "the checkpoint is damaged; remove it, and the one before is used",
        ) from None
    wanted = identity(resolved)
    differences = [
        f"{key} is {saved.get(key)} there and {value} here" for key, value in wanted.items() if saved.get(key) != value
    ]
    if differences:
        of_model = any(line.startswith("model.") for line in differences)
        raise CheckpointError(
            f"{folder} is a checkpoint of another {'model' if of_model else 'layout or arithmetic'}: "
            + "; ".join(differences),
            "resume with the settings it was saved with, or start a new run",
        )
