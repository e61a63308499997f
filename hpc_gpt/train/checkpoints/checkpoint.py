"""Checkpoints: written aside, completed by a marker, and only then the newest. A resume takes the newest sound one.

All ranks share in checking one, so that each file is read once, at the speed of all hosts together. The folders and
their names are in `folders`, the course of a save in `save`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.errors import CheckpointError
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.data_position import put_positions, read_positions
from hpc_gpt.train.checkpoints.folders import (
    COMPLETE,
    SCHEMA,
    WRITING,
    Fault,
    check_file,
    folder_name,
    list_complete,
    read_marker,
    set_aside,
)
from hpc_gpt.train.checkpoints.host_copies import HostCopies, lacks_memory
from hpc_gpt.train.checkpoints.peers import Peers
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.removal import Removal
from hpc_gpt.train.checkpoints.retention import Retention
from hpc_gpt.train.checkpoints.save import Outcome, Refusal, Save, disk_refusal, find_room
from hpc_gpt.train.engines.protocol import Engine

# Of a checkpoint beside its tensors: headers, markers, a folder's entries.
_SPARE_BYTES = 1 << 18


@dataclass(frozen=True)
class Progress:
    """How far a run has come: optimizer steps, seconds spent on them in all attempts, and the data it reads.

    `positions` says by data-parallel rank where streams stand: to save, the rank's own or nothing; read back, all.
    """

    step: int = 0
    train_s: float = 0.0
    data: str = ""
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Background:
    """Whether saves are written while training goes on. `refusal` says why not, where it was not asked for."""

    wanted: bool = False
    refusal: str = ""
    ranks_per_node: int = 1


def background_of(resolved: Resolved) -> Background:
    """What the settings ask for, and whether the engine can: what lies on NVMe is DeepSpeed's to copy, at once."""
    wanted = resolved.train.save_in_background
    refusal = ""
    if wanted and resolved.engine.offload_path is not None:
        wanted, refusal = False, "what is offloaded to NVMe has no copy in the host's memory"
    return Background(wanted, refusal, resolved.ranks_per_node)


class Checkpoints:
    """The checkpoints of one run, in `folder`; every method but `busy` and `retain` is collective."""

    def __init__(
        self,
        folder: Path,
        ranks: Peers,
        background: Background | None = None,
        retention: Retention | None = None,
    ) -> None:
        self.folder = folder
        self._ranks = ranks
        self._background = background or Background()
        self._retention = retention or Retention()
        self._removal = Removal(folder)
        self._newest = ""
        self._copies = HostCopies()
        self._save: Save | None = None
        self._held_up = False

    @property
    def busy(self) -> bool:
        """Whether this rank is writing; what `hear` wants to know of all."""
        return self._save is not None and self._save.busy

    @property
    def in_background(self) -> bool:
        """Whether saves are to be written while training goes on."""
        return self._background.wanted

    @property
    def is_saving(self) -> bool:
        """Whether a save is on its way, the same on all ranks."""
        return self._save is not None

    def save(self, engine: Engine, progress: Progress) -> Outcome:
        """Saves, and waits for it. The checkpoints before stay as they are.

        A checkpoint that this step has already was passed over, and steps aside.
        """
        return self.begin(engine, progress, wait=True) or self.finish()

    def begin(
        self, engine: Engine, progress: Progress, wait: bool = False, refused: Refusal | None = None
    ) -> Outcome | None:
        """Begins a save of the state as it is; an outcome only where it is over already.

        Unless it is to `wait`, and where there is memory, the state is copied, and training may go on. What the disk
        has `refused` already leaves the save out. One that is waited for may be an attempt's last, with seconds left:
        it takes no other away, which is `retain`'s.
        """
        assert self._save is None, "one at a time; `finish` the one before"
        began = time.perf_counter()
        files = RankFiles(self._ranks)
        engine.save(files)
        put_positions(files, progress.positions)
        needed = sum(self._ranks.gather(files.bytes)) + _SPARE_BYTES
        own = self._prepare(progress.step, needed, refused) if self._ranks.is_first else Refusal()
        refusal = self._ranks.share(own)
        if refusal:
            return Outcome(progress.step, refusal, stall_s=time.perf_counter() - began)
        marker = {"schema": SCHEMA, "step": progress.step, "train_s": progress.train_s, "data": progress.data}
        retention = Retention() if wait else self._retention
        save = Save(self.folder, self._ranks, files, marker, retention, self._removal)
        if wait or not self._background.wanted:
            save.begin(began, threaded=False, held_up="" if wait else self._background.refusal)
            self._save = save
            return self.finish()
        if held_up := self._copy(files):
            # The others would wait for that rank in the next step's collectives, whose patience is shorter than a save.
            save.begin(began, threaded=False, held_up=held_up)
            self._save = save
            return self.finish()
        save.begin(began, threaded=True, held_up="")
        self._save = save
        return None

    def hear(self, busy: bool) -> Outcome | None:
        """At a step's edge: `busy` says whether any rank was at the one before. An outcome where a save is over."""
        if self._save is None:
            return None
        outcome = self._save.hear(busy)
        if outcome is not None:
            self._end(outcome)
        return outcome

    def finish(self) -> Outcome:
        """Waits for the save that is on its way."""
        assert self._save is not None
        outcome = self._save.finish()
        self._end(outcome)
        return outcome

    def _end(self, outcome: Outcome) -> None:
        self._save = None
        if not outcome.refusal:
            self._newest = folder_name(outcome.step)

    def retain(self) -> None:
        """Takes away what need not stay beside the newest that was saved or resumed from here. Rank 0's; what goes is
        removed on a thread."""
        try:
            if removed := self._newest and self._retention.apply(self.folder, self._newest):
                self._say(self._retention.words(removed))
        except OSError as fault:
            self._say(f"cannot remove an old checkpoint: {fault.strerror}: {fault.filename}")
        self._removal.begin()

    def await_removal(self, patience_s: float | None = None) -> None:
        """Until what goes is gone; `patience_s` at most. Rank 0's."""
        self._removal.wait(patience_s)

    def resume(self, engine: Engine, own: bool = False) -> Progress:
        """Loads the newest sound checkpoint and says how far it is; `Progress()` where there is none.

        One that is half written or damaged is passed over with a word, and a damaged one set aside where the
        checkpoints are the run's `own`. Raises CheckpointError for a checkpoint of another model, layout or
        arithmetic, rather than training anew beside it.
        """
        for path, marker in self.sound(own=own):
            engine.load(path)
            step = int(marker["step"])
            if engine.step != step:
                raise CheckpointError(
                    f"{path} says step {step}, but holds step {engine.step}", "remove it, and the one before is used"
                )
            self._newest = path.name if own else ""
            return Progress(step, float(marker["train_s"]), str(marker["data"]), read_positions(path))
        return Progress()

    def sound(self, step: int | None = None, own: bool = False) -> Iterator[tuple[Path, dict[str, Any]]]:
        """(folder, its complete.json) of every sound checkpoint, newest first, or of `step` alone; passes the others
        over with a word, and sets the damaged ones aside where the checkpoints are the run's `own`."""
        for path in self._ranks.share(self._candidates() if self._ranks.is_first else []):
            if step is not None and path.name != folder_name(step):
                continue
            # Rank 0's view is everybody's: another host may be told of a file a moment later.
            marker = self._ranks.share(read_marker(path) if self._ranks.is_first else {})
            if fault := self._fault(path, marker):
                words = self._set_aside(path) if own and fault.damaged and self._ranks.is_first else ""
                self._say(f"passing over checkpoint {path}: {fault.words}{words}")
                self._ranks.barrier()
            else:
                yield path, marker

    def _candidates(self) -> list[Path]:
        """Complete-looking checkpoints, newest first; says which are half written."""
        for path in sorted(self.folder.glob(f"{WRITING}*")):
            self._say(f"passing over {path}: it was never completed")
        return list_complete(self.folder)

    def _fault(self, path: Path, marker: dict[str, Any]) -> Fault | None:
        """What is wrong with a checkpoint, by its own list of files. All ranks look, each at some."""
        found = Fault("" if marker else f"{COMPLETE} is missing or damaged")
        files = marker.get("files", {})
        for name in sorted(files)[self._ranks.rank :: self._ranks.size]:
            if found.words:
                break
            found = check_file(path, name, files[name])
        return next((fault for fault in self._ranks.gather(found) if fault.words), None)

    def _set_aside(self, path: Path) -> str:
        try:
            return f"; set aside as {set_aside(path).name}"
        except OSError as fault:
            return f"; it stays where it is: {fault.strerror}"

    def _prepare(self, step: int, needed_bytes: int, refused: Refusal | None) -> Refusal:
        """Rank 0's: makes the folder to write in, where there is room."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._removal.discard_leftovers()
            refusal = find_room(self.folder, needed_bytes)
            if refusal:
                # Of what is being removed the room comes back.
                self._removal.wait()
                refusal = find_room(self.folder, needed_bytes)
            if refusal := refusal or refused or Refusal():
                return refusal
            (self.folder / f"{WRITING}{folder_name(step)}").mkdir()
        except OSError as fault:
            return disk_refusal(fault, self.folder)
        return Refusal()

    def _copy(self, files: RankFiles) -> str:
        """Copies every rank's state; why one of them cannot, else."""
        needed = self._copies.missing_bytes(files.tensors)
        # All have looked before the first one takes any: what a neighbour has taken would count twice.
        if words := self._first_words(lacks_memory(needed, self._background.ranks_per_node)):
            return words
        words = ""
        try:
            files.copy(self._copies)
        except MemoryError as fault:
            said = (str(fault).splitlines() or [type(fault).__name__])[0]
            words = f"{needed / 2**30:.2f} GiB of host memory could not be had: {said}"
        return self._first_words(words)

    def _first_words(self, own: str) -> str:
        """The first rank's that has any, with its name."""
        all_words = self._ranks.gather(own and f"rank {self._ranks.rank} of {os.uname().nodename} {own}")
        return next((words for words in all_words if words), "")

    def say_held_up(self, outcome: Outcome) -> None:
        """Says once why training stands still while it saves, if that was not asked for."""
        if outcome.held_up and not self._held_up:
            self._held_up = True
            self._say(f"saves hold the training up: {outcome.held_up}")

    def _say(self, words: str) -> None:
        if self._ranks.is_first:
            print(words, flush=True)
