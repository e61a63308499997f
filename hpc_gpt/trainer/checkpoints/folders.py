"""The folders of checkpoints on the disk: their names and completion, and the reading of their files.

`hpc_gpt.core.runs.checkpoints` decides whether a checkpoint is sound, `hpc_gpt.core.runs.retention` which ones stay.

    checkpoints/.writing-step-00000020/    being written; not to be read
    checkpoints/step-00000020/             complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/  found to be damaged, and renamed
    checkpoints/.deleting-step-00000020-1/ being removed

complete.json names every file with its size and CRC-32.

A file is read without running code from it. torch.save's format is pickle, and a pickle is a program. So only tensors,
containers and the classes named here are made; torch's restricted reader refuses every other class. DeepSpeed's files
have objects of a few DeepSpeed classes, which are made by setting their fields.
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
REMOVE_IT = "remove the checkpoint: then the one before it is used"
IT_IS_DAMAGED = "the checkpoint is damaged; remove it: then the one before it is used"
# File name in the checkpoint's folder -> "bytes" and "crc32".
Sums = dict[str, dict[str, int]]


def load_json(path: Path) -> dict[str, Any]:
    """Reads the JSON object in a file of a checkpoint. Raises CheckpointError if it cannot be read."""
    try:
        content: dict[str, Any] = json_in(path)
    except (OSError, ValueError) as fault:
        raise CheckpointError(f"{path.parent}: {path.name} cannot be read: {fault}", IT_IS_DAMAGED) from None
    return content


def complete(aside: Path, final: Path, marker: Mapping[str, Any]) -> None:
    """Writes complete.json, then renames the folder. Each is on the disk before the next begins."""
    (aside / COMPLETE).write_text(json.dumps(marker, indent=1) + "\n", encoding="utf-8")
    sync(aside / COMPLETE)
    for folder in {aside, *((aside / name).parent for name in marker["files"])}:
        sync(folder)
    if final.exists():
        # A resume skipped this checkpoint. It is not deleted: perhaps only one host could not read it.
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
    """Reads a file of torch.save. Raises OSError if it cannot be read, CheckpointError if it has any other class."""
    try:
        with torch.serialization.safe_globals(_allowed()):
            return torch.load(path, map_location=map_location, mmap=mmap or None, weights_only=True)
    except (pickle.UnpicklingError, EOFError) as fault:
        raise _refused(path, fault) from None


def load_metadata(path: Path) -> Any:
    """Reads the `.metadata` of torch.distributed.checkpoint. Raises OSError or CheckpointError, as `load_safely`."""
    try:
        with open(path, "rb") as file:
            return _Metadata(file).load()
    except (pickle.UnpicklingError, EOFError, AttributeError) as fault:
        raise _refused(path, fault) from None


def _refused(path: Path | str, fault: Exception) -> CheckpointError:
    """The error for a file that is not plain data. It leaves out torch's advice to load the file as a program."""
    refused = re.search(r"\bGLOBAL ([\w.]+)", str(fault))
    lines = (line for line in str(fault).splitlines() if line.strip() and "weights_only" not in line)
    line = f"it names {refused[1]}" if refused else next(lines, type(fault).__name__)
    return CheckpointError(
        f"{path} cannot be read as data alone: {line}", f"it is damaged, or holds a program; {REMOVE_IT}"
    )


def _allowed() -> list[Any]:
    """The classes in DeepSpeed's files, if DeepSpeed is loaded."""
    classes = list[Any]()
    for module, names in _DEEPSPEED.items():
        if module in sys.modules:
            classes += [getattr(sys.modules[module], name) for name in names]
    return classes


class _Metadata(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _METADATA.get(module, ())
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not (allowed or is_dtype):
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)
