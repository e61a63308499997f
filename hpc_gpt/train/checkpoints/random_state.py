"""Every rank's random generators, kept in a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from hpc_gpt.errors import CheckpointError


def save_random_state(folder: Path, rank: int, device: torch.device) -> None:
    """Writes the states of this rank's generators into `folder`."""
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    torch.save(state, _path(folder, rank))


def load_random_state(folder: Path, rank: int, device: torch.device) -> None:
    """Restores them; CheckpointError if this rank left none."""
    path = _path(folder, rank)
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: {path.name} is missing", "the checkpoint is damaged; remove it, and the one before is used"
        )
    state = torch.load(path, weights_only=False)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _path(folder: Path, rank: int) -> Path:
    return folder / f"random-{rank:05d}.pt"
