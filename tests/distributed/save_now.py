"""A checkpoint of an engine's in one go, with neither loop nor thread: what the tests of engines save and load."""

from pathlib import Path
from typing import Any

import torch.distributed as dist

from hpc_gpt.trainer.train.checkpoints.rank_files import HostCopies, RankFiles
from hpc_gpt.trainer.train.ranks import Ranks


class _Everyone(Ranks):
    """The ranks of a test, which have met without a run."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.is_first = self.rank == 0
        self.control = dist.group.WORLD


def save_now(engine: Any, folder: Path, from_copies: bool = True) -> None:
    """Writes it into an existing folder; `from_copies` as in the background, else from the training's own tensors."""
    files = RankFiles(_Everyone())
    engine.save(files)
    if from_copies:
        files.copy(HostCopies())
    _, own = files.write(folder)
    notes = files.peers.gather(own)
    if files.peers.is_first:
        files.finish(folder, [note for part in notes for note in part])
    dist.barrier()
