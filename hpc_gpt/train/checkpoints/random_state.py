"""Every rank's random generators, kept in a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from hpc_gpt.errors import CheckpointError
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.safe_load import load_safely


def put_random_state(files: RankFiles, rank: int, device: torch.device) -> None:
    """Has the states of this rank's generators written, as tensors and plain numbers."""
    kind, keys, *rest = np.random.get_state()
    numpy = (str(kind), torch.from_numpy(np.asarray(keys, dtype=np.int64)), *rest)
    state = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": numpy}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    files.put(_name(rank), state)


def load_random_state(folder: Path, rank: int, device: torch.device) -> None:
    """Restores them; CheckpointError if this rank left none."""
    path = folder / _name(rank)
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: {path.name} is missing", "the checkpoint is damaged; remove it, and the one before is used"
        )
    state = load_safely(path)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _name(rank: int) -> str:
    return f"random-{rank:05d}.pt"
