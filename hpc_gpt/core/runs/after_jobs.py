"""The jobs of `[after]` on the disk, one per step, and the checkpoints that they keep.

    after/seen.json           the last checkpoint that was looked at
    after/over/<N>            keep_last no longer keeps the checkpoint of step N: it is removed when its job has left
    after/step-<N>/job.sh     the script of the job, complete as soon as the folder has its name
    after/step-<N>/job.json   its id
    after/step-<N>/started    the id again, written by the job
    after/step-<N>/log, ended.json, left.json    its output, its exit code, the note that it has left the queue

Rank 0 removes checkpoints (`core.runs.retention`), and so does whoever sees that a job has left (`launcher.after`, the
job itself). Each writes its own note before it reads the other's, so one of them removes the checkpoint.
"""

import contextlib
import json
import os
import platform
import shutil
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.core.files import read_text, replace_whole
from hpc_gpt.core.process import Life, life_of, process_identity
from hpc_gpt.core.runs.branches import set_aside_to_delete
from hpc_gpt.core.runs.checkpoints import checkpoint_folder_name, has_all_bytes, list_complete, step_in
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored

AFTER = "after"
# At most so many checkpoints stay because no follower has looked at them yet: it may have died.
_MOST_UNSEEN = 4


@dataclass(frozen=True)
class AfterJob:
    """The job for one step: the folder `after/step-<N>/` of a run."""

    folder: Path

    @property
    def step(self) -> int:
        return step_in(self.folder.name)

    @property
    def script(self) -> Path:
        return self.folder / "job.sh"

    @property
    def log(self) -> Path:
        return self.folder / "log"

    @property
    def export(self) -> Path:
        """The folder for the weights in Hugging Face's format."""
        return self.folder / "export"

    @property
    def name(self) -> str:
        """The name in Slurm, which no other job has."""
        return f"after-{self.folder.parent.parent.name}-{self.step}"

    def noted(self) -> dict[str, Any]:
        """job.json: `job_id, time`, the `process_identity` of a process on this machine, and `waits` if it waits for
        GPUs first. Empty if the job was not submitted; if sbatch did not answer, the id that the job itself wrote.
        """
        return read_stored(self.folder / "job.json") or self._started()

    def _started(self) -> dict[str, Any]:
        with contextlib.suppress(OSError):
            job_id = read_text(self.folder / "started").strip()
            return {"job_id": job_id} if job_id.isdigit() else {}
        return {}

    def note(self, job_id: str, is_process: bool = False, waits: bool = False, locked_on: int | None = None) -> None:
        """Writes job.json; for a process on this machine `job_id` is its pid, and `locked_on` as by `hold_file` of its
        log. Raises RunFolderError."""
        process = process_identity(int(job_id)) if is_process else {}
        process |= {"host": platform.node(), "locked_on": locked_on}
        note = {"job_id": job_id, "time": time.time()} | (process if process.get("pid_start") else {})
        note |= {"waits": True} if waits else {}
        replace_whole(self.folder / "job.json", json.dumps(note) + "\n")

    def life(self) -> Life:
        """Whether the job, a process, lives; GONE for a job of Slurm. It holds the kernel's lock on its log."""
        note = self.noted()
        return life_of({"pid": int(note["job_id"]), **note}, self.log) if "pid_start" in note else Life.GONE

    def ended(self) -> dict[str, Any]:
        """ended.json: `code, time`; empty if the job has not ended."""
        return read_stored(self.folder / "ended.json")

    @property
    def has_left(self) -> bool:
        """Whether a note says that the job has left the queue."""
        return (self.folder / "left.json").exists()

    @property
    def is_over(self) -> bool:
        return self.has_left or bool(self.ended())

    @property
    def is_refused(self) -> bool:
        """Whether the job is not submitted yet: its submission was refused, or was killed."""
        return not self.is_over and not self.noted()

    def state(self, slurm: Mapping[str, str] | None = None) -> str:
        """The job's class of `core.ends.failures` (pending and running included), or `unsubmitted`. `slurm`: {job id:
        class} of all jobs that Slurm knows, None if it was not asked."""
        code = self.ended().get("code")
        if code == 0:
            return "done"
        left = str(read_stored(self.folder / "left.json").get("state") or "unknown")
        if self.has_left or code is not None:
            return "error" if code is not None and left in ("done", "unknown") else left
        note = self.noted()
        if not note:
            return "unsubmitted"
        if "pid_start" in note:
            lives = "pending" if note.get("waits") and not (self.folder / "started").exists() else "running"
            return lives if self.life() is Life.LIVES else "unknown"
        if slurm is not None:
            return slurm.get(str(note.get("job_id")), "unknown")
        return "running" if (self.folder / "started").exists() else "pending"


def list_after(run: Path) -> list[AfterJob]:
    """The jobs of a run, by step."""
    names = list[str]()
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(run / AFTER) if step_in(name) >= 0]
    return sorted((AfterJob(run / AFTER / name) for name in names), key=lambda job: job.step)


def after_table(run: Path, slurm: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """A table with `step, job, state, code` of each job; `slurm` as in `AfterJob.state`."""
    return [
        {"step": job.step, "job": job.noted().get("job_id"), "state": job.state(slurm), "code": job.ended().get("code")}
        for job in list_after(run)
    ]


def read_seen(run: Path) -> dict[str, Any]:
    """seen.json: the `step` of the last checkpoint that was looked at, and their `count`; empty without one."""
    return read_stored(run / AFTER / "seen.json")


def note_seen(run: Path, step: int, count: int) -> None:
    """Writes seen.json. Raises RunFolderError."""
    (run / AFTER).mkdir(exist_ok=True)
    replace_whole(run / AFTER / "seen.json", json.dumps({"step": step, "count": count}) + "\n")


def held_steps(run: Path, steps: Collection[int], followed: bool = False) -> set[int]:
    """The steps among `steps` whose checkpoints a job needs, or for which one may still be submitted. `followed`: the
    run has a follower, which may not have begun."""
    held = {job.step for job in list_after(run) if not job.is_over}
    if (seen := read_seen(run)) or followed:
        held |= set(sorted(step for step in steps if step > seen.get("step", 0))[-_MOST_UNSEEN:])
    return held & set(steps)


def hold_back(run: Path, step: int, followed: bool = False) -> bool:
    """Notes that keep_last no longer keeps a held checkpoint; returns False if its job has left meanwhile."""
    for folder in (run / AFTER, run / AFTER / "over"):  # without its parents: the run may have been moved away
        folder.mkdir(exist_ok=True)
    (run / AFTER / "over" / str(step)).touch()
    return step in held_steps(run, [step], followed)


def forget_over(run: Path) -> None:
    """Forgets which checkpoints are to be removed: the run resumes, perhaps from one of them."""
    for note in (run / AFTER / "over").glob("*"):
        note.unlink(missing_ok=True)


def note_left(run: RunFolder, job: AfterJob, state: str = "") -> None:
    """Notes that a job has left the queue. `state`: its class of `core.ends.failures`, empty if that is not known.
    Raises RunFolderError."""
    if not job.has_left:
        replace_whole(job.folder / "left.json", json.dumps({"state": state, "time": time.time()}) + "\n")
    remove_over(run, job.step)


def remove_over(run: RunFolder, step: int) -> None:
    """Removes a checkpoint that no job needs any more, if keep_last does not keep it, no branch has reserved it, and a
    newer one has all its bytes."""
    over, name = run.path / AFTER / "over" / str(step), checkpoint_folder_name(step)
    newer = (path for path in list_complete(run.checkpoints) if step_in(path.name) > step)
    if over.exists() and any(map(has_all_bytes, newer)):
        with contextlib.suppress(OSError):  # it is gone
            if (aside := set_aside_to_delete(run.checkpoints / name)) is not None:
                shutil.rmtree(aside, ignore_errors=True)
        over.unlink(missing_ok=True)
