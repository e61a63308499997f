"""The folders of checkpoints on the disk: their names and completion; and how their files are read. Whether one is
sound is in `hpc_gpt.core.runs.checkpoints`, which stay and which go in `hpc_gpt.core.runs.retention`.

    checkpoints/.writing-step-00000020/    being written; not to be read
    checkpoints/step-00000020/             complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/  found to be damaged, and renamed
    checkpoints/.deleting-step-00000020-1/ being removed

complete.json names every file with its size and CRC-32.

A file is read without running code in it. torch.save's format is pickle, and a pickle is a program: only tensors,
containers and the classes named here are made. torch's own restricted reader refuses every class that is not named.
DeepSpeed's files have objects of a few classes of its own, which are made by setting their fields.
"""

import json
import pickle
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.files import json_in, sync
from hpc_gpt.core.runs.checkpoints import COMPLETE, set_aside

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
    """torch's own first line advises to load the file as a program."""
    named = re.search(r"\bGLOBAL ([\w.]+)", str(fault))
    lines = (line for line in str(fault).splitlines() if line.strip() and "weights_only" not in line)
    line = f"it names {named[1]}" if named else next(lines, type(fault).__name__)
    return CheckpointError(
        f"{path} cannot be read as data alone: {line}", f"it is damaged, or holds a program; {REMOVE_IT}"
    )


def _allowed() -> list[Any]:
    """The classes in DeepSpeed's files, if DeepSpeed is loaded."""
    found = list[Any]()
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
