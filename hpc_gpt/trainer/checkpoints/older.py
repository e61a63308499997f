"""Reads the checkpoints of ddp and fsdp that hpc-gpt 0.3 wrote; until 0.5.

ddp:  weights.pt, optimizer-00000.pt of each rank with moments, experts-00000.pt of each rank with experts, progress.pt
fsdp: dcp/, torch's distributed checkpoint, and progress.json
Both: model.json, random-00000.pt of each rank, data-00003.json of each data-parallel rank, balance-00000.pt of a stage
"""

import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.trainer.checkpoints.folders import IT_IS_DAMAGED, REMOVE_IT, load_json, load_metadata, load_safely
from hpc_gpt.trainer.checkpoints.states import WEIGHT, SavedStates, Share
from hpc_gpt.trainer.model.tensor_parallel import Split

IDENTITY = "model.json"


class OlderStates(SavedStates):
    """The elements in such a checkpoint, by whole parameters."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._maps = folder, {}
        is_whole = (folder / "weights.pt").is_file()
        if not is_whole and not (folder / "dcp" / ".metadata").is_file():
            raise CheckpointError(f"{folder} holds no weights", REMOVE_IT)
        progress = _read(folder / "progress.pt") if is_whole else load_json(folder / "progress.json")
        self._wholes: dict[tuple[str, str], Tensor] = {}
        self._parameters, numbers = {}, dict[str, float]()
        for name, kind, tensor in _read_whole(folder) if is_whole else _read_sharded(folder, progress):
            if kind != WEIGHT and not tensor.ndim:
                numbers[kind] = float(tensor)
                continue
            self._wholes[name, kind] = tensor
            entry = self._parameters.setdefault(name, {"shape": list(tensor.shape), "split": None, "kinds": {}})
            entry["kinds"][kind] = {"dtype": str(tensor.dtype).removeprefix("torch."), "runs": []}
        for name, bias in read_biases(folder):
            self._wholes[name, WEIGHT] = bias
            self._parameters[name] = {"shape": list(bias.shape), "split": None, "kinds": {WEIGHT: {}}}
        scale = progress["scale"]
        self._tp = 1
        self.about = {
            "step": int(progress["step"]),
            "settings": load_json(folder / IDENTITY),
            "optimizer": numbers,
            "loss_scale": {"scale": scale["scale"], "good_steps": scale["_growth_tracker"]} if scale else {},
        }

    def _fill(self, name: str, kind: str, tp_rank: int, first: int, memory: Tensor) -> None:
        if (name, kind) not in self._wholes:
            raise CheckpointError(f"{self.folder} holds no {kind} of {name}", REMOVE_IT)
        memory.copy_(self._wholes[name, kind].reshape(-1)[first : first + len(memory)])


class OlderBiases:
    """The choice biases beside DeepSpeed's files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, share: Share, kind: str, memory: Tensor) -> None:
        """Fills `memory`."""
        found = dict(read_biases(self._folder))
        if share.name not in found:
            raise CheckpointError(f"{self._folder} holds no {share.name}", REMOVE_IT)
        memory.copy_(found[share.name])


def read_biases(folder: Path) -> list[tuple[str, Tensor]]:
    """(full name, value) of each choice bias."""
    files = [load_safely(path) for path in sorted(folder.glob("balance-*.pt"))]
    return [(name, bias) for file in files for name, bias in file.items()]


def read_positions(folder: Path) -> dict[int, dict[str, Any]]:
    """How far each data-parallel rank has read a stream of data."""
    return {int(path.stem.removeprefix("data-")): load_json(path) for path in sorted(folder.glob("data-*.json"))}


def load_generators(folder: Path, rank: int, device: torch.device) -> None:
    """Restores the states of this rank's random generators."""
    path = folder / f"random-{rank:05d}.pt"
    if not path.is_file():
        raise CheckpointError(f"{folder}: {path.name} is missing", IT_IS_DAMAGED)
    state = load_safely(path)
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    kind, keys, *numbers = state["numpy"]
    np.random.set_state((kind, np.asarray(keys, dtype=np.uint32), *numbers))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _read_whole(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (full name, kind, whole tensor) of ddp's checkpoint."""
    for name, weight in _read(folder / "weights.pt").items():
        yield name, WEIGHT, weight
    for path in sorted(folder.glob("optimizer-*.pt")):
        for name, state in _read(path).items():
            yield from ((name, kind, value) for kind, value in state.items())
    experts = [_read(path) for path in sorted(folder.glob("experts-*.pt"))]
    for name in experts[0]["weights"] if experts else ():
        yield name, WEIGHT, torch.cat([one["weights"][name] for one in experts])
    for name, state in experts[0]["states"].items() if experts else ():
        for kind, value in state.items():
            yield name, kind, torch.cat([one["states"][name][kind] for one in experts]) if value.ndim else value


def _read_sharded(folder: Path, progress: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (full name, kind, whole tensor) of fsdp's checkpoint."""
    # Imported here: each start would take 0.4 s longer.
    from torch.distributed.checkpoint import state_dict_loader
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta, TensorStorageMetadata

    metadata, reader = load_metadata(folder / "dcp" / ".metadata"), FileSystemReader(folder / "dcp")
    metadata.storage_meta = StorageMeta(load_id=reader.load_id)
    reader.read_metadata = lambda *args, **kwargs: metadata  # type: ignore[method-assign]
    for key, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            whole = torch.empty(saved.size, dtype=saved.properties.dtype)
            with warnings.catch_warnings():
                # torch warns that torch.distributed is not initialised, even with `no_dist`.
                warnings.simplefilter("ignore", UserWarning)
                state_dict_loader.load({key: whole}, storage_reader=reader, no_dist=True)
            _, name, *kind = key.split("/")
            if name in progress["fused"] and progress["tp"] > 1 and whole.ndim:
                # Its rows were saved in the order of the tp ranks.
                split = Split.of_stored(progress["fused"][name])
                whole = split.merge(list(whole.chunk(progress["tp"], split.dim)))
            yield name, "".join(kind) or WEIGHT, whole


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}", REMOVE_IT)
    content: dict[str, Any] = load_safely(path, mmap=True)
    return content
