"""torch's distributed checkpoint (DCP) as files of a rank: planned together, written alone, its metadata by rank 0.

torch's own `save` does all three in one call, and its asynchronous one needs a process group of its own. What is
planned together goes over the ranks' group between the hosts: the device's would take its memory and its turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from hpc_gpt.train.checkpoints.folders import Sums
from hpc_gpt.train.checkpoints.rank_files import RankFiles, Sink


def put_sharded(files: RankFiles, name: str, whole: Mapping[str, Tensor], pieces: Mapping[str, Tensor]) -> None:
    """Has the tensors `whole` written as a DCP checkpoint in the folder `name`; all ranks together.

    Those that are DTensors say what part of them a rank holds, which is in `pieces`, by the same keys.
    """
    keys = list(pieces)
    planner = _Planner()
    writer = _Writer(name)
    metadata: list[Metadata] = []
    peers = files.peers
    planner.set_up_planner(dict(whole), writer.storage_meta(), peers.is_first)
    writer.set_up_storage_writer(peers.is_first, rank=peers.rank)
    plans: list[Any] = peers.collect(planner.create_local_plan())
    if peers.is_first:
        plans, found = planner.create_global_plan(plans)
        plans = writer.prepare_global_plan(plans)
        metadata.append(found)
    plan = planner.finish_plan(peers.deal(plans))

    def write(folder: Path, tensors: Sequence[Tensor]) -> tuple[Sums, Any]:
        planner.pieces = dict(zip(keys, tensors, strict=True))
        sums: Sums = {}
        writer.write_below(folder, sums)
        results = writer.write_data(plan, planner).value()
        planner.pieces = {}
        return sums, results

    def finish(folder: Path, notes: list[Any]) -> None:
        writer.write_below(folder, {})
        writer.finish(metadata[0], notes)

    files.put_by([pieces[key] for key in keys], write, finish)


class _Planner(DefaultSavePlanner):
    """Finds what to write among the pieces, which may be copies, and not in the tensors that were planned for."""

    pieces: Mapping[str, Tensor]

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.pieces[index.fqn]


class _Writer(FileSystemWriter):
    def __init__(self, name: str) -> None:
        # Nothing is copied ahead, for which it would take a stream of the first device on every rank.
        super().__init__(name, sync_files=False, per_thread_copy_ahead=0)
        self._name = name

    def write_below(self, folder: Path, sums: Sums) -> None:
        self.path = folder / self._name
        self.path.mkdir(exist_ok=True)
        self.fs = _Files(folder, sums)


class _Files(FileSystem):
    """Opens files to write as sinks, and keeps their sums."""

    def __init__(self, folder: Path, sums: Sums) -> None:
        self._folder, self._sums = folder, sums

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        with Sink(self._folder, str(Path(path).relative_to(self._folder))) as sink:
            yield sink
        self._sums |= sink.sums
