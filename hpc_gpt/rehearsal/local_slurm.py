"""Stand-ins for Slurm's commands in a folder for PATH, and the scheduler's answers to them.

They answer what job.sh and the launcher ask: sbatch of a script; srun inside a job; scontrol ping, show config, show
hostnames, show job, update of StartTime and ExcNodeList, requeue; squeue of %i, %T and %r; scancel of jobs; sacct of
JobID and State. Anything else is refused with a message: a rehearsal must not guess.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.rehearsal import processes
from hpc_gpt.rehearsal.job import CLUSTER, COMPLETING, PENDING, RUNNING, RehearsedJob
from hpc_gpt.rehearsal.job_request import (
    RequestFault,
    ignored_options,
    not_rehearsed,
    parse_options,
    read_request,
    read_time,
)
from hpc_gpt.rehearsal.processes import MARK
from hpc_gpt.rehearsal.scheduler import Scheduler, Timing
from hpc_gpt.rehearsal.step import Srun, Step
from hpc_gpt.slurm.hosts import expand_hosts

_ANSWERED = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sacct")
# Slurm's other commands. Without a stand-in the site's own command would be called, and would find no cluster.
_REFUSED = ("sacctmgr", "salloc", "sattach", "sbcast", "sdiag", "sinfo", "sprio", "sreport", "sshare", "sstat",
            "strigger")  # fmt: skip


@dataclass(frozen=True)
class CommandAnswer:
    """A command's output and exit code. `then` is called when the command has ended."""

    out: str = ""
    err: str = ""
    code: int = 0
    then: Callable[[], None] | None = None


class LocalSlurm:
    """The folder of stand-ins and their scheduler. `close` ends all processes and removes the folder.

    `environment`: the variables with which a command finds the stand-ins. `ignored`: options of sbatch and srun that
    were given but have no effect. If this process is killed, a guard cleans up.
    """

    def __init__(self, nodes: int, gpus: int = 0, timing: Timing | None = None, also: Mapping[str, str] | None = None):
        self.folder = Path(tempfile.mkdtemp(prefix="hpc-gpt-rehearsal-")).resolve()
        (self.folder / "tmp").mkdir()
        commands = self.folder / "bin"
        commands.mkdir()
        for name in (*_ANSWERED, *_REFUSED):
            line = _program("stand-in", str(self.folder), name)
            (commands / name).write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
            (commands / name).chmod(0o700)
        nowhere = self.folder / "no-slurm.conf"
        nowhere.touch()
        own = {
            MARK: str(self.folder),
            "PATH": f"{commands}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "TMPDIR": str(self.folder / "tmp"),
            # If one of the site's own commands is called after all, it finds no cluster.
            "SLURM_CONF": str(nowhere),
            "HPC_GPT_STATE": str(self.folder / "state"),
            **(also or {}),
        }
        self.environment = {**os.environ, **own}
        self.ignored: dict[str, None] = {}
        self._guard = subprocess.Popen(
            _program("guard", str(self.folder)),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self.scheduler = Scheduler(self.folder, nodes, own, gpus, timing)
        self._server = socket.socket(socket.AF_UNIX)
        # Through a descriptor, as the path of a socket may have at most 107 bytes.
        place = os.open(self.folder, os.O_PATH)
        self._server.bind(f"/proc/self/fd/{place}/socket")
        os.close(place)
        self._server.listen(64)
        threading.Thread(target=self._accept, name="stand-ins", daemon=True).start()

    def close(self) -> list[int]:
        """Ends all jobs and removes the folder; returns the pids of processes that did not end."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        left = self.scheduler.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        self._guard.wait()
        return left

    def __enter__(self) -> LocalSlurm:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        files: list[int] = []
        with connection, contextlib.suppress(OSError, ValueError):
            try:
                _, files, _, _ = socket.recv_fds(connection, 1, 2)
                asked = json.loads(_line(connection))
                name = str(asked["name"])
                try:
                    answer = self._answer(name, asked, files, connection)
                except RequestFault as fault:
                    answer = CommandAnswer(err=f"{name}: error: {fault}\n", code=1)
                except Exception as fault:  # without an answer the command would wait for ever
                    answer = CommandAnswer(err=f"{name}: error: a fault of the rehearsal: {fault!r}\n", code=1)
                said = {"out": answer.out, "err": answer.err, "code": answer.code}
                connection.sendall(json.dumps(said).encode())
                connection.shutdown(socket.SHUT_WR)
                if answer.then is not None:
                    connection.recv(1)  # until it has ended
                    answer.then()
            finally:
                for file in files:
                    os.close(file)

    def _answer(
        self, name: str, asked: Mapping[str, Any], files: Sequence[int], connection: socket.socket
    ) -> CommandAnswer:
        if name not in _ANSWERED:
            raise not_rehearsed(name)
        options, arguments = parse_options(name, asked["arguments"])
        if name == "srun":
            folder = str(Path(asked["folder"]) / options.get("chdir", ""))
            return self._srun(Srun(options, arguments, asked["environment"], folder, *files), connection)
        with self.scheduler.lock:
            if name == "sbatch":
                return self._sbatch(options, arguments, asked["environment"], asked["folder"])
            if name == "scontrol":
                return self._scontrol(arguments, "oneliner" in options)
            if name == "scancel":
                return self._scancel(options, arguments)
            return self._squeue(options) if name == "squeue" else self._sacct(options)

    def _sbatch(
        self, options: Mapping[str, str], arguments: Sequence[str], environment: Mapping[str, str], folder: str
    ) -> CommandAnswer:
        if not arguments:
            raise not_rehearsed("a script on stdin")
        file = Path(folder) / arguments[0]
        if not file.is_file():
            raise RequestFault(f"Unable to open file {arguments[0]}")
        script = file.read_text(encoding="utf-8", errors="surrogateescape")
        request = read_request(script, options, file.name)
        if "test-only" in options:
            return CommandAnswer(err=f"sbatch: Job 1 to start now using {request.nodes} nodes\n")
        self.ignored |= dict.fromkeys(ignored_options("sbatch", request.options))
        job = self.scheduler.submit(request, script, arguments[1:], environment, folder)
        return CommandAnswer(f"{job.id}\n" if "parsable" in options else f"Submitted batch job {job.id}\n")

    def _srun(self, srun: Srun, connection: socket.socket) -> CommandAnswer:
        environment = dict(srun.environment)
        job = self.scheduler.find(environment.get("SLURM_JOB_ID", ""))
        if job is None or not srun.command:
            raise not_rehearsed("srun without a command" if job else "srun outside a job")
        self.ignored |= dict.fromkeys(ignored_options("srun", srun.options))
        # srun does not read SLURM_CPUS_PER_TASK since 22.05; it reads SRUN_CPUS_PER_TASK.
        if "SRUN_CPUS_PER_TASK" in environment:
            environment["SLURM_CPUS_PER_TASK"] = environment["SRUN_CPUS_PER_TASK"]
        step = self.scheduler.open_step(job, replace(srun, environment=environment))
        threading.Thread(target=self._forward, args=(connection, step), daemon=True).start()
        step.ended.wait()
        return CommandAnswer(code=max((rank.code or 0 for rank in step.ranks), default=0))

    def _forward(self, connection: socket.socket, step: Step) -> None:
        """Forwards srun's signals to its ranks, and ends the ranks if srun is killed."""
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                self.scheduler.signal_step(step, int(line))
            self.scheduler.signal_step(step, 0)

    def _scontrol(self, arguments: Sequence[str], oneliner: bool) -> CommandAnswer:
        match [argument.lower() if place < 2 else argument for place, argument in enumerate(arguments)]:
            case ["ping"]:
                return CommandAnswer("Slurmctld(primary) at rehearsal is UP\n")
            case ["show", "config"]:
                waits = f"{self.scheduler.timing.kill_wait_s:g} sec"
                return CommandAnswer(f"ClusterName             = {CLUSTER}\nKillWait                = {waits}\n")
            case ["show", "hostnames", hosts]:
                return CommandAnswer("".join(f"{host}\n" for host in expand_hosts(hosts)))
            case ["show", "job", job_id]:
                job = self.scheduler.find(job_id)
                if job is None:
                    return CommandAnswer(err="slurm_load_jobs error: Invalid job id specified\n", code=1)
                return CommandAnswer(show_job(job, oneliner))
            case ["update", *_]:
                return self._update(arguments[1:])
            case ["requeue", job_id]:
                job = self.scheduler.find(job_id)
                try:
                    then = self.scheduler.requeue(job) if job is not None else None
                except RequestFault as fault:
                    return CommandAnswer(err=f"{fault}\n", code=1)
                return CommandAnswer(then=then) if job is not None else _no_such(job_id)
        raise not_rehearsed(f"'scontrol {' '.join(arguments)}'")

    def _update(self, arguments: Sequence[str]) -> CommandAnswer:
        """Answers `scontrol update JobId=7 StartTime=now+20 ExcNodeList=node1`."""
        settings = {key.lower(): value for key, _, value in (argument.partition("=") for argument in arguments)}
        job_id = settings.pop("jobid", "")
        if unknown := settings.keys() - {"starttime", "excnodelist"}:
            raise not_rehearsed(f"'scontrol update {unknown.pop()}='")
        job = self.scheduler.find(job_id)
        if job is None:
            return _no_such(job_id)
        if "starttime" in settings:
            job.eligible = read_time(settings["starttime"], time.time())
        job.exclude = settings.get("excnodelist", job.exclude)
        return CommandAnswer()

    def _squeue(self, options: Mapping[str, str]) -> CommandAnswer:
        """Answers squeue. All jobs are the user's, and none is an array, so --user and --array change nothing."""
        form = options.get("format", "")
        if unknown := set(re.findall("%[^%]*?[a-zA-Z]", form)) - {"%i", "%T", "%r"}:
            raise not_rehearsed(f"'squeue -o {unknown.pop()}'")
        if not form or "noheader" not in options:
            raise not_rehearsed("squeue without --noheader and --format")
        wanted = options["jobs"].split(",") if "jobs" in options else None
        states = options.get("states", f"{PENDING},{RUNNING},{COMPLETING}").upper().split(",")
        lines = [
            form.replace("%i", str(job.id)).replace("%T", job.state).replace("%r", job.reason) + "\n"
            for job in self.scheduler.jobs.values()
            if (wanted is None or str(job.id) in wanted) and (job.state in states or states == ["ALL"])
        ]
        return CommandAnswer("".join(lines))

    def _scancel(self, options: Mapping[str, str], arguments: Sequence[str]) -> CommandAnswer:
        """Answers scancel. A job that does not exist or is over is ignored without a message."""
        if not arguments:
            raise not_rehearsed("scancel without a job id")
        for job in filter(None, map(self.scheduler.find, arguments)):
            if job.state != options.get("state", job.state).upper():
                continue
            if "signal" in options:
                self.scheduler.signal_ranks(job, options["signal"])
            else:
                self.scheduler.cancel(job)
        return CommandAnswer()

    def _sacct(self, options: Mapping[str, str]) -> CommandAnswer:
        """Answers sacct: a line for each start of a job with --duplicates, else for its last one."""
        fields = options.get("format", "").lower().split(",")
        if set(fields) - {"jobid", "state"} or not {"noheader", "parsable2", "jobs"} <= options.keys():
            raise not_rehearsed("sacct but with -n -P -j and -o JobID,State")
        lines = []
        for job in filter(None, map(self.scheduler.find, options["jobs"].split(","))):
            states = [f"CANCELLED by {os.getuid()}" if state == "CANCELLED" else state for state in job.accounted]
            if not job.is_over:
                states.append(RUNNING if job.state == COMPLETING else job.state)
            for state in states if "duplicates" in options else states[-1:]:
                lines.append("|".join({"jobid": str(job.id), "state": state}[name] for name in fields) + "\n")
        return CommandAnswer("".join(lines))


def _no_such(job_id: str) -> CommandAnswer:
    return CommandAnswer(err=f"Invalid job id specified for job {job_id}\n", code=1)


def show_job(job: RehearsedJob, oneliner: bool) -> str:
    """The output of `scontrol show job` for one job, as far as scripts ask for it."""
    ends = job.ended if job.is_over or (job.state == COMPLETING and not job.again) else job.ends_at
    fields = {
        "JobId": job.id,
        "JobName": job.request.name,
        "JobState": job.state,
        "Reason": job.reason,
        "Requeue": int(job.request.requeue),
        "Restarts": job.restarts,
        "ExitCode": f"{job.exit[0]}:{job.exit[1]}",
        "StartTime": _stamp(job.eligible if job.reason == "BeginTime" else job.started),
        "EndTime": _stamp(ends),
        "PreemptTime": _stamp(job.preempted, "None"),
        "ExcNodeList": job.exclude or "(null)",
        "NodeList": ",".join(job.nodes),
        "NumNodes": len(job.nodes) or job.request.nodes,
        "WorkDir": job.work_folder,
        "StdOut": job.output,
    }
    lines = [f"{key}={value}" for key, value in fields.items()]
    return " ".join(lines) + " \n" if oneliner else "\n   ".join(lines) + "\n\n"


def _stamp(moment: float | None, unknown: str = "Unknown") -> str:
    if moment is None or moment == math.inf:
        return unknown
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(int(moment)))


def _program(*arguments: str) -> list[str]:
    return [sys.executable, "-I", "-S", processes.__file__, *arguments]


def _line(connection: socket.socket) -> bytes:
    """The next line. ValueError if the connection ends before."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise ValueError("cut off")
        text += piece
    return text
