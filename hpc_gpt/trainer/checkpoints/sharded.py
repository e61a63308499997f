"""The checkpoint of a model that is sharded over a mesh of tp x dp ranks: torch's distributed checkpoint (DCP).

    dcp/             "weights/<full name>" and "optimizer/<full name>/<moment>", whole tensors in pieces
    progress.json    step, loss scale, and which parameters' rows are in the order of the tp ranks

DCP gets the weights as DTensors, and an optimizer state as a DTensor like its weight, so that any other mesh finds its
pieces. A DTensor cannot express that a rank holds its heads of Q, K and V each (`Split.parts`). Such a tensor is saved
with the rows of tp rank 0 first, then the rows of rank 1, and so on; a reader with another tp reorders them.
The mesh may have replicas of the shards between tp and dp; the first replica's ranks write. Weights of experts that
ranks divide (ep) are on a mesh of tp x ep x edp ranks.

torch's `save` plans, writes and finishes in one call, and its asynchronous one needs a process group of its own. Here
all ranks plan together over their group between the hosts, because the device's group would need device memory and
compete with the training. Then each rank writes its files, and rank 0 writes the metadata.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT, Sums, load_json, load_metadata
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles, Sink
from hpc_gpt.trainer.checkpoints.training_state import Whole, set_states, take_whole
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, split_of

_FOLDER, _PROGRESS = "dcp", "progress.json"


class ShardedCheckpoint:
    """Saves and loads `parameters` and the state of the `optimizer` of this rank's `shards` of them."""

    def __init__(
        self, parameters: Sequence[DTensor], shards: list[nn.Parameter], optimizer: torch.optim.Optimizer
    ) -> None:
        self._shards = {full_name(shard): shard for shard in shards}
        self._parameters = dict(zip(self._shards, parameters, strict=True))
        self._optimizer = optimizer
        self._plan = CachedPlan()
        # The mesh's groups are not used: torch's cache gives a parameter the first mesh that equals its own. The groups
        # of that mesh may have ended, and other groups may have their names by now.
        mesh = parameters[0].device_mesh
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        self._tp, self._tp_rank = mesh.shape[0], coordinate[0]

    def save(self, files: RankFiles, rank: int, step: int, scale: dict[str, Any]) -> None:
        """Adds this rank's pieces, and on rank 0 the progress. Collective."""
        pieces = self._weights()
        for name, shard in self._shards.items():
            for moment, value in self._optimizer.state.get(shard, {}).items():
                pieces[f"optimizer/{name}/{moment}"] = name, value
        whole = {key: self._whole(name, value) if value.ndim else value for key, (name, value) in pieces.items()}
        put_sharded(files, _FOLDER, whole, {key: value for key, (_, value) in pieces.items()}, self._plan)
        if rank == 0:
            splits = {name: split_of(shard) for name, shard in self._shards.items()}
            fused = {name: split.stored() for name, split in splits.items() if split and split.parts != 1}
            progress = {"step": step, "scale": scale, "tp": self._tp, "fused": fused}
            files.put_text(_PROGRESS, json.dumps(progress, indent=1) + "\n")

    @torch.no_grad()
    @no_collections()
    def load(self, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
        """Loads this rank's weights and optimizer states; returns (step, loss scale). Collective."""
        progress = _read_progress(folder)
        reader = _Reader(folder / _FOLDER)
        targets = self._targets(reader)
        convert = set(progress["fused"]) if progress["tp"] != self._tp else set()
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
        moments: dict[str, dict[str, Tensor]] = {}
        for key, (name, value) in targets.items():
            if key.startswith("optimizer/"):
                moments.setdefault(name, {})[key.split("/")[2]] = value
        set_states(self._optimizer, moments)
        return int(progress["step"]), progress["scale"]

    def take(self, whole: Whole) -> tuple[int, dict[str, Any]]:
        """Loads this rank's part of another engine's checkpoint; returns (step, loss scale)."""
        return take_whole(whole, self._shards, self._optimizer, self._share)

    def _targets(self, reader: FileSystemReader) -> dict[str, tuple[str, Tensor]]:
        """{key in the checkpoint: (name, this rank's piece to fill)}; the pieces of weights are the shards."""
        targets = self._weights()
        for key, saved in reader.read_metadata().state_dict_metadata.items():
            if key.startswith("optimizer/") and isinstance(saved, TensorStorageMetadata):
                name = key.split("/")[1]
                shard = self._shards[name]
                value = torch.zeros_like(shard) if len(saved.size) else torch.zeros((), dtype=saved.properties.dtype)
                targets[key] = name, value
        return targets

    def _weights(self) -> dict[str, tuple[str, Tensor]]:
        return {f"weights/{name}": (name, shard.detach()) for name, shard in self._shards.items()}

    def _whole(self, name: str, piece: Tensor) -> DTensor:
        """The whole tensor, as a DTensor with `piece` as this rank's part. Nothing is copied or sent."""
        like = self._parameters[name]
        return DTensor.from_local(
            piece, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def _share(self, name: str, whole: Tensor) -> Tensor:
        """This rank's piece of a whole tensor in the model's order."""
        split = split_of(self._shards[name])
        share = split.shard(whole, self._tp_rank, self._tp) if split else whole
        like = self._parameters[name]
        coordinate = like.device_mesh.get_coordinate()
        assert coordinate is not None
        for placement, size, place in list(zip(like.placements, like.device_mesh.shape, coordinate, strict=True))[1:]:
            if placement.is_shard():
                pieces = share.chunk(size)
                share = pieces[place] if place < len(pieces) else share[:0]
        return share


class _Reader(FileSystemReader):
    """Reads a checkpoint in several loads. The metadata, which grow with the number of ranks that saved, are read
    once."""

    _read: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._read is None:
            metadata: Metadata = load_metadata(Path(self.path) / ".metadata")
            metadata.storage_meta = StorageMeta(load_id=self.load_id)
            self._read = metadata
        return self._read


def read_sharded(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    yield from ((name, weight) for name, _, weight in _read_tensors(folder, "weights/", _read_progress(folder)))


def read_whole(folder: Path, resolved: Resolved) -> Whole:
    """The checkpoint for another engine."""
    progress = _read_progress(folder)
    return Whole(int(progress["step"]), progress["scale"], _read_tensors(folder, "", progress))


def _read_tensors(folder: Path, kind: str, progress: dict[str, Any]) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (full name, moment, whole tensor), with moment "" for a weight, of the keys that begin with `kind`."""
    reader = _Reader(folder / _FOLDER)
    for key, saved in reader.read_metadata().state_dict_metadata.items():
        if key.startswith(kind) and isinstance(saved, TensorStorageMetadata):
            whole = torch.empty(saved.size, dtype=saved.properties.dtype)
            with warnings.catch_warnings():
                # torch warns that torch.distributed is not initialised, even with `no_dist`.
                warnings.simplefilter("ignore", UserWarning)
                state_dict_loader.load({key: whole}, storage_reader=reader, no_dist=True)
            _, name, *moment = key.split("/")
            yield name, "".join(moment), _in_order(name, whole, progress)


def _in_order(name: str, whole: Tensor, progress: dict[str, Any]) -> Tensor:
    """The tensor with its rows in the model's order; they were saved in the order of the tp ranks."""
    if name not in progress["fused"] or progress["tp"] == 1 or not whole.ndim:
        return whole
    split = Split.of_stored(progress["fused"][name])
    return split.merge(list(whole.chunk(progress["tp"], split.dim)))


def _read_progress(folder: Path) -> dict[str, Any]:
    progress = load_json(folder / _PROGRESS)
    if not (folder / _FOLDER / ".metadata").is_file():
        raise CheckpointError(f"{folder} holds no weights", REMOVE_IT)
    return progress


@dataclass
class CachedPlan:
    """The plan of the last save, cached for the next one: this rank's part as proposed and as agreed on, and on rank 0
    the metadata."""

    proposed: Any = None
    agreed: Any = None
    metadata: Metadata | None = None


def put_sharded(
    files: RankFiles, name: str, whole: Mapping[str, Tensor], pieces: Mapping[str, Tensor], cached: CachedPlan
) -> None:
    """Adds the tensors `whole` as a DCP checkpoint in the folder `name`. Collective.

    A DTensor among them says which part of the tensor this rank holds; that part is in `pieces`, under the same key. If
    every rank's proposal equals the one in `cached`, the cached plan is used.
    """
    # Tensors that all ranks have, such as the optimizer's count of steps, are in one file: a resuming rank opens that
    # file and its own.
    planner = _Planner(dedup_save_to_lowest_rank=True)
    writer = _Writer(name)
    peers = files.peers
    planner.set_up_planner(dict(whole), writer.storage_meta(), peers.is_first)
    writer.set_up_storage_writer(peers.is_first, rank=peers.rank)
    proposed = planner.create_local_plan()
    if not peers.broadcast(all(peers.gather(proposed == cached.proposed))):
        cached.proposed = None  # until all ranks have the new plan
        plans: list[Any] = peers.gather(proposed)
        if peers.is_first:
            with no_collections():
                plans, cached.metadata = planner.create_global_plan(plans)
                plans = writer.prepare_global_plan(plans)
        cached.agreed = peers.scatter(plans)
        cached.proposed = proposed
    plan = planner.finish_plan(cached.agreed)
    keys = list(dict.fromkeys(item.index.fqn for item in plan.items))  # only these are copied
    metadata = cached.metadata

    def write(folder: Path, tensors: Sequence[Tensor]) -> tuple[Sums, Any]:
        planner.pieces = dict(zip(keys, tensors, strict=True))
        sums: Sums = {}
        writer.write_below(folder, sums)
        results = writer.write_data(plan, planner).value() if plan.items else []  # a replica's file would be empty
        planner.pieces = {}
        return sums, results

    def finish(folder: Path, notes: list[Any]) -> None:
        assert metadata is not None
        writer.write_below(folder, {})
        with no_collections():
            writer.finish(replace(metadata), notes)  # adds the place of each piece to the metadata

    files.put_by([pieces[key] for key in keys], write, finish)


class _Planner(DefaultSavePlanner):
    """Writes `pieces`, which may be copies, instead of the tensors of the plan."""

    pieces: Mapping[str, Tensor]

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.pieces[index.fqn]


class _Writer(FileSystemWriter):
    def __init__(self, name: str) -> None:
        # Copying ahead would use a stream of the first device on every rank.
        super().__init__(name, sync_files=False, per_thread_copy_ahead=0)
        self._name = name

    def write_below(self, folder: Path, sums: Sums) -> None:
        self.path = folder / self._name
        self.fs = _Files(folder, sums)


class _Files(FileSystem):
    """Opens files for writing as a `Sink`, and keeps their sums."""

    def __init__(self, folder: Path, sums: Sums) -> None:
        self._folder, self._sums = folder, sums

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with Sink(self._folder, str(Path(path).relative_to(self._folder))) as sink:
            yield sink
        self._sums |= sink.sums
