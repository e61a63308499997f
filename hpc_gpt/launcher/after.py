"""The follower: a process beside a run's ranks that starts the jobs of `[after]`, one per checkpoint.

    python -m hpc_gpt.launcher.after RUN ATTEMPT [PID]
    python -m hpc_gpt.launcher.after RUN left STEP         the job of a step is at its end

It watches the checkpoints until the ranks have ended (`Attempt.ranks_ended`), or until the process PID, which started
it, has ended. It first submits the jobs that an earlier attempt could not submit. Under Slurm it prints its questions,
one a line, which job.sh asks for it, and reads the answers: only job.sh gives commands to Slurm. It writes messages for
the user into the log.
"""

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from shlex import quote
from typing import Protocol, TextIO

from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.state import job_state
from hpc_gpt.core.errors import SlurmUnreachable, UserError
from hpc_gpt.core.format import plain
from hpc_gpt.core.process import Life, hold_file, is_alive, start_time
from hpc_gpt.core.runs.after_jobs import AFTER, AfterJob, list_after, note_left, note_seen, read_seen, remove_over
from hpc_gpt.core.runs.checkpoints import checkpoints_of
from hpc_gpt.core.runs.full_disk import install_patient_output, is_disk_full
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.core.slurm.clients import Answer, accounted_states, queued_jobs, sbatch_failed, squeue_rows
from hpc_gpt.core.slurm.environment import OF_OUR_CODE, leaked_variables
from hpc_gpt.core.slurm.sbatch_words import read_options, sizes_of
from hpc_gpt.launcher.local.gpus import choice_variables
from hpc_gpt.launcher.render import render_after_job

_POLL_S = 1.0
# Checkpoints of a program are searched by a pattern, over a folder that may be large.
_PROGRAM_POLL_S = 5.0
# Seconds between two questions about jobs that have not reported their end.
_ASK_S = 30.0
# Seconds between two tries to submit a refused job: a partition may be up again.
_AGAIN_S = 15.0
_GPU_QUEUE = "hpc_gpt.launcher.local.gpus"
_SUBMITTED = re.compile(r"Submitted batch job (\d+)")
_END = re.compile(r"hpc-gpt-end (\d+)\n\Z")
# Variables that Slurm sets for the job beside its own, and that our script sets for our code.
_JOB_VARIABLES = (
    *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK"),
    *(*OF_OUR_CODE, "OMP_NUM_THREADS", "TORCH_FR_DUMP_TEMP_FILE"),
)


class Queue(Protocol):
    """The place where the jobs run: Slurm's queue, or this machine."""

    def find(self, job: AfterJob) -> str:
        """The id of a job that was submitted, but whose id could not be noted; empty if there is none. Raises
        UserError."""

    def submit(self, job: AfterJob) -> None:
        """Submits the job, and notes its id. Raises UserError."""

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        """{id: class of core.ends.failures} of jobs; a job that is missing has left the queue. Raises UserError if the
        states are not known."""


class SlurmQueue:
    """Slurm's queue, by way of job.sh, which reads questions from `asks` and writes the answers to `answers`."""

    def __init__(self, asks: TextIO, answers: TextIO, environment: Sequence[str]) -> None:
        self._asks, self._answers = asks, answers
        self._ask("unset", *environment)

    def _ask(self, *question: str) -> Answer:
        try:
            print(*question, file=self._asks, flush=True)
        except OSError:
            raise SlurmUnreachable("the job script is gone") from None
        text = ""
        for line in self._answers:
            text += line
            if end := _END.search(text):  # a command may end without a line break
                code, text = int(end[1]), text[: end.start()]
                return Answer(code, text if code == 0 else "", text)
        raise SlurmUnreachable("the job script is gone")

    def find(self, job: AfterJob) -> str:
        answer = self._ask("named", job.name)
        if answer.code != 0:
            raise sbatch_failed(answer)
        return next((job_id for (job_id,) in squeue_rows(answer, 1)), "")

    def submit(self, job: AfterJob) -> None:
        answer = self._ask("sbatch", str(job.step))
        accepted = _SUBMITTED.search(answer.stdout)
        if accepted is None:
            raise sbatch_failed(answer)
        job.note(accepted[1])

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        states = {job_id: word for job_id, (word, _) in queued_jobs(self._ask("squeue", ",".join(ids))).items()}
        if gone := [job_id for job_id in ids if job_id not in states]:
            states |= accounted_states(self._ask("sacct", ",".join(gone)))
        return {job_id: job_state(word) for job_id, word in states.items()}


class ProcessQueue:
    """Processes of this machine, which outlive the run. A job that requests `gpus` waits for its turn to have them, as
    a run does; any other job has none, and begins at once."""

    def __init__(self, gpus: int = 0) -> None:
        self._gpus = gpus

    def find(self, job: AfterJob) -> str:
        return ""

    def submit(self, job: AfterJob) -> None:
        dropped = _dropped_variables()
        environment = {name: value for name, value in os.environ.items() if name not in dropped}
        line = ["bash", str(job.script)]
        if self._gpus:
            line = [sys.executable, "-P", "-m", _GPU_QUEUE, job.name, str(self._gpus), *line]
            environment |= choice_variables(os.environ)
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with job.log.open("ab") as log:
            locked_on = hold_file(log.fileno())
            process = subprocess.Popen(
                line,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        job.note(str(process.pid), is_process=True, waits=self._gpus > 0, locked_on=locked_on)

    def states(self, ids: Sequence[str]) -> dict[str, str]:
        return {}


class CheckpointFollower:
    """Starts the jobs for the checkpoints of one run."""

    def __init__(self, run: RunFolder, attempt: Attempt, resolved: Resolved, queue: Queue) -> None:
        self._run, self._attempt, self._resolved, self._queue = run, attempt, resolved, queue
        self._asked_at = self._looked_at = self._tried_at = 0.0
        self._faults: dict[int, str] = {}
        if resolved.after.every:
            seen = read_seen(run.path)
            note_seen(run.path, seen.get("step", 0), seen.get("count", 0))
        self._submit_again(0.0)

    def look(self) -> None:
        """Starts the jobs that are due, and notes which jobs have left the queue."""
        self._note_left(_ASK_S)
        self._submit_again(_AGAIN_S)
        every, wait_s = self._resolved.after.every, _PROGRAM_POLL_S if runs_program(self._resolved) else _POLL_S
        if not every or time.monotonic() < self._looked_at + wait_s:
            return
        self._looked_at = time.monotonic()
        seen = read_seen(self._run.path)
        last, count = seen.get("step", 0), seen.get("count", 0)
        for step, path in checkpoints_of(self._run):
            if step > last:
                count += 1
                if count % every == 0:
                    self._begin(step, path)
                note_seen(self._run.path, step, count)
                if not AfterJob(self._run.path / AFTER / f"step-{step}").folder.exists():
                    remove_over(self._run, step)

    def finish(self) -> None:
        """Starts the jobs that are due once the ranks have ended."""
        self._looked_at = 0.0
        self.look()
        if self._resolved.after.every == 0 and self._end() == "done":
            for step, path in checkpoints_of(self._run)[-1:]:
                self._begin(step, path)
        self._submit_again(0.0)

    def is_judged(self) -> bool:
        """Whether the end of the attempt is known, as far as it matters for the jobs."""
        return self._resolved.after.every != 0 or bool(self._end())

    def _end(self) -> str:
        judged = self._attempt.verdict()
        if self._resolved.cluster.scheduler == "local":
            judged = judged or self._attempt.ended()
        return str(judged.get("ended") or "")

    def _begin(self, step: int, checkpoint: Path) -> None:
        """Makes the folder of a step, with everything that its job needs, and submits the job."""
        job = AfterJob(self._run.path / AFTER / f"step-{step}")
        if job.folder.exists():
            return
        most, left = self._resolved.after.most, self._unfinished()
        if len(left) >= most:
            self._note_left(0.0)
            left = self._unfinished()
        if len(left) >= most:
            self._say(step, f"it gets no job, as {len(left)} jobs have not ended (after.most is {most})")
            return
        try:
            unfinished = job.folder.with_name(f".{job.folder.name}")  # a follower that was killed may have left it
            unfinished.mkdir(parents=True, exist_ok=True)
            script = render_after_job(self._resolved, self._run, job, checkpoint)
            (unfinished / job.script.name).touch(self._resolved.files_mode)
            (unfinished / job.script.name).write_text(script, encoding="utf-8")
            unfinished.rename(job.folder)
        except OSError as fault:
            if is_disk_full(fault):
                raise  # it is due again at the next look
            self._say(step, f"its job's folder cannot be written: {fault.strerror}")
            return
        self._submit(job)

    def _submit_again(self, wait_s: float) -> None:
        """Submits the refused jobs again, the newest first, at most every `wait_s`. If an answer was lost, its job is
        searched first. No more than `most` steps wait for another try, since each keeps its checkpoint."""
        most, waiting = self._resolved.after.most, [job for job in list_after(self._run.path) if job.is_refused]
        for job in waiting[:-most]:
            self._say(job.step, f"no further job is tried: Slurm also refused those of {most} newer checkpoints")
            note_left(self._run, job, "refused")
        if waiting and time.monotonic() >= self._tried_at + wait_s:
            self._tried_at = time.monotonic()
            for job in waiting[: -most - 1 : -1]:
                if len(self._unfinished()) < most:
                    self._submit(job, again=True)

    def _submit(self, job: AfterJob, again: bool = False) -> None:
        try:
            if again and (job_id := self._queue.find(job)):
                job.note(job_id)
                return
            self._queue.submit(job)
        except (UserError, OSError) as fault:
            by_hand = "sbatch" if self._resolved.cluster.scheduler == "slurm" else "bash"
            self._tried_at = time.monotonic()
            last, cause = self._faults.get(job.step), _fault_text(fault)
            if cause != last:
                self._faults[job.step] = cause
                command = f"{by_hand} {quote(str(job.script))}"
                self._say(job.step, f"{cause}; it is tried again, or submit it yourself: {command}")

    def _unfinished(self) -> list[AfterJob]:
        """The jobs that count towards `most`."""
        return [job for job in list_after(self._run.path) if not job.is_over and not job.is_refused]

    def _note_left(self, wait_s: float) -> None:
        """Notes which jobs have left the queue; asks at most every `wait_s`."""
        open_jobs = [job for job in list_after(self._run.path) if not job.has_left]
        for job in [job for job in open_jobs if job.is_over]:
            note_left(self._run, job)
        open_by_id = {str(noted["job_id"]): job for job in open_jobs if not job.is_over and (noted := job.noted())}
        if not open_by_id or time.monotonic() < self._asked_at + wait_s:
            return
        self._asked_at = time.monotonic()
        try:
            states = self._queue.states(list(open_by_id))
        except UserError:
            return
        for job_id, job in open_by_id.items():
            state = states.get(job_id, "unknown" if job.life() is Life.GONE else "running")
            if state not in LIVE and not job.is_over:
                self._say(job.step, f"its job {job_id} has left the queue without reporting its end: {state}")
                note_left(self._run, job, state)

    def _say(self, step: int, message: str) -> None:
        print(f"after: step {step}: {message}", file=sys.stderr, flush=True)


def gpus_asked_by(options: Sequence[str]) -> int:
    """The GPUs per node that options of sbatch request."""
    return sizes_of({option.name: option.value for option in read_options(options)}).gpus


def _dropped_variables() -> list[str]:
    """The variables of this process that a job of `[after]` does not get."""
    of_job = os.environ.get("SLURM_JOB_ID", "")
    own_folder = ["TMPDIR"] if of_job and of_job in os.environ.get("TMPDIR", "") else []
    names = {*leaked_variables(os.environ), *_JOB_VARIABLES, *own_folder}
    return sorted(name for name in names if re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII))


def follow_checkpoints(run: RunFolder, attempt: Attempt, starter: int | None) -> None:
    """Follows a run's checkpoints until the ranks of an attempt, or the process `starter`, which started this one, have
    ended."""
    resolved = run.resolved()
    started = start_time(starter) if starter is not None else None

    def is_alone() -> bool:
        return started is not None and not is_alive(starter, started)

    queue: Queue = ProcessQueue(gpus_asked_by(resolved.after.sbatch))
    if resolved.cluster.scheduler == "slurm":
        queue = SlurmQueue(sys.stdout, sys.stdin, _dropped_variables())
    follower: CheckpointFollower | None = None
    last_fault = ""
    while True:
        alone = is_alone()
        over = alone or attempt.ranks_ended.exists()
        try:
            follower = follower or CheckpointFollower(run, attempt, resolved, queue)
            if not over:
                follower.look()
            elif alone or follower.is_judged():
                follower.finish()
                return
        except (UserError, OSError) as fault:  # a full disk may have space later
            if alone or ((over or follower is None) and not is_disk_full(fault)):
                raise
            if last_fault != (last_fault := _fault_text(fault)):
                print(f"after: {last_fault}", file=sys.stderr, flush=True)
        time.sleep(_POLL_S)


def _fault_text(fault: BaseException) -> str:
    if isinstance(fault, OSError) and fault.filename is not None:
        return f"cannot use {fault.filename}: {fault.strerror}"
    return hide_secrets(plain(" ".join(str(fault).split()) or type(fault).__name__, " "))[:400]


def main(arguments: Sequence[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    install_patient_output()  # the log may be on the disk that is full
    try:
        if arguments[1] == "left":
            note_left(run, AfterJob(run.path / AFTER / f"step-{int(arguments[2])}"))
        else:
            follow_checkpoints(run, run.attempt(int(arguments[1])), int(arguments[2]) if arguments[2:] else None)
    except Exception as fault:  # a traceback in the log would be taken for the training's
        print(f"after: {_fault_text(fault)}; the run continues without it", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
