"""Copies of tensors in the host's memory, kept from one save to the next, and how much memory there is for them."""

from __future__ import annotations

import resource
from pathlib import Path

import torch
from torch import Tensor

# Of what is free; the rest is for the training, the data and the files' pages.
_SHARE = 0.8


class HostCopies:
    """Room for copies of this rank's tensors, taken at the first save and used again: on a GPU's host it is pinned,
    and pinning costs more than the copy."""

    def __init__(self) -> None:
        self._kept: list[Tensor] = []

    def missing_bytes(self, tensors: list[Tensor]) -> int:
        """What would have to be taken for copies of `tensors`."""
        pairs = zip(tensors, [*self._kept, *[None] * len(tensors)], strict=False)
        return sum(_room(one) for one, kept in pairs if not _fits(one, kept))

    def copy(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies, in the same order, that are whole when this returns. They hold until the next call."""
        kept = []
        for number, one in enumerate(tensors):
            room = self._kept[number] if number < len(self._kept) else None
            if room is None or not _fits(one, room):
                room = torch.empty(one.shape, dtype=one.dtype, pin_memory=one.is_cuda)
            room.copy_(one.detach(), non_blocking=one.is_cuda)
            kept.append(room)
        self._kept = kept
        for device in {one.device for one in tensors if one.is_cuda}:
            torch.cuda.synchronize(device)
        return kept

    def forget(self) -> None:
        """Gives the memory back."""
        self._kept = []


def _fits(one: Tensor, kept: Tensor | None) -> bool:
    return kept is not None and kept.shape == one.shape and kept.dtype == one.dtype and kept.is_pinned() == one.is_cuda


def _room(one: Tensor) -> int:
    # torch takes pinned memory by powers of two.
    return 1 << max(0, one.nbytes - 1).bit_length() if one.is_cuda else one.nbytes


def lacks_memory(needed_bytes: int, ranks_per_node: int) -> str:
    """In words, with figures, that a node has too little memory for as much on each of its ranks; empty if it has."""
    if not needed_bytes:
        return ""
    node, process = node_free_bytes(), process_free_bytes()
    for wanted, free, where in (
        (needed_bytes * ranks_per_node, node, f"on the node, for {ranks_per_node} ranks"),
        (needed_bytes, process, "within the process's limit"),
    ):
        if free is not None and wanted > _SHARE * free:
            return f"needs {wanted / 2**30:.2f} GiB of host memory, {free / 2**30:.2f} GiB are free {where}"
    return ""


def node_free_bytes() -> int | None:
    """Memory that the node, or the job's share of it by its control group, has left; None where nothing says."""
    found = []
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            found.append(int(line.split()[1]) * 1024)
    for line in _lines(Path("/proc/self/cgroup")):
        # Version 2, where a job's limit may stand at any level above the process's own.
        if line.startswith("0::/"):
            place = Path("/sys/fs/cgroup") / line.removeprefix("0::/").strip()
            while place != Path("/sys/fs"):
                found += _headroom(place / "memory.max", place / "memory.current", place / "memory.stat")
                place = place.parent
        elif ":memory:" in line:
            place = Path("/sys/fs/cgroup/memory") / line.rpartition(":")[2].strip().lstrip("/")
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
            found += _headroom(*(place / name for name in names))
    return min(found, default=None)


def process_free_bytes() -> int | None:
    """Address space left under RLIMIT_AS; None without that limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = _lines(Path("/proc/self/statm"))
    return max(0, limit - int(pages[0].split()[0]) * resource.getpagesize()) if pages else None


def _headroom(limit: Path, used: Path, stat: Path) -> list[int]:
    """What a control group has left, the pages of files counted as free: the kernel drops them when asked."""
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
