"""The files of a checkpoint that one rank writes: named, then perhaps copied to the host's memory, then written.

Naming them may need the other ranks. Copying must end before the next step. Writing needs only the disk and may happen
on a thread. A file's CRC-32 is computed from the bytes given to the disk, and every file is synced.
"""

from __future__ import annotations

import json
import os
import re
import resource
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.format import show_bytes
from hpc_gpt.trainer.checkpoints.folders import IT_IS_DAMAGED, Sums, unread
from hpc_gpt.trainer.ranks import Peers

_PIECE_BYTES = 1 << 22
# Tensors begin at multiples of so many bytes of a file.
ALIGNED = 64
_SAFETENSORS = {
    torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16", torch.uint8: "U8",
    torch.int64: "I64", torch.int32: "I32",
}  # fmt: skip
# The share of free memory that copies may take; the rest is for the training, the data and the page cache.
_SHARE = 0.8


@dataclass
class _File:
    """What a file holds: bytes, then tensors, each filled up to a multiple of `ALIGNED` bytes."""

    name: str
    head: bytes
    tensors: list[Tensor]

    def parts(self) -> Iterator[Any]:
        """Yields its bytes in order."""
        yield self.head
        for tensor in self.tensors:
            yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
            yield bytes(-tensor.nbytes % ALIGNED)


class RankFiles:
    """The files that one rank will write. The `put` methods write nothing. No two files may have the same name.

    `peers` are the ranks that share the checkpoint. They may have to agree while files are named, over their group
    between the hosts, because the device's group is busy with the training.
    """

    def __init__(self, peers: Peers | None = None) -> None:
        self.peers = peers or Peers()
        self._files: list[_File] = []

    def put_tensors(self, name: str, tensors: Sequence[Tensor]) -> list[int]:
        """Adds a file in safetensors' layout: 8 bytes with the length of a JSON header, the header, raw elements.

        Tensors of one dtype are one entry of the header, flat. Each begins at a multiple of 64 bytes. Returns the bytes
        before each.
        """
        order = sorted(range(len(tensors)), key=lambda number: str(tensors[number].dtype))
        header, offsets, size = dict[str, Any](), [0] * len(tensors), 0
        for number in order:
            dtype = tensors[number].dtype
            entry = header.setdefault(
                str(dtype).removeprefix("torch."), {"dtype": _SAFETENSORS[dtype], "data_offsets": [size, size]}
            )
            offsets[number] = size
            size += -(-tensors[number].nbytes // ALIGNED) * ALIGNED
            entry["data_offsets"][1] = size
            entry["shape"] = [(size - entry["data_offsets"][0]) // dtype.itemsize]
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(8 + len(text)) % ALIGNED)
        head = len(text).to_bytes(8, "little") + text
        self._files.append(_File(name, head, [tensors[number] for number in order]))
        return [len(head) + offset for offset in offsets]

    def put_bytes(self, name: str, data: bytes) -> None:
        """Adds a file of raw bytes."""
        self._files.append(_File(name, data, []))

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors, in order."""
        return [tensor for file in self._files for tensor in file.tensors]

    @property
    def bytes(self) -> int:
        """About how many bytes the files will take on the disk."""
        heads = sum(len(file.head) + 4096 for file in self._files)  # the disk's blocks are of so many bytes
        return heads + sum(tensor.nbytes for tensor in self.tensors)

    def copy(self, copies: HostCopies) -> None:
        """Copies all tensors, so that the training may change them. After a MemoryError nothing has changed."""
        try:
            copied = copies.copy(self.tensors)
        except RuntimeError as fault:
            copies.forget()
            # torch raises it when the host's memory is used up.
            raise MemoryError(str(fault)) from fault
        for file in self._files:
            file.tensors, copied = copied[: len(file.tensors)], copied[len(file.tensors) :]

    def write(self, folder: Path) -> Sums:
        """Writes all files below `folder`; returns their sums. Raises OSError if the disk refuses."""
        sums: Sums = {}
        for file in self._files:
            assert file.name not in sums
            sums[file.name] = _write_file(folder / file.name, file.parts())
        return sums


def map_file(path: Path) -> Tensor:
    """The bytes of a file, mapped; nothing is written back, and the file does not stay open. Raises CheckpointError if
    it cannot be mapped."""
    try:
        if (size := path.stat().st_size) == 0:
            raise CheckpointError(f"{path} is empty", IT_IS_DAMAGED)
        return torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    except OSError as fault:
        raise unread(path, fault) from None
    except RuntimeError as fault:  # torch's, with the number of the system's error at its end
        number = re.search(r"\((\d+)\)\s*$", str(fault).splitlines()[0])
        if number is None:
            raise
        raise unread(path, OSError(int(number[1]), os.strerror(int(number[1])))) from None


def _write_file(path: Path, parts: Iterable[Any]) -> dict[str, int]:
    """Writes a new file from objects of bytes, and syncs it; returns its size and CRC-32. Raises the disk's OSError."""
    size = crc = 0
    # The folder is not made: if a user has removed it, the rest of the checkpoint must not be written.
    number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for part in parts:
            whole = memoryview(part).cast("B")
            for start in range(0, len(whole), _PIECE_BYTES):
                piece = whole[start : start + _PIECE_BYTES]
                crc = zlib.crc32(piece, crc)
                while piece:
                    piece = piece[os.write(number, piece) :]
            size += len(whole)
        os.fsync(number)
    except OSError as fault:
        fault.filename = str(path)
        raise
    finally:
        os.close(number)
    return {"bytes": size, "crc32": crc}


class HostCopies:
    """Host memory for copies of this rank's tensors, allocated at the first save and then reused.

    It is pinned for a GPU's tensors; pinning takes longer than the copy.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def missing_bytes(self, tensors: list[Tensor]) -> int:
        """The bytes that copies of `tensors` need in addition to the memory allocated already."""
        pairs = zip(tensors, [*self._buffers, *[None] * len(tensors)], strict=False)
        return sum(_host_bytes(tensor) for tensor, buffer in pairs if not _fits(tensor, buffer))

    def copy(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies of the tensors in the same order, complete on return and valid until the next call."""
        copies = []
        for number, tensor in enumerate(tensors):
            buffer = self._buffers[number] if number < len(self._buffers) else None
            if buffer is None or not _fits(tensor, buffer):
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffer.copy_(tensor.detach(), non_blocking=tensor.is_cuda)
            copies.append(buffer)
        self._buffers = copies
        for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return copies

    def forget(self) -> None:
        """Frees the memory."""
        self._buffers = []


def _fits(tensor: Tensor, buffer: Tensor | None) -> bool:
    if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        return False
    return buffer.is_pinned() == tensor.is_cuda


def _host_bytes(tensor: Tensor) -> int:
    # torch allocates pinned memory in powers of two.
    return 1 << max(0, tensor.nbytes - 1).bit_length() if tensor.is_cuda else tensor.nbytes


def lacks_memory(needed_bytes: int, ranks_per_node: int) -> str:
    """A text with the figures if the node has too little memory for `needed_bytes` per rank; else empty."""
    if not needed_bytes:
        return ""
    node, process = node_free_bytes(), process_free_bytes()
    for wanted, free, where in (
        (needed_bytes * ranks_per_node, node, f"on the node, for {ranks_per_node} ranks"),
        (needed_bytes, process, "within the process's limit"),
    ):
        if free is not None and wanted > _SHARE * free:
            return f"needs {show_bytes(wanted)} of host memory, {show_bytes(free)} are free {where}"
    return ""


def node_free_bytes() -> int | None:
    """Free bytes of memory of the node, or of the job's control group if that has less; None if neither is known."""
    free = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            free.append(int(line.split()[1]) * 1024)
    for line in _lines(Path("/proc/self/cgroup")):
        # Version 2: the job's limit may be at any level above the process's group.
        if line.startswith("0::/"):
            place = Path("/sys/fs/cgroup") / line.removeprefix("0::/").strip()
            while place != Path("/sys/fs"):
                free += _headroom(place / "memory.max", place / "memory.current", place / "memory.stat")
                place = place.parent
        elif ":memory:" in line:
            place = Path("/sys/fs/cgroup/memory") / line.rpartition(":")[2].strip().lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            free += _headroom(*(place / name for name in names))
    return min(free, default=None)


def process_free_bytes() -> int | None:
    """Bytes of address space left under RLIMIT_AS; None without that limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _lines(Path("/proc/self/statm"))
    return max(0, limit - int(pages[0].split()[0]) * resource.getpagesize()) if pages else None


def _headroom(limit: Path, used: Path, stat: Path) -> list[int]:
    """Free bytes of a control group. The page cache counts as free, because the kernel drops it on demand."""
    numbers = [line for path in (limit, used) for line in _lines(path)]
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers):
        return []
    files = sum(int(line.split()[1]) for line in _lines(stat) if line.startswith(("inactive_file ", "active_file ")))
    return [max(0, int(numbers[0]) - max(0, int(numbers[1]) - files))]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
