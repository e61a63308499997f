"""The folders of checkpoints on the disk: their names, completion, retention and removal; and how their files are read.
Whether one is sound is in `hpc_gpt.runs.checkpoints`.

    checkpoints/.writing-step-00000020/    being written; not to be read
    checkpoints/step-00000020/             complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/  found to be damaged, and renamed
    checkpoints/.deleting-step-00000020-1/ being removed

complete.json names every file with its size and CRC-32.

A file is read without running code in it. torch.save's format is pickle, and a pickle is a program: only tensors,
containers and the classes named here are made. torch's own restricted reader refuses every class that is not named.
DeepSpeed's files have objects of a few classes of its own, which are made by setting their fields.
"""

import contextlib
import json
import pickle
import shutil
import sys
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_gpt.errors import CheckpointError
from hpc_gpt.files import json_in, sync
from hpc_gpt.runs.after_jobs import held_steps, hold_back
from hpc_gpt.runs.branches import put_back, reserved_steps, set_aside_to_delete
from hpc_gpt.runs.checkpoints import COMPLETE, DAMAGED, DELETING, has_all_bytes, list_complete, set_aside, step_in

WRITING = ".writing-"
# Hints for a checkpoint that cannot be loaded.
REMOVE_IT = "remove the checkpoint, and the one before is used"
IT_IS_DAMAGED = "the checkpoint is damaged; remove it, and the one before is used"
# File name in the checkpoint's folder -> "bytes" and "crc32".
Sums = dict[str, dict[str, int]]


def list_files(folder: Path) -> list[str]:
    """The paths of all files in a folder, relative to it."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def load_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file of a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        found: dict[str, Any] = json_in(path)
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {fault}", IT_IS_DAMAGED) from None
    return found


def complete(aside: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """Writes complete.json, then renames the folder. Each is on the disk before the next begins."""
    (aside / COMPLETE).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    sync(aside / COMPLETE)
    for folder in {aside, *((aside / name).parent for name in marker["files"])}:
        sync(folder)
    if final.exists():
        # A resume skipped it. It is not deleted, because it may only have been unreadable on one host.
        set_aside(final)
    aside.rename(final)
    sync(final.parent)


@dataclass(frozen=True)
class Retention:
    """Keeps the last `keep_last` checkpoints (0: all), those whose step is a multiple of `keep_every` (0: none), those
    of the steps `keep_at`, those that branches of the run begin from, and those that a job of `[after]` needs: of a
    `followed` run also those that may get one."""

    keep_last: int = 0
    keep_every: int = 0
    keep_at: tuple[int, ...] = ()
    followed: bool = False

    def apply(self, folder: Path, newest: int | None) -> list[str]:
        """Renames the others for `Removal`, if `keep_last` newer ones have all their bytes; returns their names.

        `newest` is the step of the one that was just written, None without one. A resume skipped those of later steps:
        they do not count, and stay.
        """
        if not self.keep_last or newest is None:
            return []
        sound = 0
        gone = []
        reserved = reserved_steps(folder.parent)
        found = [(step, path) for path in list_complete(folder) if (step := step_in(path.name)) <= newest]
        held = held_steps(folder.parent, [step for step, _ in found], self.followed)
        for step, path in found:
            if sound < self.keep_last:
                # One that lacks bytes does not count, and stays: a resume renames it.
                sound += has_all_bytes(path)
            elif not self._is_kept(step, reserved):
                if step in held and hold_back(folder.parent, step, self.followed):
                    continue
                with contextlib.suppress(FileNotFoundError):  # the job has just removed it
                    if set_aside_to_delete(path) is not None:
                        gone.append(path.name)
        if sound == self.keep_last:
            oldest, _ = found[self.keep_last - 1]
            for path in folder.glob(f"{DAMAGED}step-*"):
                if 0 <= step_in(path.name.removeprefix(DAMAGED).rpartition("-")[0]) < oldest:
                    set_aside(path, DELETING)
                    gone.append(path.name)
        return gone

    def _is_kept(self, step: int, reserved: Collection[int]) -> bool:
        return step in self.keep_at or step in reserved or bool(self.keep_every and step % self.keep_every == 0)


def describe_removed(removed: Sequence[str]) -> str:
    """The line of the log on removed checkpoints."""
    return f"removed {', '.join(removed)}, as train.keep_last says"


class Removal:
    """Removes checkpoints in `folder` on a thread of rank 0, because that may take minutes.

    A folder is renamed at once, so that a half removed one is never taken for a checkpoint. The next save removes what
    is left of it when the process ends.
    """

    def __init__(self, folder: Path, retention: Retention) -> None:
        self._folder, self._retention = folder, retention
        self._thread: threading.Thread | None = None

    def retain(self, newest: int | None) -> list[str]:
        """Removes the checkpoints that need not be kept beside that of the step `newest` (None: removes none); returns
        their names."""
        removed: list[str] = []
        try:
            removed = self._retention.apply(self._folder, newest)
        except OSError as fault:
            print(f"cannot remove an old checkpoint: {fault.strerror}: {fault.filename}", flush=True)
        self.begin()
        return removed

    def discard(self, *paths: Path) -> None:
        """Removes folders that were never completed. One that cannot be renamed stays."""
        for path in paths:
            with contextlib.suppress(OSError):
                set_aside(path, DELETING)
        self.begin()

    def begin(self) -> None:
        """Begins to remove all renamed folders."""
        found = list(self._folder.glob(f"{DELETING}*"))
        before = self._thread
        if not found:
            return

        def remove() -> None:
            if before is not None:
                before.join()
            for path in found:
                if not put_back(path):
                    shutil.rmtree(path, ignore_errors=True)

        self._thread = threading.Thread(target=remove, name="removal", daemon=True)
        self._thread.start()

    def wait(self, patience_s: float | None = None) -> None:
        """Waits until the removal is over, at most `patience_s`."""
        if self._thread is not None:
            self._thread.join(patience_s)


# DeepSpeed's classes in its files: module -> names.
_DEEPSPEED = {
    "deepspeed.runtime.fp16.loss_scaler": ("LossScaler", "DynamicLossScaler"),
    "deepspeed.runtime.zero.config": ("ZeroStageEnum",),
    "deepspeed.utils.tensor_fragment": ("fragment_address",),
}
# The classes in the metadata of torch.distributed.checkpoint.
_METADATA = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}


def load_safely(path: Path | str, map_location: Any = "cpu", mmap: bool = False) -> Any:
    """Reads what torch.save wrote. Raises OSError if the file cannot be read, CheckpointError for any other class."""
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location=map_location, mmap=mmap or None, weights_only=True)
    except (pickle.UnpicklingError, EOFError) as fault:
        raise _refused(path, fault) from None


def load_metadata(path: Path) -> Any:
    """Reads the `.metadata` of torch.distributed.checkpoint. Raises OSError or CheckpointError likewise."""
    try:
        with open(path, "rb") as file:
            return _Metadata(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as fault:
        raise _refused(path, fault) from None


def _refused(path: Path | str, fault: Exception) -> CheckpointError:
    line = next((line for line in str(fault).splitlines() if line.strip()), type(fault).__name__)
    return CheckpointError(
        f"{path} cannot be read as data alone: {line}",
        f"it is damaged, or holds a program; {REMOVE_IT}",
    )


def _allowed() -> list[Any]:
    """The classes in DeepSpeed's files, if DeepSpeed is loaded, and numpy's in generator states of older versions."""
    found: list[Any] = [np.ndarray, np.dtype, type(np.dtype(np.uint32))]
    found += [(np.empty(0).__reduce__()[0], f"numpy.{core}.multiarray._reconstruct") for core in ("core", "_core")]
    for module, names in _DEEPSPEED.items():
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in names]
    return found


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _METADATA.get(module, ())
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (allowed or is_dtype):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
