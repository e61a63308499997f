"""Which model, layout and arithmetic a checkpoint is of: a small model.json in it, compared before anything loads."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpc_gpt.errors import CheckpointError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles

NAME = "model.json"
# Of keys that checkpoints did not have from the first day: what those before were.
_BEFORE = {"engine.partition": "layers", "engine.tiles": 1}


def identity(resolved: Resolved) -> dict[str, Any]:
    """What must agree for a checkpoint to be loaded, by the names a user gives them."""
    engine = resolved.engine
    partition = engine.partition
    return {
        **{f"model.{key}": value for key, value in asdict(resolved.model).items()},
        **{f"layout.{key}": value for key, value in asdict(resolved.layout).items()},
        "engine.name": engine.name,
        "engine.zero_stage": engine.zero_stage,
        "engine.partition": list(partition) if isinstance(partition, tuple) else partition,
        "engine.tiles": engine.tiles,
        "train.dtype": resolved.train.dtype,
        "train.optimizer": resolved.train.optimizer,
    }


def put_identity(files: RankFiles, resolved: Resolved, step: int) -> None:
    """Has model.json written into the checkpoint; one rank does."""
    files.put_text(NAME, json.dumps({"step": step, **identity(resolved)}, indent=1) + "\n")


def check_identity(folder: Path, resolved: Resolved, convertible: frozenset[str] = frozenset()) -> frozenset[str]:
    """The keys in which the checkpoint differs from this run, all of them `convertible`; empty where it is of the same.

    CheckpointError, with every difference named, for a checkpoint of another model or arithmetic, or of another layout
    that the engine cannot take its share of.
    """
    saved = _BEFORE | read_identity(folder)
    wanted = identity(resolved)
    differences = {key: value for key, value in wanted.items() if saved.get(key) != value}
    if not differences.keys() <= convertible:
        of_model = any(key.startswith("model.") for key in differences)
        words = (f"{key} is {saved.get(key)} there and {value} here" for key, value in differences.items())
        raise CheckpointError(
            f"{folder} is a checkpoint of another {'model' if of_model else 'layout or arithmetic'}: "
            + "; ".join(words),
            "resume with the settings it was saved with, or start a new run",
        )
    return frozenset(differences)


def read_identity(folder: Path) -> dict[str, Any]:
    """What `put_identity` left, `step` with it; CheckpointError where it cannot be read."""
    try:
        saved: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"{folder}: {NAME} cannot be read: {fault}",
            "the checkpoint is damaged; remove it, and the one before is used",
        ) from None
    return saved
