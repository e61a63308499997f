"""DeepSpeed as our engines need it: imported for the right device, quiet, its files named and not written.

DeepSpeed's checkpoints go through a checkpoint engine of our own. What DeepSpeed would write is named for `RankFiles`,
and what it reads is data. So its files are the same, but it does not touch the disk: no rank can find the disk full
between two barriers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.settings.layout import Layout
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.safe_load import load_safely
from hpc_gpt.train.engines import private_parts

# Its part of a checkpoint is the folder of this name.
TAG = "deepspeed"


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, told which device it serves, quiet, and kept from compiling anything.

    ConfigError if this version cannot be kept from it.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # It calls collectives by names that torch has deprecated. A user cannot mend that.
        warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
        if device.type == "cpu":
            # Its shared-memory all-reduce takes a compiler and leaks 69 MB of /dev/shm a rank; gloo does without.
            private_parts.require(private_parts.CPU_SETUP)
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what DeepSpeed prints while it sets up, saves and loads; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def own_group(layout: Layout, axis: str, rank: int, alone: bool = False) -> dist.ProcessGroup | None:
    """This rank's process group along `axis`; None for a group of one, unless `alone` asks for it.

    Every rank makes every group, in order.
    """
    own = None
    for ranks in layout.groups(axis):
        if len(ranks) > 1 or alone:
            group = dist.new_group(ranks)
            own = group if rank in ranks else own
    return own


class NamedFiles:
    """A checkpoint engine for DeepSpeed that names the files it is given; see `plug_in`."""

    files: RankFiles | None = None
    root = ""

    def create(self, info: Any) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The writer makes what it needs."""

    def preserves_storage_sharing(self) -> bool:
        """Whether DeepSpeed should copy a state first. The writer takes of it what there is to write."""
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
    """Gives DeepSpeed's `engine` our checkpoint engine, and keeps its scripts for reading a checkpoint, which run what
    they read, out of the checkpoint."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    engine.checkpoint_engine = type("NamedFiles", (NamedFiles, CheckpointEngine), {})()
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
