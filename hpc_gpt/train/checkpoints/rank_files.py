"""The files of a checkpoint that one rank writes: named first, then copied to the host's memory, or not, then written.

Naming them may need the other ranks, copying has to be done before the next step, writing concerns nobody but the disk
and may happen on a thread. Each file's CRC-32 is of what was handed to the disk, and each is brought there by fsync.
"""

from __future__ import annotations

import copy
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol, cast

import torch
from torch import Tensor

from hpc_gpt.train.checkpoints.folders import Sums
from hpc_gpt.train.checkpoints.host_copies import HostCopies
from hpc_gpt.train.checkpoints.peers import Alone, Peers

_PIECE_BYTES = 1 << 22
# Writes tensors below a folder and returns the sums of the files and a note for rank 0.
Write = Callable[[Path, Sequence[Tensor]], tuple[Sums, Any]]
# Rank 0's, with the notes of all ranks, once all have written.
Finish = Callable[[Path, list[Any]], None]


class RankFiles:
    """What one rank has to write. `put…` write nothing; a file of a name that is there already is a mistake.

    `peers` are the ranks that share the checkpoint, for what has to be agreed on while its files are named: between the
    hosts, as the device's own group has the training's work to do.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers or Alone()
        self._entries: list[_Entry] = []
        self._finish: Finish | None = None

    def put(self, name: str, state: Any) -> None:
        """A file in torch.save's format; `state` is made of dicts, lists, tuples, tensors and small objects."""
        self._entries.append(_Saved(name, *_take_apart(state)))

    def put_text(self, name: str, text: str) -> None:
        """A text file."""
        self._entries.append(_Text(name, text))

    def put_by(self, tensors: Sequence[Tensor], write: Write, finish: Finish) -> None:
        """Files that `write` makes of `tensors`, or of copies of them; and rank 0's `finish`, with what each returned.

        One such a checkpoint.
        """
        assert self._finish is None
        self._entries.append(_Written(list(tensors), write))
        self._finish = finish

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order, each once in a file."""
        return [tensor for entry in self._entries for tensor in entry.tensors]

    @property
    def bytes(self) -> int:
        """About what it will take on the disk."""
        return sum(tensor.nbytes for tensor in self.tensors) + 4096 * len(self._entries)

    def copy(self, copies: HostCopies) -> None:
        """From here on nothing that the training changes is looked at any more. MemoryError leaves all as it was."""
        try:
            found = copies.copy(self.tensors)
        except RuntimeError as fault:
            copies.forget()
            # torch says so when the host's memory is used up.
            raise MemoryError(str(fault)) from fault
        for entry in self._entries:
            own, found = found[: len(entry.tensors)], found[len(entry.tensors) :]
            entry.tensors = own

    def write(self, folder: Path) -> tuple[Sums, list[Any]]:
        """Writes all below `folder`; the files' sums and the notes for `finish`. OSError where the disk refuses."""
        sums: Sums = {}
        notes = []
        for entry in self._entries:
            written, note = entry.write(folder)
            assert not sums.keys() & written.keys()
            sums |= written
            if note is not None:
                notes.append(note)
        return sums, notes

    def finish(self, folder: Path, notes: list[Any]) -> None:
        """Rank 0's, with the notes of all ranks in order."""
        if self._finish is not None:
            self._finish(folder, notes)


class _Entry(Protocol):
    tensors: list[Tensor]

    def write(self, folder: Path) -> tuple[Sums, Any]: ...


@dataclass
class _Saved:
    name: str
    state: Any
    tensors: list[Tensor]

    def write(self, folder: Path) -> tuple[Sums, Any]:
        # The files carry CRCs of their own, which nobody checks, at half the speed.
        torch.serialization.set_crc32_options(False)
        with Sink(folder, self.name) as sink:
            state = _put_together(self.state, [_compact(tensor) for tensor in self.tensors])
            torch.save(state, cast(IO[bytes], sink))
        return sink.sums, None


@dataclass
class _Text:
    name: str
    text: str

    def __post_init__(self) -> None:
        self.tensors: list[Tensor] = []

    def write(self, folder: Path) -> tuple[Sums, Any]:
        with Sink(folder, self.name) as sink:
            sink.write(self.text.encode())
        return sink.sums, None


@dataclass
class _Written:
    tensors: list[Tensor]
    by: Write

    def write(self, folder: Path) -> tuple[Sums, Any]:
        return self.by(folder, self.tensors)


class Sink:
    """A new file below `folder`, written once from begin to end; sums up what goes by.

    An OSError of the disk comes out of the `with` as it is, whatever a library made of it.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.sums: Sums = {}
        self._folder, self._name, self._path = folder, name, folder / name
        self._size = self._crc = 0
        self._number = -1
        self._fault: OSError | None = None

    def __enter__(self) -> Sink:
        # Not `folder` itself: where somebody has taken it away, half a checkpoint is not begun anew.
        for parent in reversed(Path(self._name).parents[:-1]):
            (self._folder / parent).mkdir(exist_ok=True)
        self._number = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        return self

    def __exit__(self, kind: object, fault: object, trace: object) -> None:
        try:
            if self._fault is None and fault is None:
                os.fsync(self._number)
                self.sums[self._name] = {"bytes": self._size, "crc32": self._crc}
        finally:
            os.close(self._number)
        if self._fault is not None:
            raise self._fault

    def write(self, data: Any) -> int:
        """Writes all of a bytes-like object."""
        whole = memoryview(data).cast("B")
        try:
            for start in range(0, len(whole), _PIECE_BYTES):
                piece = whole[start : start + _PIECE_BYTES]
                self._crc = zlib.crc32(piece, self._crc)
                while piece:
                    piece = piece[os.write(self._number, piece) :]
        except OSError as fault:
            fault.filename = str(self._path)
            self._fault = fault
            raise
        self._size += len(whole)
        return len(whole)

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        """The `with` does it."""

    def tell(self) -> int:
        return self._size

    def fileno(self) -> int:
        return self._number


@dataclass(frozen=True)
class _At:
    """Stands in a state for its tensor of this number."""

    number: int


def _take_apart(state: Any) -> tuple[Any, list[Tensor]]:
    """The state with places for its tensors, and those, one that occurs twice once; all else is copied."""
    tensors: list[Tensor] = []
    seen: dict[tuple[Any, ...], _At] = {}

    def take(item: Any) -> Any:
        if isinstance(item, Tensor):
            own = item.detach()
            key = (own.data_ptr(), own.dtype, own.shape, own.stride(), own.device) if own.numel() else (len(tensors),)
            if key not in seen:
                seen[key] = _At(len(tensors))
                tensors.append(own)
            return seen[key]
        return _rebuild(item, take)

    return take(state), tensors


def _put_together(state: Any, tensors: Sequence[Tensor]) -> Any:
    def put(item: Any) -> Any:
        return tensors[item.number] if isinstance(item, _At) else _rebuild(item, put)

    return put(state)


def _rebuild(item: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a container with every item changed; of anything else a copy."""
    if isinstance(item, dict):
        pairs = ((key, change(value)) for key, value in item.items())
        return OrderedDict(pairs) if isinstance(item, OrderedDict) else dict(pairs)
    if isinstance(item, list):
        return [change(value) for value in item]
    if isinstance(item, tuple) and type(item) is tuple:
        return tuple(change(value) for value in item)
    return item if isinstance(item, str | int | float | bool | None) else copy.deepcopy(item)


def _compact(tensor: Tensor) -> Tensor:
    """The tensor with no more of its storage than it needs: torch.save writes whole storages. A view without gaps has a
    storage of its own over the same memory. What lies on a device and needs a copy has it in the host's memory: the
    device's may have no room."""
    if tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    if tensor.numel() and tensor.is_contiguous():
        return torch.utils.dlpack.from_dlpack(tensor)
    return tensor.clone() if tensor.device.type == "cpu" else tensor.cpu()
