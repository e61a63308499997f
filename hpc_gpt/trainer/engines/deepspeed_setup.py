"""Adapts DeepSpeed to our engines: imports it silently for the right device, and takes over its checkpoints' files.

Its checkpoints go through our own checkpoint engine, which adds the files to `RankFiles` instead of writing them, and
reads them as plain data. So the files are the same, but no rank can find the disk full between two barriers.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hpc_gpt.core.process import no_collections
from hpc_gpt.trainer.checkpoints.folders import load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.engines.library_patches import use_gloo

# The folder of DeepSpeed's part of a checkpoint.
TAG = "deepspeed"


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for the device, silently and without compiling anything.

    Raises ConfigError if this version would compile something.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        with no_collections():
            import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # DeepSpeed calls collectives by names that torch deprecates.
        warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
        if device.type == "cpu":
            use_gloo(deepspeed)
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context that discards DeepSpeed's output during set-up, saves and loads; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


class NamedFiles:
    """A checkpoint engine for DeepSpeed that adds files to `RankFiles` instead of writing them.

    `library_patches.use_checkpoint_engine` makes DeepSpeed use it.
    """

    files: RankFiles | None = None
    root = ""

    def create(self, info: Any) -> None:
        """Does nothing: there is nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: `RankFiles` makes the folders."""

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed must copy a state before saving it. No: `RankFiles` writes no more than a tensor needs."""
        return False

    def save(self, state_dict: Any, path: str) -> None:
        """Adds one file."""
        assert self.files is not None, "save by save_deepspeed"
        self.files.put(os.path.relpath(path, self.root), state_dict)

    def load(self, path: str, map_location: Any = None) -> Any:
        """Reads one file as plain data."""
        return load_safely(path, map_location=map_location or "cpu")

    def commit(self, info: Any) -> bool:
        """Does nothing: the checkpoint is complete when all ranks have written."""
        return True


def save_deepspeed(engine: Any, files: RankFiles) -> None:
    """Adds the files of DeepSpeed's own checkpoint. Collective."""
    plug: NamedFiles = engine.checkpoint_engine
    plug.files, plug.root = files, "/checkpoint"
    try:
        with quiet():
            engine.save_checkpoint(plug.root, tag=TAG, save_latest=False)
    finally:
        plug.files = None
