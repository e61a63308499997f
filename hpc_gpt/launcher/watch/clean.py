"""Removes files of runs that have ended: checkpoints, and the whole folder of a run that trained nothing: its
submission was refused, it never began, or it failed before its first step and its program left nothing.

Records, logs and scripts of another run are never removed, nor is data. Nothing is removed from a run that
trains or waits; a run whose state is not known may train. The run's lock keeps a resumption and a removal apart while
checkpoints are renamed: a renamed folder is not a checkpoint any more, and is deleted after that
(`core.checkpoints.retention`). A submission that resumes notes itself as a reader before it looks.
"""

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.branches import is_read, waits_for_parent
from hpc_gpt.core.checkpoints.disk_space import bytes_in
from hpc_gpt.core.checkpoints.find_checkpoints import (
    DAMAGED,
    DELETING,
    MEGATRON,
    WRITING,
    command_of,
    faults_of,
    has_all_bytes,
    list_complete,
    step_in,
)
from hpc_gpt.core.checkpoints.lineage import MOST_READ_BYTES, checkpoint_sources
from hpc_gpt.core.checkpoints.retention import Removal, Retention, rename_to_delete
from hpc_gpt.core.ends.failures import LIVE, meaning
from hpc_gpt.core.errors import RunFolderError, UserError
from hpc_gpt.core.files import logs_folder, read_text, user_name
from hpc_gpt.core.format import show_duration, some
from hpc_gpt.core.processes.lock import RunLocked, lock_path, locked
from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.core.runs.rounds import BENCH_FILE, measured_rounds
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.runs.work_archive import has_own_files
from hpc_gpt.launcher.attempts.life import ask_life
from hpc_gpt.launcher.watch.status import NO_ANSWER, RunStatus, ask_status

# Seconds between two reports of a long removal.
_REPORT_S = 5.0


IsSound = Callable[[Path], bool]


@dataclass(frozen=True)
class CleanRules:
    """The newest `keep` sound checkpoints stay, and everything of a run that ended in the last `older_s` seconds."""

    keep: int = 1
    older_s: float = 0.0


@dataclass(frozen=True)
class RoomPiece:
    """A checkpoint or a run folder, and why it may be removed, or stays."""

    path: Path
    bytes: int
    why: str


@dataclass
class RunRoom:
    """The files of a run that may be removed, and those that stay. `refused`: why nothing may be removed; `lives`: it
    is refused because the run trains, waits, or may do so; `fault`: why a part could not be removed, or why nothing
    in the run may be changed."""

    run: RunFolder
    state: str
    goes: list[RoomPiece] = field(default_factory=list)
    stays: list[RoomPiece] = field(default_factory=list)
    refused: str = ""
    lives: bool = False
    fault: str = ""

    @property
    def bytes(self) -> int:
        """The bytes that the removal frees."""
        return sum(piece.bytes for piece in self.goes)

    def to_dict(self) -> dict[str, Any]:
        pieces = {
            kind: [
                {"name": one.path.name, "path": str(one.path), "bytes": one.bytes, "why": one.why} for one in of_kind
            ]
            for kind, of_kind in (("goes", self.goes), ("stays", self.stays))
        }
        why = {"refused": self.refused or None, "lives": self.lives, "fault": self.fault or None}
        return {"run": self.run.run_id, "folder": str(self.run.path), "state": self.state, **why,
                "bytes": self.bytes, **pieces}  # fmt: skip


def look(runs: Sequence[RunFolder], rules: CleanRules, is_sound: IsSound = has_all_bytes) -> list[RunRoom]:
    """Finds what may be removed from each run; only sound checkpoints count as kept. Raises RunFolderError."""
    statuses, silence = ask_status(runs)
    rooms = [RunRoom(run, status.state) for run, status in zip(runs, statuses, strict=True)]
    roots = {logs_folder(), *(run.path.parent.parent for run in runs)}
    children = [run for root in roots for run in list_runs(root) if (run.path / RESUMED_FROM).exists()]
    children = [run for run in children if waits_for_parent(run)]
    for room, status in zip(rooms, statuses, strict=True):
        run = room.run
        if not all(os.access(path, os.W_OK | os.X_OK) for path in (run.path, run.checkpoints) if path.exists()):
            owner = user_name(run.path.stat().st_uid)
            room.refused = room.fault = f"Permission denied: it belongs to {owner}, who can clean it"
        elif why := _may_live(run, status, silence):
            room.refused, room.lives = why, True
        elif (ago_s := _ended_ago_s(run)) < rules.older_s:
            room.refused = f"it ended {show_duration(ago_s)} ago"
        elif (why := _why_useless(run, status.state)) and is_read(run.path):
            room.refused = "a submission reads it"
        elif why:
            room.goes = [RoomPiece(run.path, bytes_in(run.path), why)]
        elif (command := command_of(run)) is not None or (run.checkpoints / MEGATRON).exists():
            names = [path.name for path in sorted(run.checkpoints.glob("*"))]
            elsewhere = command.checkpoints if command is not None else None
            which = some(names, 3) if names else elsewhere
            written = f"the checkpoints ({which})" if which else "its results"
            room.refused = f"its own program wrote {written}; delete by hand those that you do not need"
        else:
            with _fault_of(room):
                _sort_out(room, rules, is_sound, children)
    return rooms


@contextlib.contextmanager
def _fault_of(room: RunRoom) -> Iterator[None]:
    """Notes an error of the disk, or a refusal by another process, that the block raises."""
    try:
        yield
    except (UserError, OSError) as fault:
        cause = f"{fault.filename}: {fault.strerror}" if isinstance(fault, OSError) else str(fault)
        room.refused = room.fault = cause


def _may_live(run: RunFolder, status: RunStatus, silence: str) -> str:
    """Says why a run counts as one that trains or waits; empty if it is known to have ended."""
    if status.state in LIVE:
        return f"it is {status.state}"
    if status.state == "unknown" or status.cause == NO_ANSWER:
        return "; ".join(filter(None, ("it is not known whether it has ended", status.cause)))
    if status.scheduler != "slurm" or _was_never_queued(run):
        return ""
    if silence:
        return f"it is not known whether one of its jobs waits: {silence}"
    owner = run.path.stat().st_uid
    if owner != os.geteuid():
        return f"it is not known whether one of its jobs waits: only squeue of user {user_name(owner)} shows that"
    return ""


def _why_useless(run: RunFolder, state: str) -> str:
    """Why the whole folder of a run that has ended may go: it is not done, it trained nothing, and its program left
    nothing in it. Empty if not."""
    if _was_never_queued(run):
        return "its submission was refused, and nothing was queued"
    command = command_of(run)
    if state == "done" or any(run.checkpoints.glob("*")) or (command is not None and command.checkpoints is not None):
        return ""
    # The log of a program that did not fail may lack its steps.
    may_have_trained = command is not None and (meaning(state).good or meaning(state).by_scheduler)
    if (run.attempts() and may_have_trained) or _has_trained(run) or has_own_files(run.path):
        return ""
    return f"it ended as {state}, before its first step" if run.attempts() else "it never began"


def _has_trained(run: RunFolder) -> bool:
    """Whether an attempt of a run made a step; of a race of 0.4, whether a visit was measured."""
    if measured_rounds(run.path / BENCH_FILE):
        return True
    return any(attempt.last_metrics() or attempt.loss_without_step() is not None for attempt in run.attempts())


def _was_never_queued(run: RunFolder) -> bool:
    """Whether all submissions of a run were refused, so that it has no job, no attempt and no checkpoint."""
    lines = run.submissions()
    refused = all(line.get("refused") and not (line.get("job_id") or line.get("lost")) for line in lines)
    return bool(lines) and refused and not run.attempts() and not any(run.checkpoints.glob("*"))


def _ended_ago_s(run: RunFolder) -> float:
    attempts = run.attempts()
    ended = attempts[-1].ended().get("time") if attempts else None
    return max(0.0, time.time() - (ended or (attempts[-1].folder if attempts else run.path).stat().st_mtime))


def _sort_out(room: RunRoom, rules: CleanRules, is_sound: IsSound, children: Sequence[RunFolder]) -> None:
    run, retention = room.run, Retention(rules.keep)
    checkpoints = list_complete(run.checkpoints)
    is_sound = (
        is_sound if len(checkpoints) > rules.keep else has_all_bytes
    )  # no checkpoint goes, so they need not be read
    newest = step_in(checkpoints[0].name) if checkpoints else -1
    is_kept = f"--keep {rules.keep}: newer sound ones stay" if rules.keep > 1 else "a newer sound one stays"
    for path, why in retention.sort_out(run.checkpoints, newest, _steps_for(run, children), is_sound):
        may_go = "it was found to be damaged" if path.name.startswith(DAMAGED) else is_kept
        piece = RoomPiece(path, bytes_in(path), why or (may_go if rules.keep else "--keep none"))
        (room.stays if why else room.goes).append(piece)
    for prefix, why in ((WRITING, "it was never completed"), (DELETING, "its removal was cut off")):
        room.goes += [RoomPiece(path, bytes_in(path), why) for path in sorted(run.checkpoints.glob(f"{prefix}*"))]


def _steps_for(run: RunFolder, children: Sequence[RunFolder]) -> set[int]:
    """The steps of a run's checkpoints from which other runs begin that have no checkpoint of their own. Runs of this
    version also have a note in `branches/`."""
    newest = next((step_in(path.name) for path in list_complete(run.checkpoints) if has_all_bytes(path)), -1)
    steps = set()
    for child in children:
        with contextlib.suppress(RunFolderError, OSError):  # it resumes from itself, or its parent is gone
            sources = checkpoint_sources(child)[1:]
            steps |= {newest if step is None else step for source, step in sources if source.path.samefile(run.path)}
    return steps


def clean(run: RunFolder, rules: CleanRules, say: Callable[[str], object]) -> RunRoom:
    """Removes what may be removed from a run, and returns it; `say` gets the progress of a long removal.

    The run is looked at again under its lock, as it may have changed. A checkpoint is sound if its files read as they
    were written; for a very large checkpoint only the sizes are compared.
    """
    is_sound = functools.cache(lambda path: next(faults_of(path, MOST_READ_BYTES), None) is None)
    removal = Removal(run.checkpoints, Retention())
    (before,) = look([run], rules, is_sound)  # without the lock: reading may take a minute, and a job may need the lock
    with _fault_of(before), _locked(run):
        (room,) = look([run], rules, is_sound)
        if [piece.path for piece in room.goes] == [run.path] and not room.refused:
            _remove_folder(run)
            return room
        for piece in () if room.refused else room.goes:
            if not piece.path.name.startswith(DELETING):
                rename_to_delete(piece.path)
    if before.fault or room.refused:
        return before if before.fault else room
    removal.begin()
    while not removal.wait(_REPORT_S):
        say(f"{run.run_id}: {len(list(run.checkpoints.glob(f'{DELETING}*')))} of {len(room.goes)} are still there")
    left = [piece for piece in room.goes if piece.path.exists()]
    room.goes = [piece for piece in room.goes if piece not in left]
    room.stays += [RoomPiece(piece.path, piece.bytes, "it was reserved just now") for piece in left]
    if halves := sorted(path.name for path in run.checkpoints.glob(f"{DELETING}*")):
        named = ", ".join(halves[:3])
        room.fault = f"{named} could not be removed: do they belong to another user, or does the disk refuse it?"
    return room


def remove_sent(logs: Path) -> None:
    """Removes what `--host` has sent here, if that was 30 days ago or earlier and no run in `logs` names its folder."""
    with contextlib.suppress(OSError):  # of another user, or not there
        sent = (Path.home() / ".hpc-gpt" / "sent").iterdir()
        old = [path for path in sent if path.stat().st_mtime < time.time() - 30 * 86400]
        named = "".join(map(read_text, logs.glob("*/*/provenance.json"))) if old else ""
        for path in old:
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)


def _remove_folder(run: RunFolder) -> None:
    """Removes a run's folder. The files that show that its submission was refused go last, so that the next removal can
    finish one that was cut off."""
    for path in sorted(run.path.iterdir()):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name not in ("resolved.json", "submissions.jsonl", lock_path(run).name):
            path.unlink()
    shutil.rmtree(run.path)


@contextlib.contextmanager
def _locked(run: RunFolder) -> Iterator[None]:
    """Holds the run's lock in the block; waits for another removal, which has it for a moment. Raises RunLocked if
    something else has it."""
    until = time.monotonic() + _REPORT_S
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked(run, lambda other: ask_life(run, other)[0]))
                break
            except RunLocked:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        yield
