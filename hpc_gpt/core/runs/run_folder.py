"""A run: one folder that alone reproduces and explains one submission.

Every file in the folder is written once or appended to; only `record.json` is replaced, as a whole, and `next.json`
after the pause before a restart in the job. Each start has a folder `attempts/<n>/`. All paths in a
run folder are defined here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import platform
import re
import shlex
import shutil
import time
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hpc_gpt.core.errors import ConfigError, OsErrorAs, RunFolderError, read_hint
from hpc_gpt.core.files import (
    append_line,
    aside,
    give_name,
    read_text,
    refused_access,
    replace_whole,
    try_folder,
    user_name,
    whose,
    write_once,
)
from hpc_gpt.core.format import plain
from hpc_gpt.core.process import host_clock
from hpc_gpt.core.runs.stored import read_last_stored_line, read_stored, read_stored_lines
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.experiment import Command
from hpc_gpt.core.settings.resolved import Resolved

# Stands for the job id of a run of a sweep that waits for its turn on this machine.
IN_QUEUE = "queue"
# The planner's prediction at the submission.
PREDICTED = "predicted.json"
# In provenance.json: the path of the experiment's file, and the folder of the file in which data.path is set.
EXPERIMENT_FILE = "experiment_file"
EXPERIMENT = "experiment.toml"
DATA_BESIDE = "data_beside"
RESUMED_FROM = "resumed_from.json"
# The folder with the run's copy of the files of command.workdir, if it has a copy.
WORK = "work"
# The here-document of job.sh with the text of resolved.json.
_MARK = "HPC_GPT_RESOLVED"
_CARRIED = re.compile(rf"<<'{_MARK}'[^\n]*\n(.*?)^{_MARK}$", re.DOTALL | re.MULTILINE)
_NUMBER = re.compile("[1-9][0-9]{0,8}")
# The id of a run or a sweep, as claim_folder makes it; a run that plain sbatch made has another.
NEW_ID = re.compile("[0-9]{8}-[0-9]{6}-[0-9a-f]{4}")
_LINE_BYTES = 4096  # a line of metrics.jsonl has less
_WRITABLE = "set HPC_GPT_LOGS to a folder you can write"
_Owner = TypeVar("_Owner")
_Read = TypeVar("_Read")


class AttemptPath:
    """An attribute of Attempt: the path of that name in its folder."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, attempt: Attempt, kind: object = None) -> Path:
        return attempt.folder / self._name


@dataclass(frozen=True)
class Attempt:
    """One start of a run: `attempts/<number>/`."""

    folder: Path

    log = AttemptPath("log")  # the output of all ranks
    err = AttemptPath("err")  # the standard error of a job script with `--error`; else it is in the log
    metrics = AttemptPath("metrics.jsonl")  # one JSON line per optimizer step
    at_once = AttemptPath("at-once")  # a mark: the output has steps of several trainings at once
    rendezvous = AttemptPath("rendezvous")
    preflight = AttemptPath("preflight.json")  # the figures and the verdict of its preflight
    measured = AttemptPath("measured.json")  # what our trainer's ranks measured, written after ended.json
    ranks = AttemptPath("ranks")
    processes = AttemptPath("processes.json")  # of the attempt on this machine; see `core.processes.find_processes`
    resume = AttemptPath("resume.json")  # the checkpoint that a script gets at its start: `path`, "" for none, `step`
    asked = AttemptPath("asked")  # the requests to the attempt; see `core.processes.requests`
    heartbeats = AttemptPath("beats")  # the heartbeats of each rank; see `core.processes.heartbeats`
    stacks = AttemptPath("stacks")  # the stacks of each rank's threads in a hang, `<rank>.txt`
    notified = AttemptPath("notified")  # a file for each event that the user's command got; see `attempts.notify`
    elsewhere = AttemptPath("elsewhere")  # a link to each file to which a job script sends its programs' output
    outputs = AttemptPath("outputs.json")  # the files that a job script's `--output` and `--error` name

    @property
    def number(self) -> int:
        return int(self.folder.name)

    @property
    def logs(self) -> list[Path]:
        """The logs that exist: `log`, `err`, and the files that `elsewhere` links."""
        elsewhere = sorted(self.elsewhere.glob("*"), key=lambda link: link.name)
        return [path for path in (self.log, self.err, *map(Path.resolve, elsewhere)) if path.is_file()]

    def started(self) -> dict[str, Any]:
        """attempt.json: `attempt, job_id, restart, in_job, node_list, started`, and by the host's clock since its boot
        `boot, uptime`; empty if it is missing. `restart`: how often Slurm had put the job back; `in_job`: the restarts
        in the job before this attempt since then."""
        return read_stored(self.folder / "attempt.json")

    @property
    def job_id(self) -> str:
        """The id of the attempt's job; empty if attempt.json is missing."""
        return str(self.started().get("job_id") or "")

    @property
    def job(self) -> str:
        """The attempt's job by `job_of`; empty if attempt.json is missing."""
        return job_of(self.started())

    @property
    def job_start(self) -> tuple[str, int]:
        """The start of the attempt's job, which attempts share that follow each other in one allocation."""
        return self.job, int(self.started().get("restart") or 0)

    @property
    def in_allocation(self) -> bool:
        """Whether the attempt runs in an allocation of the user's own: its script is not the job's batch script."""
        return self.started().get("allocation") is True

    @property
    def restarts_in_job(self) -> int:
        """How many restarts inside the job came before this attempt; 0 for the first after the job started."""
        return int(self.started().get("in_job") or 0)

    def next_of_job(self, later: Iterable[Attempt]) -> Attempt | None:
        """The next attempt of the same job among the `later` ones: a restart in the job, or another start of it."""
        job = self.job
        return next((one for one in later if job and one.job == job), None)

    def elapsed_s(self) -> float | None:
        """Seconds since the attempt began, by its host's clock since boot, which nobody can set; None on another
        host."""
        start, (boot, now) = self.started(), host_clock()
        began = start.get("uptime")
        return max(0.0, now - began) if began is not None and start.get("boot") == boot else None

    def ended(self) -> dict[str, Any]:
        """ended.json: `ended, cause, step, time, requeue`, and `rank, node` if one is at fault; empty if the attempt
        runs or was killed. `requeue`: the trainer asks for another attempt (`end_policy.asks_to_requeue`). `elapsed_s`:
        how long it had its job."""
        return read_stored(self.folder / "ended.json")

    def script_exit(self) -> dict[str, Any]:
        """exit.json: the exit `code` of a job script, how many `seconds` it ran, and the `signals` of the job that its
        shell got; empty if it has not ended."""
        return read_stored(self.folder / "exit.json")

    def heard(self, number: int) -> bool | None:
        """True if the shell of a job script got a signal of the job, False if not; None if that is not known."""
        signals = self.script_exit().get("signals")
        return number in signals if isinstance(signals, list) else None

    def verdict(self) -> dict[str, Any]:
        """next.json: whether the run is retried after the attempt, when, without which nodes, and why
        (`launcher.attempts.judge`); empty if the attempt is not judged."""
        return read_stored(self.folder / "next.json")

    def requeue_refused(self) -> str:
        """Slurm's message if it refused the requeue that job.sh asked for after the attempt; empty if it has not."""
        try:
            text = read_text(self.folder / "requeue-refused")
        except OSError:
            return ""
        return plain(" ".join(text.split()), " ")[:300] or "no message"

    def trainer(self) -> dict[str, Any]:
        """trainer.json: rank 0's note when the training began, with the `resumed_step`; empty before that."""
        return read_stored(self.folder / "trainer.json")

    def resumed_step(self) -> int | None:
        """The step after which the attempt began: that of trainer.json, or by its first line an earlier one, as a
        program may not resume from the newest checkpoint that it has; None if neither is known."""
        noted: int | None = self.trainer().get("resumed_step")
        if not noted:
            return noted
        first = next(iter(read_stored_lines(self.metrics, first_bytes=_LINE_BYTES)), {}).get("step")
        return noted if first is None else min(noted, max(0, first - 1))

    def loss_without_step(self) -> float | None:
        """loss.json: the last loss of a program whose log has no step numbers; None without one."""
        loss = read_stored(self.folder / "loss.json").get("loss")
        return float(loss) if isinstance(loss, int | float) else None

    def last_metrics(self) -> dict[str, Any]:
        """The last whole line of metrics.jsonl; empty if there is none. Only the end of the file is read. Of several
        trainings at once it has the step alone."""
        last = read_last_stored_line(self.metrics)
        return {key: last[key] for key in ("step", "time") if key in last} if self.at_once.exists() else last

    def write_ended(
        self,
        ended: str,
        cause: str | None,
        step: int,
        requeue: bool = False,
        rank: int | None = None,
        node: str | None = None,
        note: str | None = None,
    ) -> None:
        """Writes ended.json, with secrets hidden in cause and note. An existing file stays: the first writer decides.

        `rank` and `node`: those at fault, None if unknown; `note`: what may be wrong although it ended as `done`.
        """
        cause = hide_secrets(cause) if cause else cause
        note = hide_secrets(note) if note else note
        end: dict[str, Any] = {"ended": ended, "cause": cause, "step": step, "time": time.time(), "requeue": requeue}
        # Only the attempt itself knows when it ends; the end of a lost attempt is written later, by others.
        in_attempt = os.environ.get("HPC_GPT_ATTEMPT") == self.folder.name
        optional = (
            ("rank", rank),
            ("node", node),
            ("note", note),
            ("elapsed_s", self.elapsed_s() if in_attempt else None),
        )
        end |= {key: value for key, value in optional if value is not None}
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
    def announced(self) -> Path:
        """The folder with a file for each checkpoint that the user's command got; see `attempts.notify`."""
        return self.path / "announced"

    @property
    def sweep_id(self) -> str | None:
        """The id that the runs of one `submit --sweep` share; None if the run belongs to no sweep."""
        return self.sweep_note().get("id") or None

    def sweep_note(self) -> dict[str, Any]:
        """sweep.json: `id`, and the `name` and `row` of a sweep; empty if the run belongs to none."""
        return read_stored(self.path / "sweep.json")

    @property
    def data_beside(self) -> Path | None:
        """The folder in which a relative data.path is looked up first; None if no file sets data.path."""
        folder = read_stored(self.path / "provenance.json").get(DATA_BESIDE)
        return None if folder is None else Path(folder)

    @property
    def record(self) -> Path:
        return self.path / "record.json"

    def resolved(self) -> Resolved:
        """The run's settings. Raises ConfigError or RunFolderError if resolved.json is damaged or missing, and
        OtherVersion if this version does not read it."""
        try:
            return Resolved.from_json(read_text(self.path / "resolved.json"))
        except OSError as fault:
            # Ranks that still run may have created the folder again.
            if not self.path.exists() or (self.attempts() and not self.job_script.exists()):
                raise RunFolderError(
                    f"{self.path}: the run folder does not exist any more",
                    "was it moved or deleted? name its new place",
                ) from None
            if isinstance(fault, PermissionError):
                raise RunFolderError(f"{self.path}: {fault.strerror}", whose(self.path)) from None
            hint = read_hint(fault, self._restore_hint() or "is this a run folder?")
            raise RunFolderError(f"{self.path}: no resolved.json to read ({fault.strerror})", hint) from None
        except ConfigError as fault:
            raise type(fault)(f"{self.path}: {fault}", self._restore_hint() or fault.hint) from None

    @property
    def waits_for(self) -> Path:
        """queue.json: while a run waits on this machine, what it waits for (`words`, `time`)."""
        return self.path / "queue.json"

    def carried_settings(self) -> str | None:
        """The text of resolved.json in job.sh; None if job.sh has none. Raises OSError."""
        match = _CARRIED.search(read_text(self.job_script))
        return match[1] if match else None

    def _restore_hint(self) -> str:
        """The hint to restore resolved.json from job.sh; empty if job.sh has no settings that this version reads."""
        try:
            Resolved.from_json(self.carried_settings() or "")
        except (OSError, ConfigError):
            return ""
        script, settings = (shlex.quote(str(path)) for path in (self.job_script, self.path / "resolved.json"))
        lines = f"sed \"1,/<<'{_MARK}'/d; /^{_MARK}$/,\\$d\""
        return f"job.sh holds the settings: {lines} {script} > {settings}"

    def attempts(self) -> list[Attempt]:
        """All attempts, first to last."""
        folder, names = self.path / "attempts", list[str]()
        with contextlib.suppress(OSError):
            names = os.listdir(folder)
        numbers = sorted(int(name) for name in names if _NUMBER.fullmatch(name))
        return [Attempt(folder / str(number)) for number in numbers]

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.path / "attempts" / str(number))

    def before(self, attempt: Attempt) -> list[Attempt]:
        """The attempts before this one, first to last."""
        return [earlier for earlier in self.attempts() if earlier.number < attempt.number]

    def before_in_job(self, attempt: Attempt) -> list[Attempt]:
        """The attempts before this one in the same start of its job, first to last."""
        of_job = [earlier for earlier in self.before(attempt) if earlier.job == attempt.job]
        return of_job[max(0, len(of_job) - attempt.restarts_in_job) :]

    @property
    def attempts_before(self) -> dict[str, int]:
        """The number of attempts so far, for the line of a job that is about to be submitted. Only this tells whether a
        submission or an attempt was first, as the clocks of two machines differ."""
        return {"attempts_before": max((attempt.number for attempt in self.attempts()), default=0)}

    def new_attempt(self) -> Attempt:
        """Makes the next free `attempts/<n>/`; simultaneous starts get different numbers."""
        attempts = self.attempts()
        number = attempts[-1].number + 1 if attempts else 1
        while True:
            try:
                (self.path / "attempts" / str(number)).mkdir(parents=True)
                return self.attempt(number)
            except FileExistsError:
                number += 1

    def submissions(self) -> list[dict[str, Any]]:
        """Every line of submissions.jsonl, first to last, without `lost` ones that a later line of the same `call` of
        sbatch completes."""
        lines = read_stored_lines(self.path / "submissions.jsonl")
        last_of_call = {line.get("call"): line for line in lines}
        return [
            line for line in lines if not (line.get("lost") and line.get("call")) or line is last_of_call[line["call"]]
        ]

    def add_submission(self, submission: Mapping[str, Any]) -> None:
        line = {"time": time.time(), "folder": str(self.path), **submission}
        append_line(self.path / "submissions.jsonl", json.dumps(line))

    @property
    def was_sent(self) -> bool:
        """Whether a job was submitted for the run, or an attempt began."""
        return (self.path / "submissions.jsonl").exists() or (self.path / "attempts").exists()

    def slurm_cluster(self) -> str | None:
        """The Slurm cluster of the run's jobs, if one was chosen: every command about them names it.

        None means the default cluster, or a federation, in which another cluster may run a job than the one it was
        submitted to.
        """
        notes = (*self.submissions(), *(attempt.started() for attempt in self.attempts()))
        return next(
            (n["slurm_cluster"] for n in notes if n.get("slurm_cluster") and not is_federated(n.get("job_id"))), None
        )

    def cancelled_mark(self, job: str) -> Path:
        """The file that `hpc-gpt cancel` writes before it ends a job, so that nothing requeues it: `user, host, time`.
        Its existence counts: a full disk may leave it empty. Marks name a job by `job_of`."""
        return self.path / f"cancelled.{job}"

    def mark_cancelled(self, job: str) -> None:
        """Writes the mark of a cancelled job; the first writer stays in it. OSError if the disk refuses the file."""
        mark = self.cancelled_mark(job)
        mark.touch()
        note = {"user": user_name(os.getuid()), "host": platform.node(), "time": time.time()}
        with contextlib.suppress(OSError):
            if not mark.stat().st_size:
                mark.write_text(json.dumps(note) + "\n", encoding="utf-8")

    def told_nodes(self) -> dict[str, str]:
        """{node: the run that found it bad} of the nodes that the queued job excludes since then."""
        return dict(read_stored(self.path / "excluded.json").get("nodes") or {})

    def is_cancelled(self, job: str | None) -> bool:
        """Whether `hpc-gpt cancel` has marked a job."""
        return bool(job) and self.cancelled_mark(str(job)).exists()

    def asked_to_end(self, job: str | None) -> str:
        """The class of `core.ends.failures` that `hpc-gpt cancel` or `stop` requests for a job; empty without one."""
        if self.is_cancelled(job):
            return "cancelled"
        return "stopped" if job and self.stop_mark(job).exists() else ""

    def stop_mark(self, job: str) -> Path:
        """The file that `hpc-gpt stop` writes: the job ends as stopped when it starts, or starts again."""
        return self.path / f"stop.{job}"

    def declare_gone(self, job: str) -> None:
        """Notes that a user knows of the end of a job that cannot be asked: `submit --resume --force`. Raises
        RunFolderError."""
        note = {"user": user_name(os.getuid()), "time": time.time()}
        replace_whole(self.path / f"gone.{job}", json.dumps(note) + "\n")

    def is_declared_gone(self, job: str) -> bool:
        """Whether `declare_gone` has noted a job."""
        return (self.path / f"gone.{job}").exists()


def _once(read: Callable[[_Owner], _Read]) -> Callable[[_Owner], _Read]:
    """Decorates a method that reads a file: later calls return the cached result of the first."""
    key = f"_{read.__name__}"

    @functools.wraps(read)
    def first(self: _Owner) -> _Read:
        if key not in self.__dict__:
            self.__dict__[key] = read(self)
        result: _Read = self.__dict__[key]
        return result

    return first


class CachedAttempt(Attempt):
    """An attempt of a `CachedRun`."""

    started = _once(Attempt.started)
    ended = _once(Attempt.ended)
    verdict = _once(Attempt.verdict)
    trainer = _once(Attempt.trainer)
    last_metrics = _once(Attempt.last_metrics)
    resumed_step = _once(Attempt.resumed_step)


class CachedRun(RunFolder):
    """A run that reads each of its files once, when it is first needed: for an answer about one moment."""

    resolved = _once(RunFolder.resolved)
    submissions = _once(RunFolder.submissions)
    slurm_cluster = _once(RunFolder.slurm_cluster)

    @_once
    def attempts(self) -> list[Attempt]:
        return [CachedAttempt(attempt.folder) for attempt in super().attempts()]


class ArchivedFile(Protocol):
    """Something that a new run folder gets besides its texts: a file that other runs share, or a branch's hold on its
    checkpoint."""

    def place(self, folder: Path) -> None:
        """Places it in the folder, before others see the folder as a run. Raises OSError or RunFolderError."""


class SharedFile:
    """A file with the same name and content in several run folders, stored once on the disk; `mode` is subject to the
    umask."""

    def __init__(self, name: str, content: bytes, mode: int = 0o666) -> None:
        self._name, self._content, self._mode = name, content, mode
        self._last: Path | None = None

    def place(self, folder: Path) -> None:
        """Puts the file into a run folder, as a hard link to the last one placed, or as a copy.

        An existing file stays. Raises OSError.
        """
        target = folder / self._name
        if self._last is not None:
            with contextlib.suppress(OSError):
                os.link(self._last, target)
                return
        with aside(target) as temporary, contextlib.suppress(FileExistsError):
            temporary.touch(self._mode)
            temporary.write_bytes(self._content)
            give_name(temporary, target)
        self._last = target


def create_run(
    logs: Path,
    resolved: Resolved,
    script: str,
    experiment_text: str | None,
    tables: Mapping[str, Any],
    archives: Sequence[ArchivedFile] = (),
) -> RunFolder:
    """Makes `logs/<experiment>/<run-id>/` with the files that are known before the job starts.

    `tables`: {name of a JSON file: its content}, None for no file; `archives` are placed in the folder, in a sweep also
    the experiment's text. The id is the time and four random hex digits. Raises RunFolderError if the folder cannot be
    written; it is then removed.
    """
    parts = {EXPERIMENT: experiment_text} if experiment_text is not None else {}
    parts |= {name: json.dumps(table, indent=1) + "\n" for name, table in tables.items() if table is not None}
    parts["job.sh"] = script
    run = RunFolder(claim_folder(logs / resolved.slug))
    try:
        for archive in archives:
            archive.place(run.path)
        # Others see the folder as a run once its last file, resolved.json, exists.
        for name, text in parts.items():
            (run.path / name).touch(resolved.files_mode if name in (EXPERIMENT, "job.sh") else 0o666)
            (run.path / name).write_text(text, encoding="utf-8", errors="surrogateescape")
        write_once(run.path / "resolved.json", resolved.to_json(), resolved.files_mode)
    except (RunFolderError, OSError) as fault:
        shutil.rmtree(run.path, ignore_errors=True)
        if isinstance(fault, OSError):
            raise RunFolderError(f"cannot write in {run.path}: {fault.strerror}", "is the disk full?") from None
        raise
    return run


def check_own(run: RunFolder) -> None:
    """Raises RunFolderError if this user may not write a run's folder, its attempts or its list of jobs."""
    for path in (run.path, run.path / "attempts", run.path / "submissions.jsonl"):
        if why := refused_access(path, os.W_OK):
            raise RunFolderError(f"cannot write in {path}: {why}", whose(path))


def check_writable(folder: Path) -> None:
    """Raises RunFolderError if run folders cannot be made in `folder`."""
    with OsErrorAs(RunFolderError, f"cannot make a run folder in {folder}", _WRITABLE):
        try_folder(folder)


def claim_folder(parent: Path) -> Path:
    """Makes a folder named by a new id: the time and four random hex digits. Raises RunFolderError."""
    for _ in range(100):
        path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.urandom(2).hex()}"
        message = f"cannot make run folder {path}"
        try:
            with OsErrorAs(RunFolderError, message, _WRITABLE), contextlib.suppress(FileExistsError):
                path.mkdir(parents=True)
                return path.resolve()
        except UnicodeEncodeError as fault:
            text = f"{message}: this locale's encoding, {fault.encoding}, has no {fault.object[fault.start]!r}"
            raise RunFolderError(text, "export LC_ALL=C.UTF-8, or give the experiment another name") from None
    raise RunFolderError(f"no free run id under {parent} in 100 tries", "try again")


def is_federated(job_id: str | None) -> bool:
    """Whether a job's id is unique in a federation: its upper bits are the cluster's number."""
    number = str(job_id).partition("_")[0]
    return number.isdecimal() and int(number) >= 1 << 26


def job_of(note: Mapping[str, Any]) -> str:
    """The identity of the job in a line of submissions.jsonl, or in an attempt.json: Slurm's id, or `local_job`; empty
    without a job. Notes of earlier versions have the id alone."""
    return str(note.get("job") or note.get("job_id") or "")


def local_job(process: Mapping[str, Any]) -> str:
    """The identity of a job that a process on this machine supervises: its pid and a sum of its `process_identity`, as
    pids are reused."""
    identity = " ".join(str(process.get(key)) for key in ("boot", "pid_namespace", "pid", "pid_start"))
    return f"{process.get('pid')}-{zlib.crc32(identity.encode()):08x}"


def job_ids(run: RunFolder) -> list[str]:
    """The ids of all jobs of a run, first to last, without repeats."""
    return list(dict.fromkeys(str(note["job_id"]) for note in _job_notes(run)))


def jobs_of(run: RunFolder) -> list[str]:
    """All jobs of a run by `job_of`, first to last, without repeats."""
    return list(dict.fromkeys(map(job_of, _job_notes(run))))


def _job_notes(run: RunFolder) -> list[dict[str, Any]]:
    notes = (*run.submissions(), *(attempt.started() for attempt in run.attempts()))
    return [note for note in notes if note.get("job_id")]


def work_folder(run: RunFolder, command: Command) -> Path:
    """The folder in which the program of the run works."""
    return run.path / WORK if command.snapshot else Path(command.workdir)
