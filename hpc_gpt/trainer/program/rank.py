"""Supervises another program as one task of a job: starts it, passes on requests to the job, and writes how it ended.

The program has its own checkpoints, signals and log. This module does everything else: the rendezvous, the signals of a
job, the requests of users, metrics.jsonl from the log's lines, hangs, and ended.json. Needs no torch.
"""

import contextlib
import functools
import json
import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.end_policy import (
    OVER,
    STOP,
    End,
    end_for,
    first_reason,
    is_cancelled,
    limits_reached,
)
from hpc_gpt.core.ends.exit_status import exit_code_text
from hpc_gpt.core.ends.failures import UNSPECIFIC
from hpc_gpt.core.ends.program_end import PrintedEnd, ProgramFacts, end_of_program, facts_of, has_last_line, write_said
from hpc_gpt.core.ends.state import EXIT_0_BUT
from hpc_gpt.core.errors import RunFolderError, UserError, fault_words
from hpc_gpt.core.files import json_object, read_json, write_once
from hpc_gpt.core.machine.find_gpus import ask_gpus
from hpc_gpt.core.network import GLOO, MEETING_S, held_port, use_interface
from hpc_gpt.core.process import adopt_orphans, stat_of
from hpc_gpt.core.processes.find_processes import GPU_LOCKS, Tree, end_processes, gpu_locks, record_of, task_variables
from hpc_gpt.core.runs.full_disk import release_reserve
from hpc_gpt.core.runs.run_folder import Attempt, RunFolder
from hpc_gpt.core.secrets import hide_values
from hpc_gpt.core.slurm.environment import own_job
from hpc_gpt.reader.runs.attempt_cause import nan_since
from hpc_gpt.trainer.program.process import ForeignLog, count_steps, trained_s
from hpc_gpt.trainer.program.signs_of_life import ForeignHeartbeat, Processes
from hpc_gpt.trainer.supervision.ending import end_of_sigterm, write_end
from hpc_gpt.trainer.supervision.heartbeat import LEAVING, SAVING, Heartbeat
from hpc_gpt.trainer.supervision.meeting import identify, read_rendezvous
from hpc_gpt.trainer.supervision.node_mates import NodeMates
from hpc_gpt.trainer.supervision.signals import Inbox, Signals
from hpc_gpt.trainer.supervision.watchdog import Watchdog

TURN_S = 0.1
_LOOK_S = 1.0
# All tasks together look at most this many times a second for a stop, and as often for steps. So do the first tasks of
# their nodes, which pass on what they find.
_LOOKS = 80
_ENDS = 5000  # the same once a program has ended
# A cause that names its rank, such as a worker of torchrun.
_OF_RANK = re.compile(r"rank \d+ on ")
_GRACE_S = 5.0
_HEARS_S = 2.0
_ENDED_S = 10.0


@dataclass(frozen=True)
class Stop:
    """A stop that all tasks follow: its `reason`, and whether there is anything to save."""

    reason: str
    save: bool


@dataclass(frozen=True)
class ProgramStart:
    """A program to start: its command line, its variables and its folder, None for this process's; and how it is
    followed.

    `resumed`: the step after which it continues, 0 without a checkpoint. `pauses`: the numbers of steps between its
    evaluations and between its saves, which take longer than a step and print no line.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    log: ForeignLog
    heart: Heartbeat
    resumed: int
    folder: str | None = None
    pauses: tuple[int, ...] = ()


class ForeignRank:
    """One task's part in an attempt. An engine's subclass says which program is started, and how it is stopped."""

    def __init__(self, run: RunFolder, attempt: Attempt, signals: Signals) -> None:
        self._run = run
        self._attempt = attempt
        self._signals = signals
        self._resolved = run.resolved()
        self._place = identify(os.environ)
        self._place.check(self._resolved.tasks, self._resolved.layout)
        adopt_orphans()
        self._process: subprocess.Popen[bytes] | None = None
        # The program's processes.
        self._tree = Tree(record=record_of(attempt, self._place.rank, own_job()))
        self._stop: Stop | None = None
        self._looked = self._followed = self._read = 0.0
        is_first = self._place.local_rank == 0
        self._look_s = max(_LOOK_S, (self._resolved.nodes if is_first else self._place.size) / _LOOKS)
        self._mates: NodeMates | None = None
        self._moves = 0
        self._hangs = False
        self._heart = Heartbeat(0, 0)  # until the program is started
        self._inbox = Inbox(attempt)
        self._port = os.environ.get("MASTER_PORT", "")
        self._held: socket.socket | None = None
        self._is_visit = "round" in run.sweep_note()  # after train.steps the stop signal ends it

    # --- overridden by an engine

    @property
    def step(self) -> int:
        """The last step that is known."""
        return int(self._attempt.last_metrics().get("step") or 0)

    def prepare(self) -> ProgramStart:
        """The program to start. Raises UserError."""
        raise NotImplementedError

    def stacks(self, process: subprocess.Popen[bytes], log: ForeignLog) -> str:
        """The stacks of a program that hangs; the caller then ends it."""
        raise NotImplementedError

    def ask_to_end(self, stop: Stop) -> None:
        """Tells the program to end."""
        raise NotImplementedError

    def turn(self) -> None:
        """Called repeatedly until `ask_to_end` is called."""

    def kill_if_late(self) -> None:
        """Called repeatedly after `ask_to_end`."""

    def rest_is_over(self) -> bool:
        """Whether all processes that the program started and that a stop concerns have ended."""
        return True

    def failure(self, code: int) -> tuple[str, str, bool]:
        """Returns (class of the end, cause, whether another rank failed) for the program's exit code."""
        raise NotImplementedError

    def end_of_all(self) -> End:
        """The end of an attempt whose program exited with 0 without being asked to stop."""
        raise NotImplementedError

    def said(self) -> PrintedEnd:
        """The printed lines of this task's program that decide how the attempt ends."""
        return PrintedEnd()

    def unsaved(self, stop: Stop, code: int) -> str:
        """Says how the program ended if it was asked to stop and did not save; empty if it saved."""
        raise NotImplementedError

    # --- the attempt

    def train(self) -> int:
        """Runs the program to its end, and returns the exit code. The caller reports exceptions."""
        start = self.prepare()
        environment = {name: value for name, value in start.environment.items() if name != GPU_LOCKS}
        self._process = subprocess.Popen(
            start.command,
            env={**environment, **task_variables(self._run, self._attempt, self._place.rank)},
            cwd=start.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            process_group=0,  # so `kill 0` in a program's trap does not end this process
            pass_fds=gpu_locks(),
        )
        self._tree.add(self._process.pid)
        start.log.follow(self._process)
        self._watch(start, self._process)
        code = self._wait(start, self._process)
        self._end_rest()
        if code and self._stop is None and is_cancelled(self._run, self._attempt):
            # Each process gets its own signal, and the program may end before this process gets its signal.
            self._stop = Stop("terminated", True)
        if code and self._stop is None and not self._is_finished(code):
            return self._report_failure(code)
        if self._place.rank:
            # If this task failed first, srun would kill rank 0 before it has written the end.
            return 0
        end = self._end(code)
        end = End(*self._seen_as_nan(end.ended, end.cause), end.node, end.note)
        write_end(self._run, self._attempt, end, self.step)
        return 1 if end.ended in ("error", "nan") or (end.cause or "").startswith(EXIT_0_BUT) else 0

    def quit(self) -> None:
        """Ends the program at once, without a save, and writes ended.json."""
        if self._process is not None:
            self._process.kill()
            self._end_rest()
        self._attempt.write_ended("stopped", "Ctrl-C twice: left without saving", self.step)

    def _end_rest(self) -> None:
        """Kills processes that the program left behind, such as the workers of a torchrun that was killed: they would
        train beside the next attempt, and hold their GPU."""
        end_processes(self._run, self._attempt, own_job(), self._place.rank, self._tree)
        self._tree.close()

    def _wait(self, start: ProgramStart, process: subprocess.Popen[bytes]) -> int:
        """Waits for the program's exit code. Asks it to stop when this task or another has been asked."""
        while True:
            code = process.poll()
            if code is not None and (self._stop is None or self.rest_is_over()):
                break
            if self._stop is None and (stop := self._look_for_stop()):
                self._stop = stop
                self.ask_to_end(stop)
                self._leaving(start)
            elif self._stop is not None:
                self.kill_if_late()
            else:
                self.turn()
            self._follow(start)
            self._tree.write()
            time.sleep(TURN_S)
        heart = start.heart
        # If one of several programs ends early with 0, the attempt continues: the steps of the others count.
        if isinstance(heart, ForeignHeartbeat) and not code and self._stop is None and self._place.size > 1:
            heart.is_over = True
        else:
            self._leaving(start)
        start.log.finish()
        # After a signal to another task, all may have left before this process reads stop.json.
        until = time.monotonic() + (_GRACE_S if code and self._place.size > 1 else self._may_hear_s(code))
        while self._stop is None and not self._attempt.ended():
            self._looked = 0.0
            self._stop = self._look_for_stop()
            if time.monotonic() >= until and (code or self.note_end()):
                break
            self._follow(start)
            time.sleep(self._pause_s)
        self._leaving(start)
        while self._stop is not None and not self.rest_is_over():
            self.kill_if_late()
            time.sleep(TURN_S)
        until = time.monotonic() + _GRACE_S
        while self._stop is not None and not code and not self.note_end() and time.monotonic() < until:
            time.sleep(self._pause_s)
        return code

    def _may_hear_s(self, code: int) -> float:
        """The seconds in which the signal that ended the program may still reach this process: Slurm signals each
        process of a step separately, and on a loaded node this one gets its signal later."""
        planned = self._resolved.train.steps or self.said().planned
        is_as_planned = not code and (self._place.rank > 0 or 0 < planned <= self.step)
        return 0.0 if is_as_planned or self._resolved.cluster.scheduler != "slurm" else _HEARS_S

    def note_end(self) -> bool:
        """Notes that this task's program has ended with 0, and returns whether the programs of all tasks have: the
        first task writes the end, and another may still be writing the last steps. Only the first task waits."""
        with contextlib.suppress(RunFolderError):
            write_said(self._attempt, self._place.rank, self.said())
        over = self._attempt.folder / OVER
        return self._place.rank != 0 or len(list(over.glob("[0-9]*"))) >= self._place.size

    def _look_for_stop(self) -> Stop | None:
        """Looks for a request to stop, to this task or another; None if there is none. Writes stop.json if this task is
        asked: the first task that writes it decides for all."""
        path = self._attempt.folder / STOP
        reason = self.reason()
        if reason:
            # Before the first step a program may not listen yet, and has nothing to save.
            save = self._attempt.metrics.exists() or (self._attempt.folder / ForeignLog.TRAINS).exists()
            write_once(path, json.dumps({"reason": reason, "save": save}) + "\n")
        if reason or time.monotonic() >= self._looked + self._look_s:
            self._looked = time.monotonic()
            stop = read_json(path)
            self._say(stop=stop)
        else:
            stop = self._heard.get("stop") or {}
        return Stop(str(stop["reason"]), bool(stop["save"])) if stop else None

    @property
    def _pause_s(self) -> float:
        """Seconds between two looks for the ends of the other tasks; all tasks look, so more tasks look more rarely."""
        return max(TURN_S, self._place.size / _ENDS)

    @property
    def _heard(self) -> dict[str, Any]:
        """The message of the node's first task: the `stop` and the last `step` that it found."""
        return (json_object(self._mates.heard) if self._mates and self._mates.heard else None) or {}

    def _say(self, **message: object) -> None:
        if self._mates is not None and self._mates.is_first:
            self._mates.says = json.dumps((json_object(self._mates.says or "{}") or {}) | message).encode()

    def reason(self) -> str | None:
        """The reason why this task is asked to end; None if it is not asked."""
        reasons = set(self._signals.raised)
        if self._place.rank == 0:
            reasons |= self._inbox.look() | limits_reached(
                self._resolved, lambda: trained_s(self._run), self._attempt, self._heart.stopped_s
            )
            if self._is_visit and self.step >= self._resolved.train.steps:
                reasons.add("target")
        return first_reason(reasons)

    def _end(self, code: int) -> End:
        """The end of an attempt that was asked to stop, or whose program ended with 0. Rank 0 writes it."""
        if self._stop is None:
            return self.end_by(self._facts(code)) if code else self.end_of_all()
        target = f"the {self._resolved.train.steps} steps of its visit"
        end = end_for(self._stop.reason, self._resolved, self._end_of_sigterm, target)
        how = self.unsaved(self._stop, code)
        end = End(end.ended, f"{end.cause}; {how}") if how else end
        if self._stop.reason == "target" or is_cancelled(self._run, self._attempt):
            return end
        facts = replace(self._facts(code), asked=end)
        killed = facts.code == 128 + signal.SIGKILL and self._stop.reason == "walltime"
        return self.end_by(replace(facts, at_limit=killed and facts.made_last))

    def _is_finished(self, code: int) -> bool:
        """Whether the program ended after its last planned step, by a signal that was not meant for the attempt."""
        return self._facts(code).is_finished

    def _facts(self, code: int) -> ProgramFacts:
        return facts_of(self._attempt, code, self._resolved.train.steps, self.said())

    def end_by(self, facts: ProgramFacts) -> End:
        """The end of a program that exited with 0, or that was asked to end."""
        end = end_of_program(facts)
        assert end is not None
        return end

    def _seen_as_nan(self, ended: str, cause: str | None) -> tuple[str, str | None]:
        """Returns (class, cause) of an end. If the program trained with NaN up to the end, that is the class, unless
        the end has a more specific one."""
        with contextlib.suppress(Exception):  # of a reader
            if ended in ("done", *UNSPECIFIC) and (since := nan_since(self._attempt)):
                return "nan", f"{since}; {cause}" if cause else since
        return ended, cause

    def _end_of_sigterm(self) -> End:
        """The end by a SIGTERM. Rank 0 writes the end, so it alone asks Slurm."""
        if self._place.rank:
            return End("cancelled")
        return end_of_sigterm(self._run, self._attempt, self._signals)

    def _report_failure(self, code: int) -> int:
        """Writes how the program failed, by its last lines. A rank that only lost a peer first waits until that peer
        has written its own failure."""
        try:
            ended, cause, lost_peer = self.failure(code)
        except Exception as fault:  # of a reader: the program's own end counts
            print(f"note: the program's last lines were not read: {fault_words(fault)}", file=sys.stderr, flush=True)
            ended, cause, lost_peer = "error", f"the program ended with {exit_code_text(code)}", False
        cause = hide_values(cause, os.environ)
        if ended == "port_taken" and self._port not in cause:
            cause += f" (the rendezvous' port is {self._port})"
        until = time.monotonic() + _ENDED_S
        while lost_peer and self._place.size > 1 and not self._attempt.ended() and time.monotonic() < until:
            time.sleep(self._pause_s)
        cause = cause if _OF_RANK.match(cause) else f"rank {self._place.rank}: {cause}"
        release_reserve(self._attempt)  # the disk may be full
        self._attempt.write_ended(*self._seen_as_nan(ended, cause), self.step)
        return code if code > 0 else 1

    # --- hangs

    def _watch(self, start: ProgramStart, process: subprocess.Popen[bytes]) -> None:
        def leave(message: str) -> None:
            """Ends the program and this process. Runs on the watchdog's thread."""
            self._hangs = True
            print(message, flush=True)
            if stacks := self.stacks(process, start.log):
                with contextlib.suppress(RunFolderError):
                    write_once(self._attempt.stacks / f"{self._place.rank}.txt", stacks)
            self._end_rest()
            os._exit(1)

        self._heart = start.heart
        start.heart.step = start.resumed
        place = self._place
        wait = functools.partial(_find_wait, process.pid)
        watchdog = Watchdog(self._attempt, place.rank, place.size, start.heart, leave, wait)
        self._mates = watchdog.mates
        if isinstance(start.heart, ForeignHeartbeat):
            start.heart.processes, start.heart.gpus = Processes(self._tree), watchdog.gpus.latest
        watchdog.start()

    def _follow(self, start: ProgramStart) -> None:
        """Gives the heartbeat the last step that metrics.jsonl or the node's first task has, at most once a second."""
        heart, now = start.heart, time.monotonic()
        if heart.phase == LEAVING or now < self._followed + _LOOK_S:
            return
        self._followed = now
        reads = now >= self._read + self._look_s
        if reads:
            self._read = now
        log, is_foreign = start.log, isinstance(heart, ForeignHeartbeat)
        heard, self._moves = log.moves != self._moves, log.moves
        log.flush_steps()
        came_boot_s = log.stepped_boot_s if is_foreign and log.has_steps else None
        if count_steps(self.step if reads else int(self._heard.get("step") or 0), heart, came_boot_s):
            if isinstance(heart, ForeignHeartbeat):
                planned = self._resolved.train.steps
                heart.at_total = has_last_line(self._attempt, planned) if reads else bool(self._heard.get("at_total"))
                heard = heard or log.is_more
                if not log.has_steps:
                    log.pass_step()
            self._say(step=heart.step, at_total=isinstance(heart, ForeignHeartbeat) and heart.at_total)
            # Evaluations and saves come before the next line.
            until = heart.step + self._resolved.train.log_every
            if any(every and until // every * every >= heart.step for every in start.pauses):
                heart.enter(SAVING)
        if isinstance(heart, ForeignHeartbeat):
            heart.look_at_files()
            if heard:
                heart.heard(log.is_more)

    def _leaving(self, start: ProgramStart) -> None:
        """Notes in the heartbeat that the program is asked to end, or has ended."""
        if start.heart.phase != LEAVING:
            start.heart.enter(LEAVING)
        if self._hangs:  # the watchdog's thread ends this process
            threading.Event().wait()

    # --- for the engines

    def await_file(self, path: Path, fault: UserError) -> None:
        """Waits for a file that another task makes. Raises `fault` if the attempt has ended, or after MEETING_S."""
        until = time.monotonic() + MEETING_S
        while not path.exists():
            if self._attempt.ended() or time.monotonic() > until:
                raise fault
            time.sleep(TURN_S)

    def report_start(self, resumed: int | None, details: Mapping[str, object]) -> str:
        """Writes trainer.json on the first task; returns the device's name. `resumed`: None if only the program knows
        it."""
        (gpus, fault), cluster = ask_gpus(), self._resolved.cluster
        # If no GPU can be listed, only the profile knows the device of a cluster.
        device = gpus[0]["name"] if gpus else "cpu" if cluster.scheduler == "local" and not fault else None
        start = {"device": device, "host": platform.node(), "resumed_step": resumed, **details}
        write_once(self._attempt.folder / "trainer.json", json.dumps(start) + "\n")
        return str(device or cluster.device)

    def rendezvous(self) -> dict[str, str]:
        """The variables of the rendezvous: MASTER_ADDR and MASTER_PORT if the job has not set them, as on one machine,
        where rank 0 holds a port until it ends; and gloo's interface, unless it is set. A rank of each node prints the
        interface."""
        if "MASTER_PORT" in os.environ:
            use_interface(self._resolved.nodes, self._place.local_rank)
            return {GLOO: os.environ[GLOO]} if GLOO in os.environ else {}
        if self._place.rank == 0:
            port, self._held = held_port(os.getpid())
            write_once(self._attempt.rendezvous, f"127.0.0.1 {port}\n")
        host, self._port = read_rendezvous(self._attempt)
        variables = {"MASTER_ADDR": host, "MASTER_PORT": self._port}
        return variables if "GLOO_SOCKET_IFNAME" in os.environ else {**variables, "GLOO_SOCKET_IFNAME": "lo"}


def _find_wait(pid: int) -> tuple[str, str]:
    """The program's (collective, place), as far as they can be seen from outside."""
    with contextlib.suppress(OSError, IndexError):
        if stat_of(pid)[0] in "tT":
            return "", "a process that is stopped"
    return "its program", f"process {pid}"
