"""One save on its way, from the edge of a step to a complete checkpoint, or to words on what stood in the way.

    begun        every rank has named its files, and rank 0 has made the folder and found room on the disk
    writing      every rank writes and sums up its files; on a thread, with copies, where it saves in the background
    completing   rank 0 writes complete.json, gives the folder its name, and renames what need not stay
    over         an `Outcome`, the same on all ranks

From one to the next all ranks go together, at a step's edge, once the word that some rank is busy is no longer said.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.train.checkpoints.folders import (
    WRITING,
    Sums,
    complete,
    folder_name,
    list_files,
    read_through,
)
from hpc_gpt.train.checkpoints.peers import Peers
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.removal import Removal
from hpc_gpt.train.checkpoints.retention import Retention
from hpc_gpt.train.failure import probe_disk

FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Refusal:
    """What the disk said, in words, and its errno; 0 where room was found wanting before anything was written."""

    words: str = ""
    number: int = 0

    def __bool__(self) -> bool:
        return bool(self.words)

    @property
    def is_full(self) -> bool:
        return self.number in FULL


@dataclass(frozen=True)
class Outcome:
    """How a save of `step` ended. `save_s`: until it was complete; `stall_s`: how long training stood still for it."""

    step: int
    refusal: Refusal = Refusal()
    save_s: float = 0.0
    stall_s: float = 0.0
    removed: tuple[str, ...] = ()
    # Of the ranks that could not write in the background: the first one's reason.
    held_up: str = ""


@dataclass
class _Part:
    """What one rank has written, or what the disk said."""

    sums: Sums = field(default_factory=dict)
    notes: list[Any] = field(default_factory=list)
    refusal: Refusal = Refusal()
    held_up: str = ""


class Save:
    """See above. Every method but `busy` is collective."""

    def __init__(
        self,
        folder: Path,
        ranks: Peers,
        files: RankFiles,
        marker: dict[str, Any],
        retention: Retention,
        removal: Removal,
    ) -> None:
        self.step = int(marker["step"])
        self._folder, self._ranks, self._files, self._marker = folder, ranks, files, marker
        self._aside = folder / f"{WRITING}{folder_name(self.step)}"
        self._retention, self._removal = retention, removal
        self._began = time.perf_counter()
        self._stall_s = 0.0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._part = _Part()
        self._completing = False
        self._heard = False
        self._removed: list[str] = []
        self._words: list[Refusal] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is still at work."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, began: float, threaded: bool, held_up: str) -> None:
        """Writes this rank's files, on a thread or here and now; `began` is when training stopped for it."""
        self._began = began
        self._part.held_up = held_up
        self._run(self._write, threaded)
        self._stall_s = time.perf_counter() - began

    def hear(self, busy: bool) -> Outcome | None:
        """At a step's edge: what the ranks have said at the one before, that one of them is `busy` or none."""
        if not self._heard:
            # That was said before the ranks began on this part.
            self._heard = True
            return None
        return None if busy else self._advance(threaded=True)

    def finish(self) -> Outcome:
        """Waits for it; to be called where all ranks are at the same step's edge."""
        began = time.perf_counter()
        while True:
            if outcome := self._advance(threaded=False):
                # Training stands still meanwhile.
                return _with_stall(outcome, outcome.stall_s + time.perf_counter() - began)

    def _advance(self, threaded: bool) -> Outcome | None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        self._heard = False
        if self._completing:
            seconds = time.perf_counter() - self._began
            refusal = self._words[0] if self._words else Refusal()
            own = Outcome(self.step, refusal, seconds, self._stall_s, tuple(self._removed), self._part.held_up)
            return self._ranks.share(own)
        # To rank 0 alone, which needs them: a list of files from every rank, on every rank, would be theirs squared.
        parts = self._ranks.collect(self._part)
        refusals = (part.refusal for part in parts if part.refusal)
        held_up = (part.held_up for part in parts if part.held_up)
        refusal, self._part.held_up = self._ranks.share((next(refusals, Refusal()), next(held_up, "")))
        if refusal:
            self._discard()
            return Outcome(self.step, refusal, time.perf_counter() - self._began, self._stall_s)
        self._completing = True
        if self._ranks.is_first:
            self._run(lambda: self._complete(parts), threaded)
        return None

    def _run(self, work: Callable[[], None], threaded: bool) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as fault:
                self._error = fault

        if threaded:
            self._thread = threading.Thread(target=run, name="save", daemon=True)
            self._thread.start()
        else:
            self._thread = None
            work()

    def _write(self) -> None:
        try:
            self._part.sums, self._part.notes = self._files.write(self._aside)
        except (OSError, RuntimeError) as fault:
            self._part.refusal = _refusal(fault, self._folder)

    def _complete(self, parts: list[_Part]) -> None:
        """Rank 0's."""
        sums = {name: each for part in parts for name, each in part.sums.items()}
        try:
            self._files.finish(self._aside, [note for part in parts for note in part.notes])
            for name in list_files(self._aside):
                if name not in sums:
                    size, crc = read_through(self._aside / name)
                    sums[name] = {"bytes": size, "crc32": crc}
            marker = self._marker | {"time": time.time(), "files": dict(sorted(sums.items()))}
            complete(self._aside, self._folder / folder_name(self.step), marker)
        except (OSError, RuntimeError) as fault:
            self._words.append(_refusal(fault, self._folder))
            self._discard()
            return
        try:
            self._removed = self._retention.apply(self._folder, folder_name(self.step))
        except OSError as fault:
            print(f"cannot remove an old checkpoint: {fault.strerror}: {fault.filename}", flush=True)
        self._removal.begin()

    def _discard(self) -> None:
        if self._ranks.is_first:
            self._removal.discard(self._aside)


def find_room(folder: Path, needed_bytes: int) -> Refusal:
    """Whether the disk has room for a checkpoint; with the figures where it has not."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if not found.f_blocks or free >= needed_bytes:
        return Refusal()
    return Refusal(f"the disk has {_size(free)} free, the checkpoint needs {_size(needed_bytes)}", errno.ENOSPC)


def disk_refusal(fault: OSError, folder: Path) -> Refusal:
    """An OSError in words, with what is free on the disk."""
    words = f"{fault.strerror}: {fault.filename or folder}"
    try:
        found = os.statvfs(folder)
        words += f" ({_size(found.f_bavail * found.f_frsize)} are free)"
    except OSError:
        pass
    return Refusal(words, fault.errno or errno.EIO)


def _refusal(fault: OSError | RuntimeError, folder: Path) -> Refusal:
    """What the disk said, where it was the disk, which torch's writer may hide; else the fault goes on."""
    if isinstance(fault, OSError):
        return disk_refusal(fault, folder)
    try:
        probe_disk(folder)
    except OSError as found:
        return disk_refusal(found, folder)
    raise fault


def _with_stall(outcome: Outcome, seconds: float) -> Outcome:
    return Outcome(outcome.step, outcome.refusal, outcome.save_s, seconds, outcome.removed, outcome.held_up)


def _size(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 / 10 else f"{size_bytes / 2**20:.2f} MiB"
