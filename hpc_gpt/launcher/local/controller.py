"""Supervises the ranks of an attempt on this machine.

Extends submitit's controller: starts job.sh once for each rank, ends all ranks when one fails, passes signals on,
enforces the time limit, and writes how the attempt ended if no rank has written it.
"""

import atexit
import contextlib
import json
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from submitit.local.local import Controller

from hpc_gpt.core.ends.end_policy import SIGNALS, TERMINATED, End
from hpc_gpt.core.ends.exit_status import ExitStatus
from hpc_gpt.core.ends.failures import UNSPECIFIC, meaning
from hpc_gpt.core.ends.state import Facts, class_of
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import read_json, replace_whole
from hpc_gpt.core.process import adopt_orphans, die_with_parent, process_identity
from hpc_gpt.core.processes import find_processes as processes
from hpc_gpt.core.processes import lock
from hpc_gpt.core.processes.heartbeats import gpus_of, pack_heartbeats
from hpc_gpt.core.processes.requests import is_asked
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.slurm.clients import KILL_WAIT_S
from hpc_gpt.core.slurm.directives import restarts_in_job
from hpc_gpt.core.slurm.environment import own_job
from hpc_gpt.launcher.attempts.decisions import (
    classify,
    conclude,
    look_again,
    measure,
    say_note,
    write_verdict,
)
from hpc_gpt.launcher.attempts.draft import Draft, ShownJob
from hpc_gpt.launcher.attempts.history import read_history
from hpc_gpt.launcher.attempts.judge import Verdict
from hpc_gpt.launcher.attempts.notify import send_events

_POLL_S = 0.05
PEERS_S = 5.0  # the other ranks have this long to end by themselves after one has failed


class RunController(Controller):
    """Runs all ranks of one attempt and waits for them."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        resolved = run.resolved()
        self.limit_s = limit_s(resolved.job.time)
        self.lead_s = resolved.job.signal_lead_s or 0
        self.begun = time.monotonic() - job_s(run, attempt)
        self.attempt = attempt
        self.run_folder = run
        self.codes: dict[int, int] = {}
        self.kill_at: float | None = None
        self.cancelled = False
        self._unwritten = False
        self._job = own_job()[0].decode(errors="replace")
        self._resolved = resolved
        os.environ.update(controller_environment(run, attempt, resolved.tasks))
        if resolved.cluster.archive is not None:
            _stage_below_tmpdir()
        adopt_orphans()
        self._tree = processes.Tree(record=attempt.processes)
        super().__init__(attempt.folder)
        for signum in SIGNALS:
            signal.signal(signum, self._pass_on)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Passes a signal on. SIGTERM cancels and gives the ranks KILL_WAIT_S to save; they handle Ctrl-C and USR2."""
        if signum == signal.SIGTERM:
            self.cancelled = True
            self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + KILL_WAIT_S)
            with contextlib.suppress(OSError):
                (self.attempt.folder / TERMINATED).touch()
        self._forward_signal(signal.Signals(signum))

    def start_tasks(self) -> None:
        """Starts job.sh for every rank, each in its own process group, so that only this process gets a Ctrl-C."""
        self.attempt.ranks.mkdir(exist_ok=True)
        log = self.attempt.log.open("ab")
        self.stdouts = [log]
        # For a job script, start.py marks only the script: its job.sh must live on when the script has ended.
        marks = processes.task_variables(self.run_folder, self.attempt) if self._resolved.script is None else {}
        for rank in range(self.ntasks):
            env = os.environ | {
                "SUBMITIT_LOCAL_LOCALID": str(rank),
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_JOB_ID": self.pid,
                **marks,
            }
            task = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
                pass_fds=(*processes.gpu_locks(), *lock.open_files()),
            )
            self.tasks.append(task)
            self._tree.add(task.pid)
            self._note_rank(rank, None)

    def _note_rank(self, rank: int, code: int | None) -> None:
        path = self.attempt.ranks / f"{rank}.json"
        pid = self.tasks[rank].pid
        note = {**process_identity(pid), processes.JOB: self._job} if code is None else {"pid": pid, **read_json(path)}
        with self._written():
            replace_whole(path, json.dumps({**note, "exit_code": code}) + "\n")

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Prints once that something in the block cannot be written: a folder that was moved away is not made
        again."""
        try:
            yield
        except RunFolderError as fault:
            if not self._unwritten:
                print(f"{fault}\n\nhint: {fault.hint}", flush=True)
            self._unwritten = True

    def wait(self, freq: int = 24) -> list[int | None]:
        """Waits for all ranks; ends the others when one has failed or the time is over."""
        warned = False
        failed_at: float | None = None
        while True:
            for rank, task in enumerate(self.tasks):
                if rank not in self.codes and (code := task.poll()) is not None:
                    self.codes[rank] = code
                    self._note_rank(rank, code)
            self.look()
            self._tree.write()
            now = time.monotonic()
            if len(self.codes) == len(self.tasks):
                return list(self.codes.values())
            if failed_at is None and any(self.codes.values()):
                failed_at = now
                self.kill_at = min(self.kill_at or float("inf"), now + PEERS_S)
            if failed_at is not None and (now > failed_at + 1 or min(self.codes.values()) < 0):
                self._say_failed()
            if self.limit_s is not None:
                if not warned and now - self.begun > self.limit_s - self.lead_s:
                    warned = True
                    self._forward_signal(signal.SIGUSR2)
                if now - self.begun > self.limit_s and self.kill_at is None:
                    self._say("walltime", f"the time limit of {self.limit_s} s is over")
                    self._forward_signal(signal.SIGTERM)
                    self.kill_at = now + KILL_WAIT_S
            if self.kill_at is not None and now > self.kill_at:
                self._kill_groups()
            time.sleep(_POLL_S)

    def look(self) -> None:
        """Called repeatedly while the ranks run; does nothing here."""

    def _kill_groups(self) -> None:
        """Kills the remaining ranks and the processes that they started, in whatever process group."""
        processes.end_processes(self.run_folder, self.attempt, own_job(), tree=self._tree)

    def _say(self, ended: str, cause: str) -> None:
        if not self.attempt.ended():  # wait() calls this until the last rank is gone
            with self._written():
                self.attempt.write_ended(ended, cause, int(self.attempt.last_metrics().get("step") or 0))

    def _unsaid_class(self) -> str:
        """The class of an attempt whose end no rank has written: the same that others find when this process is
        gone."""
        return class_of(Facts(cancelled=self.cancelled, alive=False)) or "unknown"

    def _say_failed(self) -> None:
        rank, code = next((rank, code) for rank, code in self.codes.items() if code)
        end = ExitStatus(str(rank), platform.node(), code)
        if not self.attempt.ended():
            # srun would print this line: a killed rank leaves none of its own.
            with contextlib.suppress(OSError), self.attempt.log.open("a", encoding="utf-8") as log:
                log.write(f"{end}\n")
        self._say(self._unsaid_class(), str(end))

    def run(self, max_retry: int = 1) -> None:
        """Runs one attempt. When it returns, ended.json exists, no process of the attempt runs, and the run may
        resume."""
        try:
            self.start_tasks()
            if self._resolved.notify.is_asked:
                self._start_notifier()
            self.wait()
        finally:
            self._kill_groups()
            self._tree.close()
            self._reopen_log()
            if any(self.codes.values()):
                self._say_failed()
            elif len(self.codes) < self.ntasks:
                self._say(self._unsaid_class(), "the ranks could not be started")
            else:
                cause = "SIGTERM" if self.cancelled else "exit code 0, but the trainer wrote no end"
                self._say(self._unsaid_class(), cause)
            for file in self.stdouts:
                file.close()
            say_note(self.run_folder)
            # send_events may be slow: first the run is judged and may resume.
            if not judge_and_note(self.run_folder, self.attempt, self._resolved):
                lock.release(self.run_folder, lock.process_holder(os.getpid()))
            send_events(self.run_folder, self._resolved, self.attempt)

    def _reopen_log(self) -> None:
        """Reopens the log, so that this process prints into it even if a job script's job.sh has replaced the file."""
        with contextlib.suppress(OSError), self.attempt.log.open("ab") as log:
            if self.stdouts and os.path.samestat(os.fstat(1), os.fstat(self.stdouts[0].fileno())):
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    def _start_notifier(self) -> None:
        """Starts the process that sends the events that earlier attempts could not send, and the first step."""
        line = [sys.executable, "-m", "hpc_gpt.launcher.attempts.notify", str(self.run_folder.path)]
        line += [str(self.attempt.number), "beside"]
        with self.attempt.log.open("ab") as log:
            subprocess.Popen(line, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)

    def exit_code(self) -> int:
        """The largest exit code of the ranks; a signal counts as in a shell, 128 + its number."""
        return max((code if code >= 0 else 128 - code for code in self.codes.values()), default=1)


def _stage_below_tmpdir() -> None:
    """Names the folder into which job.sh unpacks the environment, and removes it when this process ends. A script that
    was started by hand has one already, from which this process runs."""
    name = os.environ.setdefault("HPC_GPT_STAGED", f"hpc-gpt-{os.getuid()}-local-{os.getpid()}-{time.time_ns()}/0")
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)


def controller_environment(run: RunFolder, attempt: Attempt, ranks: int) -> dict[str, str]:
    """The variables for submitit's controller and job.sh. RunController enforces the time limit, not submitit."""
    return {
        "HPC_GPT_RUN": str(run.path),
        "HPC_GPT_ATTEMPT": str(attempt.number),
        "SUBMITIT_EXECUTOR": "local",
        "SUBMITIT_LOCAL_NTASKS": str(ranks),
        "SUBMITIT_LOCAL_COMMAND": shlex.join(["bash", str(run.job_script)]),
        "SUBMITIT_LOCAL_TIMEOUT_S": "0",
        "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "0",
        "SUBMITIT_LOCAL_NODEID": "0",
        "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
        "SUBMITIT_STDERR_TO_STDOUT": "1",
        "SUBMITIT_LOCAL_WITH_SHELL": "",
    }


def run_attempt(run: RunFolder, attempt: Attempt) -> int:
    """Runs one attempt, and returns its exit code. After it a signal ends this process."""
    try:
        controller = RunController(run, attempt)
        controller.run()
        return controller.exit_code()
    finally:
        for signum in SIGNALS:
            signal.signal(signum, signal.SIG_DFL)


def judge_and_note(run: RunFolder, attempt: Attempt, resolved: Resolved) -> bool:
    """Returns whether another attempt follows `attempt`, which has ended. If it asks for a requeue or has failed, it is
    judged, once, and the verdict is written; its logs may say more than its ranks have written."""
    written = attempt.ended()
    if written and not attempt.verdict():
        end, now, job = End(str(written["ended"]), written.get("cause")), time.time(), _job(run, attempt, resolved)
        if is_unspecific := end.ended in UNSPECIFIC:
            end = classify(attempt, "", "")
        draft = measure(Draft(run, attempt, resolved, end, now, job, attempt.number, run.asked_to_end(attempt.job)))
        ended = draft.end.ended
        fails = not written.get("requeue") and meaning(ended).chain != "stops"
        if written.get("requeue") or (fails and _retries(run, attempt, resolved)):
            conclude(draft)
        elif is_unspecific:
            draft.past = read_history(run, gpus_of(resolved), now, attempt.number)
            draft.verdict = Verdict(False, ended, ended, "")
            write_verdict(draft)
    pack_heartbeats(run)
    return attempt.verdict().get("go_on") is True


def _retries(run: RunFolder, attempt: Attempt, resolved: Resolved) -> bool:
    """Whether a failure of `attempt` may be followed by another one. Unless the key asks for it, only if a checkpoint
    was saved: whoever tries a program wants to see its failure at once."""
    if resolved.job.restart_in_job is None and restarts_in_job(resolved):
        history = read_history(run, gpus_of(resolved), time.time(), attempt.number)
        return any(past.number == attempt.number and past.progressed and not past.logged for past in history)
    return restarts_in_job(resolved)


def wait_for_retry(run: RunFolder, attempt: Attempt, resolved: Resolved) -> bool:
    """Waits for the pause after an attempt that is retried, and for the end of processes that a kill has not ended,
    then looks at the run again, as job.sh does; returns whether another attempt follows."""
    until = time.monotonic() + float(attempt.verdict().get("pause_s") or 0.0)
    said = ""
    while not (run.asked_to_end(attempt.job) or is_asked(attempt, "requeue")):
        left = processes.recorded([attempt])
        if time.monotonic() >= until and not left:
            break
        if left and not said:
            said = f"process {min(left)} runs on after its kill: no attempt begins beside it"
            print(said, flush=True)
        time.sleep(_POLL_S)
    look_again(run, attempt, _job(run, attempt, resolved), time.time(), 0)
    return attempt.verdict().get("go_on") is True and not run.asked_to_end(attempt.job)


def _job(run: RunFolder, attempt: Attempt, resolved: Resolved) -> ShownJob:
    """The job of an attempt on this machine, as far as Slurm would show it: its time limit."""
    if (limit := limit_s(resolved.job.time)) is None:
        return ShownJob()
    end = time.gmtime(time.time() + limit - job_s(run, attempt))
    return ShownJob(shown=time.strftime("EndTime=%Y-%m-%dT%H:%M:%S", end))


def job_s(run: RunFolder, attempt: Attempt) -> float:
    """Seconds since the attempt's start of the job began, which attempts share that restart in it."""
    first = next(iter(run.before_in_job(attempt)), attempt)
    return first.elapsed_s() or 0.0
