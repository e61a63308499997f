"""A run: one folder that alone reproduces and explains one submission.

Everything in it is written once or appended to; only `record.json` is replaced, whole. `attempts/<n>/` holds each
start. Paths and the reading and writing of the small files are settled here, and nowhere else.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_gpt.errors import RunFolderError
from hpc_gpt.resolve import Resolved

# In the place of a job id: a run of a sweep that waits for its turn on this machine.
IN_QUEUE = "queue"
# What the planner said before the job was submitted.
PREDICTED = "predicted.json"


@dataclass(frozen=True)
class Attempt:
    """One start of a run: `attempts/<number>/`."""

    folder: Path

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def log(self) -> Path:
        """All output of the attempt's ranks."""
        return self.folder / "log"

    @property
    def metrics(self) -> Path:
        """One JSON line for every optimizer step."""
        return self.folder / "metrics.jsonl"

    @property
    def requeue(self) -> Path:
        """Left empty by rank 0 when the job must go back to the queue."""
        return self.folder / "requeue"

    @property
    def rendezvous(self) -> Path:
        return self.folder / "rendezvous"

    @property
    def ranks(self) -> Path:
        return self.folder / "ranks"

    def started(self) -> dict[str, Any]:
        """attempt.json: `attempt, job_id, restart, node_list, started`; empty where it was not written."""
        return _with_sound_job_id(read_json(self.folder / "attempt.json"))

    def ended(self) -> dict[str, Any]:
        """ended.json: `ended, cause, step, time, requeue`; empty while the attempt runs or was killed."""
        return read_json(self.folder / "ended.json")

    def last_metrics(self) -> dict[str, Any]:
        """The last whole line of metrics.jsonl; empty before the first. Of a long file the end alone is read."""
        lines = read_json_lines(self.metrics, last_bytes=8192)
        return lines[-1] if lines else {}

    def write_ended(self, ended: str, cause: str | None, step: int, requeue: bool = False) -> None:
        """Writes ended.json unless it is there: the first word on how an attempt ended stands."""
        end = {"ended": ended, "cause": cause, "step": step, "time": time.time(), "requeue": requeue}
        write_once(self.folder / "ended.json", json.dumps(end) + "\n")


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run, `logs/<experiment>/<run-id>/`."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def job_script(self) -> Path:
        return self.path / "job.sh"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def sweep_id(self) -> str | None:
        """The id that the runs of one `submit --sweep` share; None for a run of no sweep."""
        found = read_json(self.path / "sweep.json").get("id")
        return str(found) if found else None

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    def resolved(self) -> Resolved:
        """The run's settings; ConfigError where resolved.json is missing or damaged."""
        try:
            return Resolved.from_json((self.path / "resolved.json").read_text(encoding="utf-8", errors="replace"))
        except OSError as fault:
            raise RunFolderError(
                f"{self.path}: no resolved.json to read ({fault.strerror})", "is this a run folder?"
            ) from None

    def attempts(self) -> list[Attempt]:
        """Every start, first to last."""
        folder = self.path / "attempts"
        numbers = sorted(
            int(entry.name) for entry in folder.glob("[0-9]*") if re.fullmatch("[1-9][0-9]{0,8}", entry.name)
        )
        return [Attempt(folder / str(number)) for number in numbers]

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / str(number))

    def new_attempt(self) -> Attempt:
        """Makes the next free `attempts/<n>/`; two starts at once get two numbers."""
        attempts = self.attempts()
        number = attempts[-1].number + 1 if attempts else 1
        while True:
            try:
                (self.path / "attempts" / str(number)).mkdir(parents=True)
                return self.attempt(number)
            except FileExistsError:
                number += 1

    def submissions(self) -> list[dict[str, Any]]:
        """Every line of submissions.jsonl, first to last."""
        return [_with_sound_job_id(line) for line in read_json_lines(self.path / "submissions.jsonl")]

    def add_submission(self, submission: Mapping[str, Any]) -> None:
        append_line(self.path / "submissions.jsonl", json.dumps({"time": time.time(), **submission}))

    def cancelled_mark(self, job_id: str) -> Path:
        """The file `hpc-gpt cancel` leaves before it ends a job, so that nothing requeues it."""
        return self.path / f"cancelled.{job_id}"


def create_run(
    logs: Path,
    resolved: Resolved,
    script: str,
    experiment_text: str,
    ds_config: Mapping[str, Any] | None,
    provenance: Mapping[str, Any] | None = None,
    resumed_from: Mapping[str, Any] | None = None,
    sweep: Mapping[str, Any] | None = None,
    predicted: Mapping[str, Any] | None = None,
) -> RunFolder:
    """Makes `logs/<experiment>/<run-id>/` and writes what is known before the job starts; no file for None.

    The id is the time and four random hex digits; a clash makes a new id. Raises RunFolderError where the folder
    cannot be written; what was begun is then taken away again.
    """
    parts = {"experiment.toml": experiment_text, "resolved.json": resolved.to_json()}
    notes = {"ds_config.json": ds_config, "provenance.json": provenance, "resumed_from.json": resumed_from}
    notes |= {"sweep.json": sweep, PREDICTED: predicted}
    parts |= {name: json.dumps(note, indent=1) + "\n" for name, note in notes.items() if note is not None}
    parts["job.sh"] = script
    run = RunFolder(claim_folder(logs / resolved.slug))
    try:
        for name, text in parts.items():
            write_once(run.path / name, text)
    except RunFolderError:
        for name in parts:
            (run.path / name).unlink(missing_ok=True)
        run.path.rmdir()
        raise
    return run


def claim_folder(parent: Path) -> Path:
    """Makes a folder named by the time and four random hex digits, a run's or a sweep's id; RunFolderError."""
    for _ in range(100):
        path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
            return path.resolve()
        except FileExistsError:
            continue
        except OSError as fault:
            raise RunFolderError(
                f"cannot make run folder {path}: {fault.strerror}", "set HPC_GPT_LOGS to a folder you can write"
            ) from None
    raise RunFolderError(f"no free run id under {parent} in 100 tries", "try again")


def job_ids(run: RunFolder) -> list[str]:
    """The ids of the jobs a run has had, first to last, each once."""
    ids = [str(line["job_id"]) for line in run.submissions() if line.get("job_id")]
    ids += [str(start["job_id"]) for attempt in run.attempts() if (start := attempt.started()).get("job_id")]
    return list(dict.fromkeys(ids))


def newest_submission(run: RunFolder) -> dict[str, Any]:
    """The last line of submissions.jsonl, or one made up from the last attempt of a run that plain sbatch started."""
    lines = run.submissions()
    last = lines[-1] if lines else {}
    attempts = run.attempts()
    start = attempts[-1].started() if attempts else {}
    by_sbatch = start.get("job_id") and start["job_id"] not in {line.get("job_id") for line in lines}
    # Plain sbatch leaves no line; a `submit --resume` after it is the newer job, though that has not started.
    if by_sbatch and not _seconds(start.get("started")) < _seconds(last.get("time")):
        return {"scheduler": "slurm", "job_id": str(start["job_id"]), "refused": None}
    return last


def _seconds(moment: Any) -> float:
    return float(moment) if isinstance(moment, int | float) else 0.0


def _with_sound_job_id(tables: dict[str, Any]) -> dict[str, Any]:
    """Without a job id that can be none: it becomes part of a file's name."""
    job_id = tables.get("job_id")
    if isinstance(job_id, str | int) and re.fullmatch(r"[\w.\[\]+-]{1,64}", str(job_id)[:65]):
        return tables
    return {key: value for key, value in tables.items() if key != "job_id"}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; empty where the file is missing, half written or no object."""
    try:
        # Opening a pipe would wait.
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_json_lines(path: Path, last_bytes: int | None = None) -> list[dict[str, Any]]:
    """The JSON objects of a file, or of its end, a line each. A line cut off or damaged is left out."""
    if not path.is_file():
        return []
    try:
        with path.open("rb") as file:
            if last_bytes is not None:
                file.seek(max(0, os.fstat(file.fileno()).st_size - last_bytes))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    objects = []
    for line in lines:
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(found, dict):
            objects.append(found)
    return objects


def write_once(path: Path, text: str) -> None:
    """Writes a file whole or not at all, and never over another; RunFolderError where the disk refuses."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(2)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        with contextlib.suppress(FileExistsError):
            give_name(aside, path)
        aside.unlink(missing_ok=True)
    except OSError as fault:
        aside.unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {path}: {fault.strerror}", "is the disk full or read-only?") from None


def give_name(aside: Path, path: Path) -> None:
    """Gives a finished file its name; FileExistsError if that is taken. `aside` may stay, as a second name."""
    try:
        os.link(aside, path)
    except FileExistsError:
        raise
    except OSError as fault:
        # Not every file system has hard links. A rename would replace, so look first.
        if fault.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
        if path.exists():
            raise FileExistsError(errno.EEXIST, "there already", str(path)) from None
        aside.rename(path)


def replace_whole(path: Path, text: str) -> None:
    """Replaces a file in one step, so that a reader sees the old text or the new one."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as fault:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise RunFolderError(f"cannot write {path}: {fault.strerror}", "is the disk full or read-only?") from None


def append_line(path: Path, line: str) -> None:
    """Appends one line in one write; a line before it that was cut off is ended first."""
    try:
        with open(path, "ab+") as file:
            if file.tell() and (file.seek(-1, os.SEEK_END) or True) and file.read(1) != b"\n":
                line = "\n" + line
            file.write(line.encode() + b"\n")
    except OSError as fault:
        raise RunFolderError(f"cannot write {path}: {fault.strerror}", "is the disk full or read-only?") from None
