"""Checkpoints: written aside, completed by a marker, and only then the newest. A resume takes the newest sound one.

    checkpoints/.writing-step-00000020/   while it is written; of no use to anybody
    checkpoints/step-00000020/            complete: what the engine wrote, and complete.json, written last
    checkpoints/.damaged-step-00000020-1/ one that was passed over and had to make room

complete.json names every file with its size and CRC-32. All ranks share in computing and checking them, so that each
file is read once, at the speed of all hosts together; and each is brought to the disk by fsync while it is read.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpc_gpt.errors import CheckpointError, RunFolderError
from hpc_gpt.run_folder import read_json
from hpc_gpt.train.checkpoints.data_position import read_positions, write_positions
from hpc_gpt.train.engines.protocol import Engine
from hpc_gpt.train.failure import is_lost_peer, probe_disk

COMPLETE = "complete.json"
SCHEMA = 1
_PIECE_BYTES = 1 << 22
T = TypeVar("T")


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps, seconds spent on them in all attempts, and the data it reads.

    `positions` says by data-parallel rank where streams stand: to save, the rank's own or nothing; read back, all.
    """

    step: int = 0
    train_s: float = 0.0
    data: str = ""
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)


class Peers(Protocol):
    """The ranks that share the work; `train.ranks.Ranks` are some."""

    rank: int
    size: int
    is_first: bool

    def share(self, value: T) -> T: ...

    def gather(self, value: T) -> list[T]: ...

    def barrier(self) -> None: ...


class Alone:
    """The peers of a process that is the only one, as of a command that reads a run's checkpoints."""

    rank, size, is_first = 0, 1, True

    def share(self, value: T) -> T:
        return value

    def gather(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        return None


class Checkpoints:
    """The checkpoints of one run, in `folder`; every method is collective."""

    def __init__(self, folder: Path, ranks: Peers) -> None:
        self.folder = folder
        self._ranks = ranks

    def save(self, engine: Engine, progress: Progress) -> float:
        """Saves; returns the seconds it took. A checkpoint that this step has already was passed over, and steps aside.

        Raises RunFolderError with the path where the disk refuses. The checkpoints before stay as they are.
        """
        started = time.perf_counter()
        aside, final = self.folder / f".writing-{_name(progress.step)}", self.folder / _name(progress.step)
        self._all(lambda: self._prepare(aside))
        try:
            engine.save(aside)
            write_positions(aside, progress.positions)
        except Exception as fault:
            if is_lost_peer(fault):
                raise
            _explain(fault, self.folder, aside)
            raise
        self._ranks.barrier()
        files = self._ranks.share(_list_files(aside) if self._ranks.is_first else [])
        sums = self._checksums(aside, files)
        self._all(lambda: _complete(aside, final, progress, sums))
        return time.perf_counter() - started

    def resume(self, engine: Engine) -> Progress:
        """Loads the newest sound checkpoint and says how far it is; `Progress()` where there is none.

        One that is half written or damaged is passed over with a word. Raises CheckpointError for a checkpoint of
        another model, layout or arithmetic, rather than training anew beside it.
        """
        for path, marker in self.sound():
            engine.load(path)
            step = int(marker["step"])
            if engine.step != step:
                raise CheckpointError(
                    f"{path} says step {step}, but holds step {engine.step}", "remove it, and the one before is used"
                )
            return Progress(step, float(marker["train_s"]), str(marker["data"]), read_positions(path))
        return Progress()

    def sound(self, step: int | None = None) -> Iterator[tuple[Path, dict[str, Any]]]:
        """(folder, its complete.json) of every sound checkpoint, newest first, or of `step` alone; passes the others
        over with a word."""
        for path in self._ranks.share(self._candidates() if self._ranks.is_first else []):
            if step is not None and path.name != _name(step):
                continue
            marker = read_json(path / COMPLETE)
            if fault := self._fault(path, marker):
                self._say(f"passing over checkpoint {path}: {fault}")
            else:
                yield path, marker

    def _candidates(self) -> list[Path]:
        """Complete-looking checkpoints, newest first; says which are half written."""
        for path in sorted(self.folder.glob(".writing-*")):
            self._say(f"passing over {path}: it was never completed")
        return sorted((path for path in self.folder.glob("step-*") if path.is_dir()), reverse=True)

    def _fault(self, path: Path, marker: dict[str, Any]) -> str:
        """What is wrong with a checkpoint, by its own list of files; empty if nothing. All ranks look, each at some."""
        files = marker.get("files")
        if not isinstance(files, dict) or marker.get("schema") != SCHEMA:
            found = f"{COMPLETE} is missing or damaged"
        else:
            found = ""
            for name in self._own_share(sorted(files)):
                try:
                    size, crc = _read_through(path / name)
                except OSError as fault:
                    found = f"{name}: {fault.strerror}"
                    break
                expected = files[name]
                if size != expected["bytes"]:
                    found = f"{name} has {size} bytes, not {expected['bytes']}"
                elif crc != expected["crc32"]:
                    found = f"{name} has CRC-32 {crc:08x}, not {expected['crc32']:08x}"
                if found:
                    break
        return next((words for words in self._ranks.gather(found) if words), "")

    def _prepare(self, aside: Path) -> None:
        """Rank 0's: makes the folder to write in."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for old in self.folder.glob(".writing-*"):
            shutil.rmtree(old)
        aside.mkdir()

    def _checksums(self, aside: Path, files: Iterable[str]) -> dict[str, dict[str, int]]:
        """Size and CRC-32 of every file, each read and brought to the disk by one rank."""
        own: dict[str, dict[str, int]] = {}
        words = ""
        try:
            for name in self._own_share(files):
                size, crc = _read_through(aside / name)
                own[name] = {"bytes": size, "crc32": crc}
        except OSError as fault:
            words = f"{fault.strerror}: {fault.filename or aside}"
        gathered = self._ranks.gather((own, words))
        for _, fault_words in gathered:
            if fault_words:
                raise RunFolderError(f"cannot write checkpoint {aside}: {fault_words}", _ROOM)
        return {name: sums for part, _ in gathered for name, sums in sorted(part.items())}

    def _own_share(self, files: Iterable[str]) -> list[str]:
        return list(files)[self._ranks.rank :: self._ranks.size]

    def _all(self, action: Callable[[], None]) -> None:
        """Rank 0 does `action`; where it raises OSError there, RunFolderError on all ranks."""
        number, words = 0, ""
        if self._ranks.is_first:
            try:
                action()
            except OSError as fault:
                number, words = fault.errno or 0, f"{fault.strerror}: {fault.filename or self.folder}"
        number, words = self._ranks.share((number, words))
        if words:
            raise RunFolderError(f"cannot write checkpoints: {words}", _ROOM) from OSError(number, words)

    def _say(self, words: str) -> None:
        if self._ranks.is_first:
            print(words, flush=True)


_ROOM = "is the disk full, the quota spent, or the folder read-only?"


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _list_files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def _read_through(path: Path) -> tuple[int, int]:
    """(bytes, CRC-32) of a file; what of it is still in memory is brought to the disk."""
    size = crc = 0
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            size += len(piece)
            crc = zlib.crc32(piece, crc)
        try:
            os.fsync(file.fileno())
        except OSError as fault:
            # A read-only file system has nothing to bring anywhere.
            if fault.errno not in (errno.EROFS, errno.EINVAL):
                raise
    return size, crc


def _complete(aside: Path, final: Path, progress: Progress, files: dict[str, dict[str, int]]) -> None:
    """Rank 0's: the marker, then the name. Each reaches the disk before the next is begun."""
    marker = {
        "schema": SCHEMA,
        "step": progress.step,
        "train_s": progress.train_s,
        "data": progress.data,
        "time": time.time(),
        "files": files,
    }
    with open(aside / COMPLETE, "w", encoding="utf-8") as file:
        file.write(json.dumps(marker, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    for folder in {aside, *((aside / name).parent for name in files)}:
        _sync_folder(folder)
    if final.exists():
        # It was passed over as damaged. Nothing in a run is deleted but by retention, so it steps aside.
        taken = len(list(final.parent.glob(f".damaged-{final.name}-*")))
        final.rename(final.with_name(f".damaged-{final.name}-{taken + 1}"))
    aside.rename(final)
    _sync_folder(final.parent)


def _sync_folder(folder: Path) -> None:
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _explain(fault: Exception, folder: Path, aside: Path) -> None:
    """Raises RunFolderError where it is the disk that refuses, which torch's writer does not say."""
    refusal: OSError | None = fault if isinstance(fault, OSError) else None
    if refusal is None:
        try:
            probe_disk(folder)
        except OSError as found:
            refusal = found
    if refusal is not None:
        raise RunFolderError(f"cannot write checkpoint {aside}: {refusal.strerror}", _ROOM) from refusal
