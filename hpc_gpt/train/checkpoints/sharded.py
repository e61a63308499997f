"""The checkpoint of a model that is dealt out over a mesh of tp x dp ranks: torch's distributed checkpoint (DCP).

    dcp/             "weights/<full name>" and "optimizer/<full name>/<moment>", whole tensors in pieces
    progress.json    step, loss scale, and which parameters' rows lie in the order of the tp ranks

Weights are given to DCP as the DTensors they are, and an optimizer's state as one like its weight, so that any other
mesh finds its own pieces. One thing a DTensor cannot say is that a rank holds its heads of Q, of K and of V
(`Split.parts`). Such a tensor is kept with the rows of tp rank 0 first, then those of rank 1, and so on; a reader of
another tp puts them in order.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.tensor_parallel import Split, full_name, split_of
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.safe_load import load_metadata
from hpc_gpt.train.checkpoints.sharded_files import put_sharded

_FOLDER, _PROGRESS = "dcp", "progress.json"


class ShardedCheckpoint:
    """Saves and loads the `parameters` and the state of the `optimizer` that works on this rank's `shards` of them."""

    def __init__(
        self,
        parameters: Sequence[DTensor],
        shards: list[nn.Parameter],
        optimizer: torch.optim.Optimizer,
    ) -> None:
        self._shards = {full_name(shard): shard for shard in shards}
        self._parameters = dict(zip(self._shards, parameters, strict=True))
        self._optimizer = optimizer
        self._mesh = parameters[0].device_mesh

    def save(self, files: RankFiles, step: int, scale: dict[str, Any]) -> None:
        """Names this rank's pieces, and rank 0 the progress; all ranks together."""
        pieces: dict[str, tuple[str, Tensor]] = {
            f"weights/{name}": (name, shard.detach()) for name, shard in self._shards.items()
        }
        for name, shard in self._shards.items():
            for moment, value in self._optimizer.state.get(shard, {}).items():
                pieces[f"optimizer/{name}/{moment}"] = name, value
        whole = {key: self._whole(name, value) if value.ndim else value for key, (name, value) in pieces.items()}
        put_sharded(files, _FOLDER, whole, {key: value for key, (_, value) in pieces.items()})
        if self._mesh.get_rank() == 0:
            splits = {name: split_of(shard) for name, shard in self._shards.items()}
            fused = {name: [split.dim, split.parts] for name, split in splits.items() if split and split.parts > 1}
            progress = {"step": step, "scale": scale, "tp": self._mesh["tp"].size(), "fused": fused}
            files.put_text(_PROGRESS, json.dumps(progress, indent=1) + "\n")

    @torch.no_grad()
    def load(self, folder: Path) -> tuple[int, dict[str, Any]]:
        """(step, loss scale) of the checkpoint, whose weights and states are now this rank's; all ranks together."""
        progress = _read_progress(folder)
        reader = _Reader(folder / _FOLDER)
        targets = self._targets(reader)
        convert = set(progress["fused"]) if progress["tp"] != self._mesh["tp"].size() else set()
        state = {
            key: self._whole(name, value) if value.ndim else value
            for key, (name, value) in targets.items()
            if name not in convert or not value.ndim
        }
        state_dict_loader.load(state, storage_reader=reader)
        for key, (name, value) in targets.items():
            if key not in state:
                whole = torch.empty(self._parameters[name].shape, dtype=value.dtype)
                state_dict_loader.load({key: whole}, storage_reader=reader)
                value.copy_(self._share(name, _in_order(name, whole, progress)))
        self._take_moments({key: value for key, (_, value) in targets.items()})
        return int(progress["step"]), progress["scale"]

    def _targets(self, reader: FileSystemReader) -> dict[str, tuple[str, Tensor]]:
        """What is to be read: (name, this rank's piece to fill) by key; the weights' pieces are the shards."""
        targets: dict[str, tuple[str, Tensor]] = {
            f"weights/{name}": (name, shard.detach()) for name, shard in self._shards.items()
        }
        for key, kept in reader.read_metadata().state_dict_metadata.items():
            if key.startswith("optimizer/") and isinstance(kept, TensorStorageMetadata):
                name = key.split("/")[1]
                shard = self._shards[name]
                value = torch.zeros_like(shard) if len(kept.size) else torch.zeros((), dtype=kept.properties.dtype)
                targets[key] = name, value
        return targets

    def _take_moments(self, found: dict[str, Tensor]) -> None:
        own = [full_name(one) for group in self._optimizer.param_groups for one in group["params"]]
        states: dict[str, dict[str, Tensor]] = {}
        for key, value in found.items():
            if key.startswith("optimizer/"):
                _, name, moment = key.split("/")
                states.setdefault(name, {})[moment] = value
        groups = self._optimizer.state_dict()["param_groups"]
        # SGD without momentum keeps nothing.
        numbered = {number: states[name] for number, name in enumerate(own) if name in states}
        self._optimizer.load_state_dict({"state": numbered, "param_groups": groups})

    def _whole(self, name: str, piece: Tensor) -> DTensor:
        """The whole tensor that `piece` is this rank's part of; nothing is copied or sent."""
        like = self._parameters[name]
        return DTensor.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor in the model's order."""
        split, tp, dp = split_of(self._shards[name]), self._mesh["tp"], self._mesh["dp"]
        share = split.shard(whole, tp.get_local_rank(), tp.size()) if split else whole
        pieces = share.chunk(dp.size())
        rank = dp.get_local_rank()
        return pieces[rank] if rank < len(pieces) else share[:0]


class _Reader(FileSystemReader):
    """Reads one checkpoint in several loads, and its metadata, which grow with the ranks that saved it, once."""

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            metadata: Metadata = load_metadata(Path(self.path) / ".metadata")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self._read = metadata
        return self._read


def read_sharded(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The weights of such a checkpoint, by full name, one at a time; in one process, without torch.distributed."""
    progress = _read_progress(folder)
    reader = _Reader(folder / _FOLDER)
    for key, of in reader.read_metadata().state_dict_metadata.items():
        if key.startswith("weights/") and isinstance(of, TensorStorageMetadata):
            whole = torch.empty(of.size, dtype=of.properties.dtype)
            with warnings.catch_warnings():
                # It warns that torch.distributed is not there, `no_dist` or not.
                warnings.simplefilter("ignore", UserWarning)
                state_dict_loader.load({key: whole}, storage_reader=reader, no_dist=True)
            name = key.split("/")[1]
            yield name, _in_order(name, whole, progress)


def _in_order(name: str, whole: Tensor, progress: dict[str, Any]) -> Tensor:
    """The tensor in the model's order, from the order of the ranks that saved it."""
    if name not in progress["fused"] or progress["tp"] == 1:
        return whole
    split = Split(*progress["fused"][name])
    return split.merge(list(whole.chunk(progress["tp"], split.dim)))


def _read_progress(folder: Path) -> dict[str, Any]:
    try:
        progress: dict[str, Any] = json.loads((folder / _PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as fault:
        raise CheckpointError(
            f"{folder}: {_PROGRESS} cannot be read: {fault}", "remove it, and the one before is used"
        ) from None
    if not (folder / _FOLDER / ".metadata").is_file():
        raise CheckpointError(f"{folder} holds no weights", "remove it, and the one before is used")
    return progress
