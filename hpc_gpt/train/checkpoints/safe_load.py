"""Reads a checkpoint's files without running code in them: only tensors, containers and the classes named here.

torch.save's format is pickle, and a pickle is a program. torch's own restricted reader refuses every class that is not
named. DeepSpeed's files have objects of a few classes of its own, which are made by setting their fields.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hpc_gpt.errors import CheckpointError
from hpc_gpt.train.checkpoints.folders import REMOVE_IT

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
