"""Notes that keep a checkpoint for a branch until the branch has its own, whatever the keep_last of its run says.

`branches/branch.<run id>.json`, in the folder of the run that has the checkpoint, says which run begins after which
step; the retention of the run that has it reads it. If the note cannot be written, the checkpoint is linked into the
branch's own folder (hard links). A resumption as a new run leaves the same note, for `hpc-gpt clean`.
`branches/reader.<host>.<pid>.<number>.json` belongs to a process that reads the checkpoints, or submits a run that is
to read them: as long as the process lives, no checkpoint is removed.
"""

import contextlib
import glob
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpc_gpt.core.checkpoints.find_checkpoints import (
    COMPLETE,
    DELETING,
    checkpoint_folder_name,
    has_all_bytes,
    list_complete,
    set_aside,
)
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.process import Life
from hpc_gpt.core.processes.lock import hold, holder_in, let_go, process_holder, text_of
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored

BRANCHES = "branches"
# The note of a reader that cannot be asked, as on another host, counts for so long: no export takes a day.
_READS_S = 86400.0
_TO_DELETE = re.compile(rf"{re.escape(DELETING)}(step-(\d+))-\d+")


def reserved_steps(run: Path) -> frozenset[int]:
    """The steps of a run's checkpoints from which branches begin that have no checkpoint of their own yet."""
    notes = [read_stored(path) for path in run.glob(f"{BRANCHES}/branch.*.json")]
    return frozenset(note["step"] for note in notes if note.get("path") and "step" in note and _waits(note["path"]))


@contextlib.contextmanager
def reading(run: RunFolder) -> Iterator[None]:
    """Keeps every checkpoint of a run during the block. If the folder cannot be written, no note is left."""
    this_process = process_holder(os.getpid())
    # In containers many processes may share a host name and a pid, and this process may read in two places at once.
    note = run.path / BRANCHES / f"reader.{this_process.host}.{this_process.pid}.{secrets.token_hex(4)}.json"
    for left in run.path.glob(f"{BRANCHES}/reader.{glob.escape(this_process.host)}.*.json"):
        if (reader := holder_in(left)) is not None and reader.life(left) is Life.GONE:
            with contextlib.suppress(OSError):
                left.unlink()
    with contextlib.suppress(RunFolderError):
        write_once(note, text_of(this_process))
        hold(note, this_process)
    try:
        yield
    finally:
        let_go(note)
        with contextlib.suppress(OSError):
            note.unlink(missing_ok=True)


def is_read(run: Path) -> bool:
    """Whether a process reads a run's checkpoints, or may read them, as its host cannot be asked."""
    for note in run.glob(f"{BRANCHES}/reader.*.json"):
        reader = holder_in(note)
        life = reader.life(note) if reader is not None else Life.UNKNOWN
        with contextlib.suppress(OSError):  # it has just ended
            if life is Life.LIVES or (life is Life.UNKNOWN and time.time() - note.stat().st_mtime < _READS_S):
                return True
    return False


def _waits(branch: str) -> bool:
    """Whether a branch still needs the checkpoint; yes if this host does not see the branch's folder."""
    folder = Path(branch)
    return waits_for_parent(RunFolder(folder)) if folder.is_dir() else not folder.parent.is_dir()


def waits_for_parent(run: RunFolder) -> bool:
    """Whether a run that begins from another run's checkpoint still needs it, as it has none of its own. A run that
    Slurm refused does not, as a retry is another run."""
    if any(line.get("refused") for line in run.submissions()[-1:]) and not run.attempts():
        return False
    return not any(has_all_bytes(path) for path in list_complete(run.checkpoints))


def set_aside_to_delete(checkpoint: Path) -> Path | None:
    """Renames a checkpoint that is to be removed, and returns its new path. If a branch has reserved it, perhaps just
    now, or a process reads it, it gets its name back: None. A branch that reserves it later finds it gone."""
    aside = set_aside(checkpoint, DELETING)
    return None if put_back(aside) else aside


def put_back(aside: Path) -> bool:
    """Gives a folder that is about to be deleted its name back if it is a whole checkpoint that a branch has reserved
    or a process reads; returns whether it did. Whoever deletes a folder calls this last."""
    match = _TO_DELETE.fullmatch(aside.name)
    if not match or not has_all_bytes(aside):
        return False
    run = aside.parent.parent
    if int(match[2]) not in reserved_steps(run) and not is_read(run):
        return False
    try:
        aside.rename(aside.with_name(match[1]))
    except OSError:  # the training has saved that step again, or another has removed it
        return False
    return True


class CheckpointHold:
    """Keeps the checkpoint of `step` of `run` for a branch. If that fails, `is_live` says whether the run may remove
    the checkpoint."""

    def __init__(self, run: RunFolder, step: int, is_live: Callable[[], bool]) -> None:
        self._run, self._name, self._step, self._is_live = run, checkpoint_folder_name(step), step, is_live

    def place(self, folder: Path) -> None:
        """Keeps the checkpoint for the branch in `folder`. RunFolderError if it was removed, or may be."""
        checkpoint = self._run.checkpoints / self._name
        refusal = self._reserve(folder)
        if refusal:
            refusal = self._link(checkpoint, folder) and refusal
        if not (checkpoint / COMPLETE).is_file():
            raise RunFolderError(
                f"checkpoint {self._name} of run {self._run.run_id} was removed just now",
                "branch from a later checkpoint",
            )
        if refusal and self._is_live():
            raise RunFolderError(
                f"run {self._run.run_id} trains and may remove its checkpoint {self._name}: {refusal}, and no hard "
                "link can be made",
                "branch after the run has ended, or set HPC_GPT_LOGS to a folder on the disk of that run",
            )

    def _reserve(self, folder: Path) -> str:
        """Notes the branch beside the checkpoints; returns why it could not."""
        note = {"path": str(folder.resolve()), "step": self._step}
        try:
            write_once(self._run.path / BRANCHES / f"branch.{folder.name}.json", json.dumps(note) + "\n")
        except RunFolderError as fault:
            return str(fault)
        return ""

    def _link(self, checkpoint: Path, folder: Path) -> str:
        """Links the checkpoint's files into the branch's own folder; if it cannot, leaves nothing and returns why."""
        target = RunFolder(folder).checkpoints / self._name
        aside = target.with_name(f".writing-{self._name}")
        try:
            for path in sorted(checkpoint.rglob("*")):
                place = aside / path.relative_to(checkpoint)
                place.parent.mkdir(parents=True, exist_ok=True)
                if path.is_file():
                    os.link(path, place)
            aside.rename(target)
        except OSError as fault:
            shutil.rmtree(aside, ignore_errors=True)
            return str(fault.strerror)
        return ""
