"""Runs on this machine: the process that supervises a run's ranks, and its start.

The process extends submitit's controller: it starts job.sh once for each rank, ends all ranks when one fails, passes
signals on, enforces the time limit, and writes how the attempt ended if no rank has. It outlives the terminal and the
command that started it.

    python -m hpc_gpt.launch.local.controller RUN ATTEMPT
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from submitit.local.local import Controller

from hpc_gpt.ends.decisions import read_history
from hpc_gpt.ends.end_policy import SIGNALS
from hpc_gpt.ends.exit_status import ExitStatus
from hpc_gpt.ends.judge import budget_left
from hpc_gpt.ends.notify import send_events
from hpc_gpt.ends.state import Facts, class_of
from hpc_gpt.errors import JobRefused, OsErrorAs, RunFolderError
from hpc_gpt.files import read_json, replace_whole, write_once
from hpc_gpt.launch.local.beside import CANCELLED_S, LIMIT_S, BesideRanks, end_beside, start_beside
from hpc_gpt.process import die_with_parent, host_clock, interrupts_wait, start_time
from hpc_gpt.runs import lock
from hpc_gpt.runs.heartbeats import gpus_of
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.runs.snapshot import code_environment, ready_code
from hpc_gpt.settings.experiment import limit_s
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.slurm.clients import KILL_WAIT_S
from hpc_gpt.slurm.environment import given_environment, job_python, submission_environment

CONTROLLER = "hpc_gpt.launch.local.controller"
RACE_SUPERVISOR = "hpc_gpt.bench.race_here"  # what supervises a race, which starts its visits
_POLL_S = 0.05
PEERS_S = 5.0  # for the peers of a failed rank to end by themselves


class RunController(Controller):
    """Runs all ranks of one attempt and waits for them."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        resolved = run.resolved()
        self.limit_s = limit_s(resolved.job.time)
        self.lead_s = resolved.job.signal_lead_s or 0
        self.attempt = attempt
        self.run_folder = run
        self.codes: dict[int, int] = {}
        self.kill_at: float | None = None
        self.cancelled = False
        self._unwritten = False
        self._beside: list[BesideRanks] = []
        self._resolved = resolved
        os.environ.update(controller_environment(run, attempt, resolved.tasks))
        if resolved.cluster.archive is not None:
            _stage_below_tmpdir()
        super().__init__(attempt.folder)
        for signum in SIGNALS:
            signal.signal(signum, self._pass_on)

    def _pass_on(self, signum: int, frame: FrameType | None) -> None:
        """Pass a signal on. SIGTERM cancels and gives the ranks KILL_WAIT_S to save; they handle Ctrl-C and USR2."""
        if signum == signal.SIGTERM:
            self.cancelled = True
            self.kill_at = min(self.kill_at or float("inf"), time.monotonic() + KILL_WAIT_S)
        self._forward_signal(signal.Signals(signum))

    def start_tasks(self) -> None:
        """Starts job.sh for every rank, each in its own process group, so that only this process gets a Ctrl-C."""
        self.attempt.ranks.mkdir(exist_ok=True)
        log = self.attempt.log.open("ab")
        self.stdouts = [log]
        for rank in range(self.ntasks):
            env = os.environ | {
                "SUBMITIT_LOCAL_LOCALID": str(rank),
                "SUBMITIT_LOCAL_GLOBALID": str(rank),
                "SUBMITIT_LOCAL_JOB_ID": self.pid,
            }
            task = subprocess.Popen(
                self.command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,
                preexec_fn=die_with_parent,
            )
            self.tasks.append(task)
            self._note_rank(rank, None)

    def _note_rank(self, rank: int, code: int | None) -> None:
        path = self.attempt.ranks / f"{rank}.json"
        pid = self.tasks[rank].pid
        started = start_time(pid) if code is None else read_json(path).get("pid_start")
        with self._written():
            replace_whole(path, json.dumps({"pid": pid, "pid_start": started, "exit_code": code}) + "\n")

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        """Prints, once, that something cannot be written: a folder that was moved away is not made again."""
        try:
            yield
        except RunFolderError as fault:
            if not self._unwritten:
                print(f"{fault}\n\nhint: {fault.hint}", flush=True)
            self._unwritten = True

    def wait(self, freq: int = 24) -> list[int | None]:
        """Waits for all ranks; ends the others when one has failed or the time is over."""
        begun = time.monotonic()
        warned = False
        failed_at: float | None = None
        while True:
            for rank, task in enumerate(self.tasks):
                if rank not in self.codes and (code := task.poll()) is not None:
                    self.codes[rank] = code
                    self._note_rank(rank, code)
            for each in self._beside:
                each.look()
            self.look()
            now = time.monotonic()
            if len(self.codes) == len(self.tasks):
                return list(self.codes.values())
            if failed_at is None and any(self.codes.values()):
                failed_at = now
                self.kill_at = min(self.kill_at or float("inf"), now + PEERS_S)
            if failed_at is not None and (now > failed_at + 1 or min(self.codes.values()) < 0):
                self._say_failed()
            if self.limit_s is not None:
                if not warned and now - begun > self.limit_s - self.lead_s:
                    warned = True
                    self._forward_signal(signal.SIGUSR2)
                if now - begun > self.limit_s and self.kill_at is None:
                    self._say("walltime", f"the time limit of {self.limit_s} s is over")
                    self._forward_signal(signal.SIGTERM)
                    self.kill_at = now + KILL_WAIT_S
            if self.kill_at is not None and now > self.kill_at:
                self._kill_groups()
            time.sleep(_POLL_S)

    def look(self) -> None:
        """Called while the ranks run."""

    def _kill_groups(self) -> None:
        """Sends SIGKILL to what is left of the ranks and of the processes that they started."""
        for task in self.tasks:
            try:
                os.killpg(task.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue

    def _say(self, ended: str, cause: str) -> None:
        if not self.attempt.ended():  # wait() calls this repeatedly until the last rank is gone
            with self._written():
                self.attempt.write_ended(ended, cause, int(self.attempt.last_metrics().get("step") or 0))

    def _unsaid_class(self) -> str:
        """The class of an attempt whose end no rank has written, as others find it when this process is gone."""
        return class_of(Facts(cancelled=self.cancelled, alive=False)) or "unknown"

    def _say_failed(self) -> None:
        rank, code = next((rank, code) for rank, code in self.codes.items() if code)
        end = ExitStatus(str(rank), platform.node(), code)
        if not self.attempt.ended():
            # What srun would print: a killed rank leaves no line of its own.
            with contextlib.suppress(OSError), self.attempt.log.open("a", encoding="utf-8") as log:
                log.write(f"{end}\n")
        self._say(self._unsaid_class(), str(end))

    def run(self, max_retry: int = 1) -> None:
        """Runs one attempt. At the return ended.json exists, no process of the attempt runs, and the run may resume."""
        try:
            self.start_tasks()
            if self._resolved.notify.is_asked:
                self._start_notifier()
            self._beside = start_beside(self.run_folder, self.attempt, self._resolved)
            self.wait()
        finally:
            self._kill_groups()
            self._reopen_log()
            if any(self.codes.values()):
                self._say_failed()
            elif len(self.codes) < self.ntasks:
                self._say(self._unsaid_class(), "the ranks could not be started")
            else:
                words = "SIGTERM" if self.cancelled else "exit code 0, but the trainer wrote no end"
                self._say(self._unsaid_class(), words)
            for file in self.stdouts:
                file.close()
            end_beside(self._beside, self.attempt, CANCELLED_S if self.cancelled else LIMIT_S)
            # The command may take its time. What was beside has ended: the next attempt's goes on where it came to.
            lock.release(self.run_folder, lock.process_holder(os.getpid()))
            send_events(self.run_folder, self._resolved, self.attempt)

    def _reopen_log(self) -> None:
        """What is printed from now on is for the log, also if a job script's job.sh has made a copy of it."""
        with contextlib.suppress(OSError), self.attempt.log.open("ab") as log:
            if self.stdouts and os.path.samestat(os.fstat(1), os.fstat(self.stdouts[0].fileno())):
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)

    def _start_notifier(self) -> None:
        """Starts the process that sends what earlier attempts could not, and the first step."""
        line = [sys.executable, "-m", "hpc_gpt.ends.notify", str(self.run_folder.path), str(self.attempt.number)]
        with self.attempt.log.open("ab") as log:
            subprocess.Popen([*line, "beside"], stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0)

    def exit_code(self) -> int:
        """The largest exit code of the ranks, in a shell's numbering of signals."""
        return max((code if code >= 0 else 128 - code for code in self.codes.values()), default=1)


def _stage_below_tmpdir() -> None:
    """The folder into which job.sh unpacks the environment, removed when this process ends. A script that was started
    by hand has one, from which this process runs."""
    name = os.environ.setdefault("HPC_GPT_STAGED", f"hpc-gpt-{os.getuid()}-local-{os.getpid()}-{time.time_ns()}/0")
    folder = Path(os.environ.get("TMPDIR") or "/tmp") / name
    atexit.register(shutil.rmtree, folder.parent, ignore_errors=True)


def controller_environment(run: RunFolder, attempt: Attempt, ranks: int) -> dict[str, str]:
    """The variables for submitit's controller and job.sh. RunController keeps the time limit, not submitit."""
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


# --- starting it


def start_here(run: RunFolder, resolved: Resolved) -> str:
    """Starts the controller of a new attempt, detached from this terminal, and returns its job id at once.

    It is noted in submissions.jsonl. The ranks see every GPU. Raises RunFolderError, also if the run is being trained;
    JobRefused if too little of the budget is left.
    """
    code = ready_code(run.path)
    own = job_python(resolved) | code_environment(code, os.environ) | budget_environment(run, resolved, time.time())
    own |= given_environment(os.environb) if resolved.script is not None else {}
    environment = submission_environment(os.environ, own)
    with interrupts_wait(), lock.locked(run):
        attempt = begin_attempt(run)
        line = [
            sys.executable,
            "-m",
            RACE_SUPERVISOR if resolved.race else CONTROLLER,
            str(run.path),
            str(attempt.number),
        ]
        with attempt.log.open("ab") as log:
            process = subprocess.Popen(
                line, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # In a process that lives on, nobody else takes note of its end.
        threading.Thread(target=process.wait, daemon=True).start()
        lock.hand_over(run, lock.process_holder(process.pid))
        note_start(run, attempt, process.pid, line, resolved.cluster.name)
    return str(process.pid)


def budget_environment(run: RunFolder, resolved: Resolved, now: float) -> dict[str, str]:
    """HPC_GPT_STOP_AT, the time at which the run's budget is spent; empty without a budget. Raises JobRefused."""
    job = resolved.job
    past = read_history(run, gpus_of(resolved), now) if job.max_gpu_hours is not None else []
    left_s, why = budget_left(past, job.max_gpu_hours, resolved.gpus, job.signal_lead_s)
    if why:
        raise JobRefused(why, f"hpc-gpt submit --resume {run.run_id} with a larger --max-gpu-hours makes a new run")
    return {} if left_s is None else {"HPC_GPT_STOP_AT": f"{now + left_s:.0f}"}


def begin_attempt(run: RunFolder) -> Attempt:
    """Makes the folder of the next attempt. Raises RunFolderError."""
    with OsErrorAs(RunFolderError, f"cannot make an attempt in {run.path}", "is the disk full or read-only?"):
        return run.new_attempt()


def note_start(run: RunFolder, attempt: Attempt, pid: int, command: list[str], cluster: str) -> None:
    """Writes attempt.json and the line of submissions.jsonl by which status and cancels find the process."""
    host = platform.node()
    start = {"attempt": attempt.number, "job_id": str(pid), "restart": 0, "node_list": host, "started": time.time()}
    start["boot"], start["uptime"] = host_clock()
    write_once(attempt.folder / "attempt.json", json.dumps(start) + "\n")
    run.add_submission(lock.submission_line(pid, str(pid), command, cluster))


def main(arguments: list[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    try:
        controller = RunController(run, run.attempt(int(arguments[1])))
        controller.run()
    finally:
        lock.release(run, lock.process_holder(os.getpid()))
    return controller.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
