"""DeepSpeed's checkpoints through its own plug: what it would write is named for `RankFiles`, what it reads is data.

So its files are the same, but the disk is none of its business: no rank can meet a full one between two barriers.
"""

from __future__ import annotations

import os
from typing import Any

from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.safe_load import load_safely
from hpc_gpt.train.engines.deepspeed_setup import TAG, quiet


class NamedFiles(CheckpointEngine):  # type: ignore[misc]
    """Stands where DeepSpeed's writer and reader stood."""

    def __init__(self) -> None:
        super().__init__()
        self.name = "hpc-gpt"
        self.files: RankFiles | None = None
        self.root = ""

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The writer makes what it needs."""

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed should copy a state first; the writer takes of it what there is to write."""
        return False

    def save(self, state_dict: Any, path: str) -> None:
        """Names one file."""
        assert self.files is not None, "save by save_deepspeed"
        self.files.put(os.path.relpath(path, self.root), state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file, and runs nothing of it."""
        return load_safely(path, map_location=map_location or "cpu")

    def commit(self, info: Any) -> bool:
        """The checkpoint is complete when all ranks have written."""
        return True


def plug_in(engine: Any) -> None:
    """Gives DeepSpeed's `engine` the plug. Its scripts for reading a checkpoint, which run what they read, stay out."""
    engine.checkpoint_engine = NamedFiles()
    engine._copy_recovery_script = lambda save_path: None


def save_deepspeed(engine: Any, files: RankFiles) -> None:
    """Names the files of DeepSpeed's own checkpoint; all ranks together."""
    plug: NamedFiles = engine.checkpoint_engine
    plug.files, plug.root = files, "/checkpoint"
    try:
        with quiet():
            engine.save_checkpoint(plug.root, tag=TAG, save_latest=False)
    finally:
        plug.files = None
