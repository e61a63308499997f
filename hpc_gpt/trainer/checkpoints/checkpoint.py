"""The checkpoints of a run: saving the next one, and resuming from the newest sound one.

A checkpoint is written under a temporary name, completed by complete.json, and gets its final name last. All ranks
share the check of its files, so that each file is read once. `folders` has the names, `save` the stages of a save.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import (
    SCHEMA,
    WRITING,
    CheckpointFault,
    check_file,
    checkpoint_folder_name,
    list_complete,
    marker_fault,
    read_marker,
    set_aside,
)
from hpc_gpt.core.checkpoints.retention import Removal, Retention, describe_removed
from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.format import show_bytes
from hpc_gpt.core.runs.full_disk import Refusal, disk_refusal, find_disk_space
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles, lacks_memory
from hpc_gpt.trainer.checkpoints.save import Save, SaveOutcome
from hpc_gpt.trainer.checkpoints.training_state import put_positions, read_positions
from hpc_gpt.trainer.engines.protocol import TrainingEngine
from hpc_gpt.trainer.ranks import Peers

# Disk space for headers, complete.json and the folders' entries.
_SPARE_BYTES = 1 << 18


@dataclass(frozen=True)
class Progress:
    """The progress of a run: optimizer steps, seconds spent in all attempts, and the identity of its data.

    `positions` of streams by data-parallel rank: one or none in a rank's save, those of all ranks after a resume.
    """

    step: int = 0
    train_s: float = 0.0
    data: str = ""
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Background:
    """The choice whether saves are written while the training continues."""

    wanted: bool = False
    ranks_per_node: int = 1


class Checkpoints:
    """The checkpoints of one run, in `folder`; every method but `busy` and `retain` is collective."""

    def __init__(
        self, folder: Path, ranks: Peers, background: Background | None = None, retention: Retention | None = None
    ) -> None:
        self.folder = folder
        self._ranks = ranks
        self._background = background or Background()
        self._removal = Removal(folder, retention or Retention())
        self._newest: int | None = None
        self._copies = HostCopies()
        self._save: Save | None = None

    @property
    def busy(self) -> bool:
        """Whether this rank is writing."""
        return self._save is not None and self._save.busy

    @property
    def in_background(self) -> bool:
        """Whether saves are written while the training continues."""
        return self._background.wanted

    @property
    def is_saving(self) -> bool:
        """Whether a save has begun and is not over, the same on all ranks."""
        return self._save is not None

    def save(self, engine: TrainingEngine, progress: Progress) -> SaveOutcome:
        """Saves, and waits until the save is over. Removes no other checkpoint.

        If there is a checkpoint of this step, which a resume has skipped, it is renamed.
        """
        outcome = self.begin(engine, progress, wait=True)
        assert outcome is not None
        return outcome

    def begin(
        self, engine: TrainingEngine, progress: Progress, wait: bool = False, refused: Refusal | None = None
    ) -> SaveOutcome | None:
        """Begins a save of the current state. Returns an outcome only if the save is already over.

        In the background the state is copied, if memory suffices, and the training may continue. With `wait` it is
        written at once; such a save may be the attempt's last, with seconds left, so it removes no other checkpoint.
        `refused`: the disk has refused a line of metrics, so nothing is saved.
        """
        assert self._save is None, "one save at a time; `finish` the one before"
        began = time.perf_counter()
        files = RankFiles(self._ranks)
        engine.save(files)
        put_positions(files, progress.positions)
        needed = sum(self._ranks.all_gather(files.bytes)) + _SPARE_BYTES
        refusal = self._prepare(progress.step, needed, refused) if self._ranks.is_first else Refusal()
        refusal = self._ranks.broadcast(refusal)
        if refusal:
            return SaveOutcome(progress.step, refusal, stall_s=time.perf_counter() - began)
        marker = {"schema": SCHEMA, "step": progress.step, "train_s": progress.train_s, "data": progress.data}
        save = Save(self.folder, self._ranks, files, marker, self._removal, retains=not wait)
        # If one rank cannot copy, no rank does: the others would wait for it in the collectives of the next step, and
        # their time limit is shorter than a save.
        held_up = self._copy(files) if self._background.wanted and not wait else ""
        threaded = self._background.wanted and not wait and not held_up
        save.begin(began, threaded, held_up)
        self._save = save
        return None if threaded else self.finish()

    def poll(self, busy: bool) -> SaveOutcome | None:
        """To be called at the end of a step. `busy`: some rank was busy at the end of the step before.

        Returns the outcome of a save that is over, else None.
        """
        if self._save is None:
            return None
        outcome = self._save.poll(busy)
        if outcome is not None:
            self._end(outcome)
        return outcome

    def finish(self) -> SaveOutcome:
        """Waits for the save that has begun, and returns its outcome."""
        assert self._save is not None
        outcome = self._save.finish()
        self._end(outcome)
        return outcome

    def _end(self, outcome: SaveOutcome) -> None:
        self._save = None
        if not outcome.refusal:
            self._newest = outcome.step

    def retain(self) -> None:
        """Removes, on a thread, old checkpoints by the retention rule. The newest one is the last saved or resumed
        from.

        To be called on rank 0.
        """
        if removed := self._removal.retain(self._newest):
            self._say(describe_removed(removed))

    def await_removal(self, patience_s: float | None = None) -> None:
        """Waits until the removal is over, at most `patience_s`. To be called on rank 0."""
        self._removal.wait(patience_s)

    def resume(self, engine: TrainingEngine, is_own: bool = False, step: int | None = None) -> Progress:
        """Loads the newest sound checkpoint, or the one of `step`, and returns its progress; `Progress()` without one.

        Half-written or damaged ones are skipped and logged; damaged ones are renamed if the checkpoints belong to this
        run (`is_own`). Raises CheckpointError for a checkpoint of another model, layout or arithmetic: the run must not
        start from step 0 although it has a checkpoint.
        """
        for path, marker in self.sound(step, is_own):
            engine.load(path)
            saved_step = int(marker["step"])
            if engine.step != saved_step:
                raise CheckpointError(f"{path} says step {saved_step}, but holds step {engine.step}", REMOVE_IT)
            self._newest = saved_step if is_own else None
            positions = self._ranks.broadcast(read_positions(path) if self._ranks.is_first else {})
            return Progress(saved_step, float(marker["train_s"]), str(marker["data"]), positions)
        return Progress()

    def sound(self, step: int | None = None, is_own: bool = False) -> Iterator[tuple[Path, dict[str, Any]]]:
        """Yields (folder, its complete.json) for every sound checkpoint, newest first, or for the one of `step` only.

        Logs the others, and renames damaged ones if the checkpoints belong to this run (`is_own`).
        """
        for path in self._ranks.broadcast(self._candidates() if self._ranks.is_first else []):
            if step is not None and path.name != checkpoint_folder_name(step):
                continue
            # All ranks use the marker that rank 0 reads: another host may see a file a moment later.
            marker, first_fault = self._ranks.broadcast(_read_marker(path) if self._ranks.is_first else ({}, None))
            if fault := first_fault or self._fault(path, marker):
                text = self._set_aside(path) if is_own and fault.damaged and self._ranks.is_first else ""
                self._say(f"skipping checkpoint {path}: {fault.text}{text}")
                self._ranks.barrier()
            else:
                yield path, marker

    def _candidates(self) -> list[Path]:
        """Folders with the name of a complete checkpoint, newest first. Logs the half-written ones."""
        for path in sorted(self.folder.glob(f"{WRITING}*")):
            self._say(f"skipping {path}: it was never completed")
        return list_complete(self.folder)

    def _fault(self, path: Path, marker: dict[str, Any]) -> CheckpointFault | None:
        """The fault of a checkpoint, if it has one. Each rank reads some of the files in complete.json."""
        fault, files = CheckpointFault(), marker["files"]
        for name in sorted(files)[self._ranks.rank :: self._ranks.size]:
            if fault.text:
                break
            fault = check_file(path, name, files[name])
        return next((one for one in self._ranks.all_gather(fault) if one.text), None)

    def _set_aside(self, path: Path) -> str:
        try:
            return f"; set aside as {set_aside(path).name}"
        except OSError as fault:
            return f"; it stays where it is: {fault.strerror}"

    def _prepare(self, step: int, needed_bytes: int, refused: Refusal | None) -> Refusal:
        """Makes the folder to write in, if there is space; on rank 0."""
        try:
            self.folder.mkdir(exist_ok=True)  # without parents: a run folder that was moved is not made again
            # Folders that earlier saves left: no save is being written now.
            self._removal.discard(*self.folder.glob(f"{WRITING}*"))
            refusal = find_disk_space(self.folder, needed_bytes)
            if refusal:
                # The removal of old checkpoints may free space.
                self._removal.wait()
                refusal = find_disk_space(self.folder, needed_bytes)
            if refusal := refusal or refused or Refusal():
                return refusal
            (self.folder / f"{WRITING}{checkpoint_folder_name(step)}").mkdir()
        except OSError as fault:
            return disk_refusal(fault, self.folder)
        return Refusal()

    def _copy(self, files: RankFiles) -> str:
        """Copies the state on every rank; empty text, or the reason of a rank that cannot."""
        needed = self._copies.missing_bytes(files.tensors)
        # All ranks look before the first one takes memory: memory taken already would count twice.
        if lack := self._ranks.first_text(lacks_memory(needed, self._background.ranks_per_node)):
            return lack
        text = ""
        try:
            files.copy(self._copies)
        except MemoryError as fault:
            line = (str(fault).splitlines() or [type(fault).__name__])[0]
            text = f"could not allocate {show_bytes(needed)} of host memory: {line}"
        return self._ranks.first_text(text)

    def _say(self, text: str) -> None:
        if self._ranks.is_first:
            print(text, flush=True)


def _read_marker(path: Path) -> tuple[dict[str, Any], CheckpointFault | None]:
    """A checkpoint's complete.json, and its fault if it has none."""
    marker = read_marker(path)
    return marker, None if marker else marker_fault(path)
