"""One save, from the end of a step to a complete checkpoint, or to the reason why it failed.

    begun        every rank has named its files; rank 0 has made the folder and found space on the disk
    writing      every rank writes its files with their sums; in the background on a thread, from copies
    completing   rank 0 writes complete.json, gives the folder its name, and renames checkpoints that are not kept
    over         a `SaveOutcome`, the same on all ranks

All ranks go from one stage to the next together, at the end of a step, when no rank reports any more that it is busy.
A disk that stops answering is the watchdog's: what waits for the thread that writes is ended by its limit.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import WRITING, checkpoint_folder_name
from hpc_gpt.core.checkpoints.retention import Removal
from hpc_gpt.core.runs.full_disk import Refusal, disk_refusal
from hpc_gpt.trainer.checkpoints.folders import Sums, complete
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.ranks import Peers


@dataclass(frozen=True)
class SaveOutcome:
    """The outcome of the save of `step`. `save_s`: seconds until it was complete; `stall_s`: seconds that the training
    waited."""

    step: int
    refusal: Refusal = field(default_factory=Refusal)
    save_s: float = 0.0
    stall_s: float = 0.0
    removed: tuple[str, ...] = ()
    # The reason if some rank could not write in the background: the first such rank's.
    held_up: str = ""


@dataclass
class _Part:
    """The sums of the files that one rank has written, or the disk's refusal."""

    sums: Sums = field(default_factory=dict)
    refusal: Refusal = field(default_factory=Refusal)
    held_up: str = ""


class Save:
    """One save, in stages. `retains`: it removes old checkpoints afterwards. Every method but `busy` is collective."""

    def __init__(
        self, folder: Path, ranks: Peers, files: RankFiles, marker: dict[str, Any], removal: Removal, retains: bool
    ) -> None:
        self.step = int(marker["step"])
        self._folder, self._ranks, self._files, self._marker = folder, ranks, files, marker
        self._aside = folder / f"{WRITING}{checkpoint_folder_name(self.step)}"
        self._removal, self._retains = removal, retains
        self._began = self._stall_s = 0.0
        self._threaded = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._part = _Part()
        self._completing = False
        self._polled = False
        self._removed: list[str] = []
        self._refusal = Refusal()

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing."""
        return self._thread is not None and self._thread.is_alive()

    def begin(self, began: float, threaded: bool, held_up: str) -> None:
        """Writes this rank's files, on a thread or at once. `began`: the time at which the training stopped for the
        save."""
        self._began, self._threaded = began, threaded
        self._part.held_up = held_up
        self._run(self._write, threaded)
        self._stall_s = time.perf_counter() - began

    def poll(self, busy: bool) -> SaveOutcome | None:
        """To be called at the end of a step. `busy`: some rank was busy at the end of the step before."""
        if not self._polled:
            # `busy` was reported before this stage began.
            self._polled = True
            return None
        return None if busy else self._advance(threaded=True)

    def finish(self) -> SaveOutcome:
        """Waits until the save is over, and returns its outcome. To be called after the same step on all ranks."""
        began = time.perf_counter()
        while True:
            if outcome := self._advance(threaded=self._threaded):
                return replace(outcome, stall_s=outcome.stall_s + time.perf_counter() - began)

    def _advance(self, threaded: bool) -> SaveOutcome | None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error
        self._polled = False
        if self._completing:
            seconds = time.perf_counter() - self._began
            outcome = SaveOutcome(
                self.step, self._refusal, seconds, self._stall_s, tuple(self._removed), self._part.held_up
            )
            return self._ranks.broadcast(outcome)
        # Only rank 0 gets them: every rank's list of files on every rank would grow with the square of the ranks.
        parts = self._ranks.gather(self._part)
        refusals = (part.refusal for part in parts if part.refusal)
        held_up = (part.held_up for part in parts if part.held_up)
        refusal, self._part.held_up = self._ranks.broadcast((next(refusals, Refusal()), next(held_up, "")))
        if refusal:
            self._discard()
            return SaveOutcome(self.step, refusal, time.perf_counter() - self._began, self._stall_s)
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
            # A daemon: the process can end while the disk does not answer.
            self._thread = threading.Thread(target=run, name="save", daemon=True)
            self._thread.start()
        else:
            self._thread = None
            work()

    def _write(self) -> None:
        try:
            self._part.sums = self._files.write(self._aside)
        except (OSError, RuntimeError) as fault:
            self._part.refusal = disk_refusal(fault, self._folder)

    def _complete(self, parts: list[_Part]) -> None:
        """Completes the checkpoint. Called on rank 0."""
        sums = {name: file for part in parts for name, file in part.sums.items()}
        try:
            marker = self._marker | {"time": time.time(), "files": dict(sorted(sums.items()))}
            complete(self._aside, self._folder / checkpoint_folder_name(self.step), marker)
        except (OSError, RuntimeError) as fault:
            self._refusal = disk_refusal(fault, self._folder)
            self._discard()
            return
        self._removed = self._removal.retain(self.step if self._retains else None)

    def _discard(self) -> None:
        if self._ranks.is_first:
            self._removal.discard(self._aside)
