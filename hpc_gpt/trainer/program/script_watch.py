"""Follows a job script that runs as it is: `python -m hpc_gpt.trainer.program.script_watch RUN ATTEMPT FOLDER`.

job.sh starts the script and waits for it; its output goes to files of the attempt. This process reads the files as they
grow, writes metrics.jsonl and heartbeats, and asks the script's programs to end: ahead of the time limit, for
`hpc-gpt stop` and `requeue`, and when a budget is spent. It may be killed, and started again, at any time. Needs no
torch.
"""

import contextlib
import functools
import glob
import itertools
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.checkpoints.find_checkpoints import newest_checkpoint
from hpc_gpt.core.ends.end_policy import End, first_reason, limits_reached
from hpc_gpt.core.ends.failures import LIVE
from hpc_gpt.core.ends.program_end import PrintedEnd, has_last_line, write_said
from hpc_gpt.core.ends.state import slurm_state
from hpc_gpt.core.errors import RunFolderError, SlurmUnreachable, UserError
from hpc_gpt.core.files import write_once
from hpc_gpt.core.machine.find_gpus import list_gpus
from hpc_gpt.core.process import ProcessTable, is_alive, name_of, send, start_time
from hpc_gpt.core.processes.find_processes import Tree
from hpc_gpt.core.processes.job_steps import StartedSteps
from hpc_gpt.core.runs.full_disk import release_reserve, reserve
from hpc_gpt.core.runs.provenance import complete_run
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored_lines
from hpc_gpt.core.settings.sized import params
from hpc_gpt.core.slurm.clients import ask, squeue_rows
from hpc_gpt.core.slurm.environment import ALLOCATION, is_on_one_node
from hpc_gpt.core.slurm.script_lines import globs_of
from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.trainer.program.job_script import programs_of, submits_again
from hpc_gpt.trainer.program.output_files import Follower, copied_files, copy_more
from hpc_gpt.trainer.program.process import ForeignLog, count_steps, said_by, trained_s
from hpc_gpt.trainer.program.signs_of_life import (
    BESIDE,
    SHELLS,
    ForeignHeartbeat,
    Processes,
    boot_s,
    checkpoint_files,
    output_of,
    patterns_of_sruns,
)
from hpc_gpt.trainer.program.step_numbers import StepClock
from hpc_gpt.trainer.supervision.heartbeat import LEAVING
from hpc_gpt.trainer.supervision.signals import Inbox
from hpc_gpt.trainer.supervision.stacks import stack_of
from hpc_gpt.trainer.supervision.watchdog import Watchdog

_TURN_S = 0.2
_STRETCH = (10, 50)  # looks at the log: over fewer of them, the time of a look would be measured instead of a step's
_LOOK_S = 1.0
_LEAD_S = 120
_LAST_LINES_S = 4.0  # job.sh waits longer
_LAST_STEPS = 50  # these steps show a watch that is started again where metrics.jsonl ends
_SHELLS = (*SHELLS, "slurm_script")
_MOST_FILES = 64
_QUEUED = re.compile(r"\bSubmitted batch job (\d+)")
# A task that ended by itself: srun then waits for the others, which may wait for that one.
_TASK_FAILED = re.compile(
    r"^srun: error: (\S{1,80}): (tasks? [\d,-]{1,80}): (Exited with exit code [1-9]\d{0,2}|Killed|Aborted|Bus error"
    r"|Segmentation fault|Illegal instruction|Out Of Memory)"
)
_LOST_HINT = "if others wait for it, srun --kill-on-bad-exit=1 ends them at once"
_LOST_STEPS = 2  # after so many further steps the training has outlived it
_MOST_QUEUED = 8  # jobs that a script has queued and Slurm is asked about
_SQUEUE = ["squeue", "--noheader", "--states=all"]
_ASKS_S = 5.0  # at its time limit a job has only seconds


class ScriptWatch:
    """Watches one attempt of a script; `body` is its first process, `folder` the job's folder."""

    def __init__(self, run: RunFolder, attempt: Attempt, body: int, folder: Path) -> None:
        self._run, self._attempt, self._body, self._folder = run, attempt, body, folder
        self._resolved = run.resolved()
        self._command = self._resolved.program
        self._began = start_time(body)
        self._files = [Follower(attempt.log), Follower(attempt.err)]
        self._lines = LiveLines(self._command.pattern)
        # If there is trainer.json, another watch has read the first lines.
        self._is_first = not (attempt.folder / "trainer.json").exists()
        self._lines.moment = None
        before = read_stored_lines(attempt.metrics, _LAST_STEPS << 10)[-_LAST_STEPS:]
        written = [int(line["step"]) for line in before if line.get("step") is not None]
        self._resumed = self._report_start()
        resumed = self._resumed or None
        loss, planned = lambda: self._lines.loss, lambda: self._lines.planned
        clock = StepClock(*_STRETCH)
        self._log = ForeignLog(
            attempt,
            self._resolved,
            0,
            self._lines.take,
            resumed=resumed,
            loss=loss,
            planned=planned,
            last_bar=self._lines.last_bar,
            interleaved=lambda: self._lines.is_interleaved,
            clock=clock,
            written=written,
        )
        train = self._resolved.train
        files = functools.partial(checkpoint_files, run, self._command)
        self._heart = ForeignHeartbeat(
            train.hang_multiple, train.hang_floor_s, self._command.hang_s, files, is_on_one_node()
        )
        self._tree = Tree([body], StartedSteps())
        self._heart.processes = Processes(self._tree)
        self._inbox = Inbox(attempt)
        self._stop: str | None = None
        self._asked_at = self._looked = 0.0
        self._killed = self._hangs = False
        # When the script was asked to end: {pid: start time} of its processes, {pid: command} of its programs.
        self._before, self._programs = dict[int, str](), dict[int, bytes]()
        self._queued: list[str] = []  # ids of the jobs that the script has queued
        self._copies: list[tuple[Path, Path]] | None = None  # until the script's start has made the files
        self._globs, self._found = self._read_globs(), set[Path]()
        self._lost_at = 0  # the last step when a task was lost
        self._of_sruns = dict[str, None]()  # patterns of the files of its sruns
        self._inodes = set[tuple[int, int]]()  # a file that gets another name is not found again
        started = attempt.folder / "attempt.json"
        self._since = started.stat().st_mtime - 1 if started.exists() else 0.0

    def follow(self) -> None:
        """Follows the script until it has ended and its last line is read."""
        self._heart.step = self._resumed
        reserve(self._attempt)  # space for the files that job.sh's judge writes
        where = "its script", f"process {self._body}"
        watchdog = Watchdog(self._attempt, 0, 1, self._heart, self._leave, lambda: where)
        self._heart.gpus = watchdog.gpus.latest
        if (last := self._attempt.last_metrics()).get("step"):  # an earlier watch of the attempt was ended
            ago_s = max(0.0, time.time() - float(last.get("time") or time.time()))
            self._take_lines()  # the lines that the earlier watch has read
            count_steps(int(last["step"]), self._heart, boot_s() - ago_s)
            self._heart.at_total = has_last_line(self._attempt, self._resolved.train.steps)
        watchdog.start()
        while is_alive(self._body, self._began):
            if self._globs and not self._found:  # read at once, as lines are timed by when they come
                self._find_elsewhere()
            self._take_lines()
            self._look()
            time.sleep(_TURN_S)
        self._heart.enter(LEAVING)
        over = self._over()
        if not self._found:  # the program may have ended before its srun was seen
            self._of_sruns |= dict.fromkeys(self._read_globs(in_any_folder=True))
        self._find_elsewhere()
        until = time.monotonic() + _LAST_LINES_S
        while self._prints_last_lines() and time.monotonic() < until:
            self._take_lines()
            time.sleep(_TURN_S)
        self._take_lines()
        for file in self._files:
            self._lines.stream = self._files.index(file)
            self._log.take(*file.last_line())
        self._log.close()
        with contextlib.suppress(RunFolderError):
            write_said(self._attempt, 0, self._with_submission(said_by(self._lines, over)))
        release_reserve(self._attempt)
        while self._hangs:  # the watchdog's thread ends this process
            threading.Event().wait()
        (self._attempt.folder / ".followed").touch()

    def _prints_last_lines(self) -> bool:
        """Whether a program of the script may still print its last lines: a signal to the job has ended the script's
        shell while the program handles the signal, or an srun prints lines of ranks. Programs that a script leaves
        behind at its exit do not count: they are ended."""
        table = ProcessTable()
        group = [pid for pid, fields in table.stats.items() if int(fields[2]) == self._body and table.start_of(pid)]
        if any(name_of(pid) == "srun" for pid in group):
            return True
        with contextlib.suppress(OSError, ValueError):
            code, _ = (self._attempt.folder / ".code").read_text(encoding="utf-8").split()
            return bool(group) and int(code) > 128
        return bool(group)  # job.sh is about to write it

    def _with_submission(self, printed: PrintedEnd) -> PrintedEnd:
        """Adds the jobs that the script has queued, its successor and others. On this machine it may have queued itself
        instead of training, as some scripts do if SLURM_JOB_ID is not set, which is a failure."""
        submission, data = None, b""
        with contextlib.suppress(OSError):
            data = (self._run.path / "slurm_script").read_bytes()
            submission = submits_again(Path(self._command.script or "slurm_script"), data)
        if self._resolved.cluster.scheduler == "slurm":
            jobs = list(dict.fromkeys(self._queued))[-_MOST_QUEUED:]
            successors = self._successors(jobs, data) if jobs else []
            if successors is None:  # Slurm does not answer: the script's text decides
                successors = jobs[-1:] if submission is not None else []
            others = ", ".join(job for job in jobs if job not in successors)
            return replace(printed, queued=", ".join(successors), others=others)
        job = self._queued[-1] if self._queued else ""
        if submission is None or not (job or submission[1]):
            return printed
        if self._attempt.last_metrics():
            return replace(printed, queued=job)
        what = f"the script queued job {job}" if job else f"line {submission[0]} of the script calls sbatch"
        end = End("user_error", f"{what}, and its log has no step: SLURM_JOB_ID is not set here")
        of_program = printed.failed is not None and printed.of_program
        return printed if of_program else replace(printed, failed=end, of_program=True, failed_s=0.0)

    def _successors(self, jobs: Sequence[str], data: bytes) -> list[str] | None:
        """The jobs that would train beside a restart. Such a job waits or runs. It runs this script (its file, the
        run's copy or the spool's), or another script with the same program. None if Slurm does not answer."""
        names = (str(self._run.path / "slurm_script"), str(self._folder / (self._command.script or "slurm_script")))
        programs = programs_of(data.decode(errors="replace"))
        successors = []
        try:
            answer = ask([*_SQUEUE, f"--jobs={','.join(jobs)}", "--format=%i|%T|%o"], timeout_s=_ASKS_S)
            if answer.unreachable:
                return None
            for job, state, command in squeue_rows(answer, 3) if answer.code == 0 else []:
                if slurm_state(state) not in LIVE:
                    continue
                is_own = any(command == name or command.startswith(f"{name} ") for name in names)
                script = (
                    "" if is_own else ask(["scontrol", "write", "batch_script", job, "-"], timeout_s=_ASKS_S).stdout
                )
                if is_own or script.encode() == data or programs & programs_of(script):
                    successors.append(job)
        except SlurmUnreachable:
            return None
        return successors

    # --- its output

    def _take_lines(self) -> None:
        spoke_at = self._lines.spoke_at
        lines = self._take_first_lines() if self._is_first else []
        now = time.monotonic()
        lines += self._take_from(self._files)
        self._lines.moment = now
        for line in lines:
            if (failed := _TASK_FAILED.match(line)) is not None:
                node, task, how = failed.groups()
                self._heart.lost = f"srun says: {task} on {node}: {how}; {_LOST_HINT}"
                self._lost_at = self._log.last_step
            self._queued += _QUEUED.findall(line) if "ubmitted" in line else []
        if self._copies is None and self._attempt.outputs.exists():
            self._copies = copied_files(self._attempt.folder)
        for log, copy in self._copies or ():
            copy_more(log, copy)
        grew = any(file.grew for file in self._files)
        if grew and not lines:
            self._log.note_output()
        if self._heart.phase == LEAVING:
            return
        if count_steps(self._log.last_step, self._heart, self._log.stepped_boot_s):
            self._heart.at_total = has_last_line(self._attempt, self._resolved.train.steps)
            if self._log.last_step >= self._lost_at + _LOST_STEPS:
                self._heart.lost = ""
        if grew and (not lines or self._lines.spoke_at > spoke_at):  # a traceback is no sign of life
            self._heart.heard(self._log.is_more)

    def _take_first_lines(self) -> list[str]:
        """Takes the lines from before this process began, which may be long after the script; job.sh has recorded how
        long its files were, and when."""
        self._is_first, text, folder = False, "", self._attempt.folder / ".signals"
        with contextlib.suppress(OSError, ValueError):
            self._lines.moment = _monotonic((folder / "began").read_text(encoding="utf-8"))
            text = (folder / "sizes").read_text(encoding="utf-8")
        taken = self._take_from(self._files[2:])
        for moment, sizes in re.findall(r"(?m)^(\d+\.\d+) .*\n((?:\w+ \d+\n)*)", text):
            size_of = dict(line.split() for line in sizes.splitlines())
            files = zip(self._files[:2], ("log", "err"), strict=True)
            for file, name in files:
                taken += self._take_from([file], int(size_of.get(name, 0)))
            self._lines.moment = _monotonic(moment)
        return taken

    def _take_from(self, files: Sequence[Follower], end: int | None = None) -> list[str]:
        """Takes the new lines of each file, up to the byte `end`; returns them."""
        taken: list[str] = []
        for file in files:
            self._lines.stream = self._files.index(file)
            lines = [*file.lines(end)]
            self._log.take(*lines)
            taken += lines
        return taken

    def _over(self) -> float:
        """When the script ended, by time.monotonic(): this process may have begun or looked later."""
        with contextlib.suppress(OSError, ValueError):
            _, ended = (self._attempt.folder / ".code").read_text(encoding="utf-8").split()
            return _monotonic(ended)
        return time.monotonic()

    def _report_start(self) -> int:
        """Writes trainer.json once, and returns the step after which the attempt continues."""
        path = self._attempt.folder / "trainer.json"
        if not path.exists():
            gpus = list_gpus()
            self._run.checkpoints.mkdir(exist_ok=True)
            complete_run(self._run.path, self._resolved)
            # The script may have saved before this process began.
            began = float(self._attempt.started().get("started") or math.inf)
            checkpoint, step = newest_checkpoint(self._run, self._command, until=began)
            start = {
                "device": gpus[0]["name"] if gpus else None,
                "host": os.environ.get("SLURMD_NODENAME") or platform.node(),
                "resumed_step": step,
                "resumed_from": checkpoint and str(checkpoint),
                "params": params(self._resolved),
            }
            write_once(path, json.dumps(start) + "\n")
            self._attempt.folder.joinpath(ForeignLog.TRAINS).touch()
        return self._attempt.trainer().get("resumed_step") or 0

    def _find_elsewhere(self, asks: bool = False) -> None:
        """Finds the files to which the script sends its programs' output, follows them, and links them to the attempt.
        `asks`: also the processes of the script, whose output may go where its text does not say."""
        if asks:
            seen = self._tree.look().seen
            self._of_sruns |= dict.fromkeys(patterns_of_sruns(seen))
        patterns = (*self._globs, *self._of_sruns)
        names = (glob.glob(pattern, root_dir=self._folder, recursive=True) for pattern in patterns)
        paths = [self._folder / name for name in itertools.chain.from_iterable(names)]
        paths += output_of(seen) if asks else []
        self._inodes |= {_inode(path.stat()) for path in (self._attempt.log, self._attempt.err) if path.exists()}
        for path in map(Path.resolve, paths):
            with contextlib.suppress(OSError, RunFolderError):
                inode = _inode(about := path.stat())
                if path in self._found or inode in self._inodes or not path.is_file() or about.st_mtime < self._since:
                    continue
                earlier = any(path in attempt.logs for attempt in self._run.attempts() if attempt != self._attempt)
                self._files.append(Follower(path, about.st_size if earlier else 0))
                self._found.add(path)
                self._inodes.add(inode)
                self._attempt.elsewhere.mkdir(exist_ok=True)
                (self._attempt.elsewhere / f"{len(self._found):03}").symlink_to(path)
            if len(self._found) >= _MOST_FILES:
                return

    def _read_globs(self, in_any_folder: bool = False) -> list[str]:
        try:
            text = (self._run.path / "slurm_script").read_text(encoding="utf-8", errors="replace")
        except OSError:
            return []
        return globs_of(text, {**os.environ, "PWD": str(self._folder)}, self._command.args, in_any_folder)

    # --- requests, and the time limit

    def _look(self) -> None:
        now = time.monotonic()
        if now < self._looked + _LOOK_S:
            return
        self._looked = now
        self._find_elsewhere(asks=True)
        self._heart.look_at_files()
        if self._stop is None:
            self._stop = self._reason()
            if self._stop is not None:
                with contextlib.suppress(RunFolderError):
                    write_once(self._attempt.folder / "stop.json", json.dumps({"reason": self._stop}) + "\n")
                self._heart.enter(LEAVING)
                self._asked_at = now
                self._ask_to_end()
        elif not self._killed and self._stop != "walltime":  # the limit itself kills
            self._killed = now > self._asked_at + (self._resolved.job.signal_lead_s or _LEAD_S) or self._starts_again()
            if self._killed:
                self._kill()

    def _reason(self) -> str | None:
        reasons = set(self._inbox.look()) | limits_reached(
            self._resolved, lambda: trained_s(self._run), self._attempt, self._heart.stopped_s
        )
        for name, reason in ((".limit", "walltime"), (".interrupt", "interrupted")):
            if (self._attempt.folder / name).exists():
                reasons.add(reason)
        return first_reason(reasons)

    def _ask_to_end(self) -> None:
        """Signals the job's steps and the programs that the script's shell has started; the shell only if it catches
        the signal, so that its lines after the training still run."""
        number = signal.SIGTERM
        if self._command.stop_signal != "none":
            number = signal.Signals[f"SIG{self._command.stop_signal}"]
        targets = [(pid, started) for pid in to_signal(self._body, number) if (started := start_time(pid))]
        earlier, self._before = self._tree.look().seen, self._tree.look(at_once=True).seen
        beside = (*_SHELLS, *BESIDE)
        self._programs = {pid: _command(pid) for pid in self._before if pid in earlier and name_of(pid) not in beside}
        job = os.environ.get("HPC_GPT_JOB")
        if job and ALLOCATION not in os.environ:
            line = ["scancel", "--quiet", f"--signal={number.name.removeprefix('SIG')}", job]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(line, timeout=20, check=False, capture_output=True)
        for pid, started in targets:
            send(pid, started, number)

    def _starts_again(self) -> bool:
        """Whether the programs that ran when the script was asked to end have ended, and one of them runs again, as in
        a loop."""
        seen = self._tree.look().seen
        if any(seen.get(pid) == self._before[pid] for pid in self._programs):
            return False
        new = [pid for pid, started in seen.items() if self._before.get(pid) != started]
        return any(_command(pid) in self._programs.values() for pid in new)

    def _kill(self) -> None:
        seen = self._tree.look(at_once=True).seen
        # Signalled oldest first, so a shell starts nothing more.
        for pid in sorted(seen, key=lambda pid: (int(seen[pid]), pid)):
            send(pid, seen[pid], signal.SIGKILL)

    # --- hangs

    def _leave(self, message: str) -> None:
        """Ends a script that hangs. Runs on the watchdog's thread."""
        self._hangs = True
        print(message, flush=True)
        stacks = "\n".join(stack_of(pid) for pid in self._tree.look().seen)
        with contextlib.suppress(RunFolderError, OSError):
            self._attempt.stacks.mkdir(exist_ok=True)
            write_once(self._attempt.stacks / "0.txt", stacks)
        self._kill()
        (self._attempt.folder / ".followed").touch()
        os._exit(1)


def _command(pid: int) -> bytes:
    """The words that started a process, without numbers, by which the turns of a loop may differ."""
    try:
        return re.sub(rb"\d+", b"", Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return b""


def _inode(about: os.stat_result) -> tuple[int, int]:
    return about.st_dev, about.st_ino


def to_signal(body: int, number: signal.Signals) -> list[int]:
    """The processes that a request to end is sent to: the children of the script's shell, and instead of a subshell its
    children; the shell itself, or a subshell, only if it catches the signal. Not srun: Slurm signals its step."""
    children = ProcessTable().children

    def below(pid: int) -> list[int]:
        pids: list[int] = []
        for child in children.get(pid, []):
            name = name_of(child)
            if name == "srun":
                continue
            if name in _SHELLS:
                pids += [*([child] if _catches(child, number) else []), *below(child)]
            else:
                pids.append(child)
        return pids

    return [*below(body), *([body] if _catches(body, number) else [])]


def _monotonic(uptime: str) -> float:
    """A time of /proc/uptime by time.monotonic()."""
    return time.monotonic() - boot_s() + float(uptime)


def _catches(pid: int, number: signal.Signals) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    match = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> (number - 1) & 1)


def main(arguments: Sequence[str]) -> int:
    run = RunFolder(Path(arguments[0]))
    attempt = run.attempt(int(arguments[1]))
    try:
        body = int((attempt.folder / "body").read_text(encoding="utf-8"))
        ScriptWatch(run, attempt, body, Path(arguments[2])).follow()
    except (UserError, OSError, ValueError) as fault:
        print(f"the script is not followed: {fault}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
