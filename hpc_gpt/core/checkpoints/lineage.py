"""A run that resumes from the checkpoint of another run, its parent: the parent, and the settings that may differ.

Such a run has its own folder and script, and its `resumed_from.json` names the parent. As long as it has no checkpoint,
its trainer loads the parent's newest one and continues the parent's steps, data and schedule. A branch loads the
checkpoint of a certain step, and may have another schedule and other data.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.checkpoints.find_checkpoints import (
    checkpoint_note,
    command_of,
    list_complete,
    newest_checkpoint,
    newest_sound,
    read_marker,
    step_in,
    stored_bytes,
)
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.format import and_more, some
from hpc_gpt.core.runs.run_folder import RESUMED_FROM, RunFolder
from hpc_gpt.core.runs.stored import read_stored

# A larger checkpoint is not read before a run is submitted: a login node takes a minute for this.
MOST_READ_BYTES = 32 << 30


@dataclass(frozen=True)
class Parent:
    """The run from which another run resumes. `step`: its newest checkpoint at that submission; for a `branch`, the
    step after which it begins."""

    run: str
    path: str
    step: int
    branch: bool = False

    @property
    def note(self) -> dict[str, Any]:
        """The content of resumed_from.json."""
        return {key: value for key, value in vars(self).items() if key != "branch" or value}


def find_ancestors(run: RunFolder) -> list[RunFolder]:
    """The runs that this one resumes from, nearest first."""
    ancestors: list[RunFolder] = []
    while path := read_stored(run.path / RESUMED_FROM).get("path"):
        run = RunFolder(Path(path))
        if run in ancestors:
            raise RunFolderError(f"{run.path} resumes from itself", f"correct {RESUMED_FROM} there")
        ancestors.append(run)
    return ancestors


def checkpoint_sources(run: RunFolder, only: int | None = None) -> list[tuple[RunFolder, int | None]]:
    """Lists where a trainer looks for a run's checkpoint, as (run, step): first the run itself, then its ancestors.

    `step` is the only step that counts in that run, None for its newest one: a branch begins after one step of its
    parent, and `only` requests one. An ancestor counts for a step only if the training left it at that step or later.
    """
    sources = [(run, only)]
    for parent in find_ancestors(run):
        note = read_stored(run.path / RESUMED_FROM)
        left, is_branch = int(note.get("step") or 0), bool(note.get("branch"))
        if only is not None and (only > left or (is_branch and only != left)):
            break
        only = left if is_branch else only
        sources.append((parent, only))
        run = parent
    return sources


def branched_at(run: RunFolder) -> int:
    """The step after which a run, or its nearest ancestor that is a branch, began its own schedule; 0 without one."""
    for ancestor in (run, *find_ancestors(run)):
        note = read_stored(ancestor.path / RESUMED_FROM)
        if note.get("branch"):
            return int(note.get("step") or 0)
    return 0


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint from which a run resumes: its own newest sound one, else the one of its nearest ancestor.

    `notes`: newer checkpoints that the trainer will skip, and what could not be checked on this machine.
    """

    step: int
    notes: tuple[str, ...] = ()


def resume_point(run: RunFolder, only: int | None = None) -> ResumePoint | None:
    """Finds where a run resumes, as the trainer does. None if neither it nor an ancestor has a checkpoint (of the step
    `only`, unless that is None).

    Files are checked by their CRC-32, those of a very large checkpoint only by their sizes. ConfigError if no
    checkpoint is sound.
    """
    if (command := command_of(run)) is not None:
        path, saved = newest_checkpoint(run, command)
        note = checkpoint_note(run)
        return None if path is None else ResumePoint(saved or 0, (note,) if note else ())
    notes: list[str] = []
    for source, step in checkpoint_sources(run, only):
        sound, passed = newest_sound(source.checkpoints, MOST_READ_BYTES, step)
        notes += [f"checkpoint {name} is not sound, and is passed over: {fault.text}" for name, fault in passed.items()]
        if sound is None:
            continue
        if (size := stored_bytes(sound)) > MOST_READ_BYTES:
            notes.append(f"only the sizes of the files of {sound.name}, {size / 2**30:.0f} GiB, were checked here")
        return ResumePoint(int(read_marker(sound).get("step") or 0), tuple(notes))
    if not notes:
        return None
    faults = [note.replace(" is not sound, and is passed over", "", 1) for note in notes]
    unlisted = and_more(len(faults), 3, "\nand ")
    raise ConfigError(
        f"run {run.run_id} has no sound checkpoint to resume from:\n" + "\n".join(faults[:3]) + unlisted,
        "bring the files back, or train it again from step 0, as a new run: "
        f"hpc-gpt submit --resume {run.run_id} --from-start",
    )


def parent_of(run: RunFolder, branch: bool = False, step: int | None = None) -> tuple[Parent, ResumePoint]:
    """Returns (`run` as a parent, the checkpoint from which its child begins): that of `step`, or the newest if `step`
    is None. ConfigError if neither it nor one of its ancestors has such a sound checkpoint."""
    point = resume_point(run, step)
    if point is None:
        steps = saved_steps(run)
        what = f"of step {step}" if step is not None else "to branch from" if branch else "to resume from"
        existing = f"; it has checkpoints of steps {some(list(map(str, steps)), 8)}" if steps else ""
        near = min(steps, key=lambda saved: abs(saved - (step or 0)), default=None)
        makes = (
            "hpc-gpt save makes one while the run trains" if branch else "submit a new run, with train.save_every set"
        )
        hint = makes if near is None else f"--branch {run.run_id}@{near}"
        raise ConfigError(f"run {run.run_id} has no checkpoint {what}{existing}", hint)
    return Parent(run.run_id, str(run.path), point.step, branch), point


def saved_steps(run: RunFolder) -> list[int]:
    """The steps after which a branch of the run can begin, by the names of its checkpoints and its ancestors'."""
    branch_steps = set()
    for holder, _ in checkpoint_sources(run):
        steps = {step_in(path.name) for path in list_complete(holder.checkpoints)}
        branch_steps |= {step for step in steps if holder in [source for source, _ in checkpoint_sources(run, step)]}
    return sorted(branch_steps)
