"""The stand-ins: a folder of commands in the place of Slurm's, and the socket behind which the scheduler answers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import struct
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpc_gpt.rehearsal import answers, command
from hpc_gpt.rehearsal.answers import Said
from hpc_gpt.rehearsal.job import Step
from hpc_gpt.rehearsal.options import OptionFault, parse_options
from hpc_gpt.rehearsal.request import RequestFault, read_request
from hpc_gpt.rehearsal.scheduler import Scheduler
from hpc_gpt.rehearsal.steps import StepStart

COMMANDS = ("sbatch", "srun", "scontrol", "squeue", "scancel", "sacct")
_WRAPPED = "#!/bin/sh\n# This script was created by sbatch --wrap.\n\n"


class StandIns:
    """Writes the commands into `folder`/bin and answers them until `close`."""

    def __init__(self, folder: Path, scheduler: Scheduler) -> None:
        self.commands = folder / "bin"
        self.commands.mkdir()
        for name in COMMANDS:
            line = [sys.executable, "-I", "-S", command.__file__, str(folder), name]
            path = self.commands / name
            path.write_text(f'#!/bin/sh\nexec {shlex.join(line)} "$@"\n')
            path.chmod(0o700)
        self._scheduler = scheduler
        self._server = socket.socket(socket.AF_UNIX)
        # By way of a descriptor: a socket's own path may have 107 bytes.
        place = os.open(folder, os.O_PATH)
        self._server.bind(f"/proc/self/fd/{place}/socket")
        os.close(place)
        self._server.listen(64)
        threading.Thread(target=self._accept, name="stand-ins", daemon=True).start()

    def close(self) -> None:
        """No stand-in is answered any more."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

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
                _, files, _, _ = socket.recv_fds(connection, 1, 3)
                asked = json.loads(_line(connection))
                try:
                    said = self._answer(asked, files, connection)
                except Exception as fault:  # a command that is not answered would wait for ever
                    said = Said(err=f"{asked['name']}: error: a fault of the rehearsal: {fault!r}\n", code=1)
                answer = {"out": said.out, "err": said.err, "code": said.code}
                connection.sendall(json.dumps(answer).encode())
                connection.shutdown(socket.SHUT_WR)
            finally:
                for file in files:
                    os.close(file)

    def _answer(self, asked: Mapping[str, Any], files: Sequence[int], connection: socket.socket) -> Said:
        name, words = str(asked["name"]), list(asked["words"])
        try:
            if name == "sbatch":
                return self._sbatch(words, asked, files[0])
            if name == "srun":
                return self._srun(words, asked, files, connection)
        except OptionFault as fault:
            return Said(err=f'{name}: {fault}\nTry "{name} --help" for more information\n', code=255)
        except RequestFault as fault:
            return Said(err=f"{name}: error: {fault}\n", code=1)
        if name == "scontrol":
            return answers.scontrol(self._scheduler, words, _process_of(connection))
        answer = {
            "squeue": answers.squeue,
            "scancel": answers.scancel,
            "sacct": answers.sacct,
        }
        return answer[name](self._scheduler, words)

    def _sbatch(self, words: list[str], asked: Mapping[str, Any], stdin: int) -> Said:
        options, left = parse_options("sbatch", words)
        folder = Path(asked["folder"])
        if "wrap" in options:
            script, path, name = f"{_WRAPPED}{options['wrap']}\n", "(null)", "wrap"
        elif left:
            file = folder / left[0]
            if not file.is_file():
                raise RequestFault(f"Unable to open file {left[0]}")
            script, path, name = file.read_text(encoding="utf-8", errors="surrogateescape"), str(file), file.name
        else:
            with open(stdin, encoding="utf-8", errors="surrogateescape", closefd=False) as text:
                script, path, name = text.read(), "(null)", "sbatch"
        if not script.startswith("#!"):
            raise RequestFault(
                "This does not look like a batch script.  The first line must start with #! followed by the path to "
                "an interpreter."
            )
        request = read_request(script, options, name, time.time())
        if "test-only" in options:
            return Said(err=f"sbatch: Job 1 to start now using {request.nodes} nodes\n")
        jobs = self._scheduler.submit(request, script, path, left[1:], asked["environment"], str(folder))
        number = jobs[0].array[0] if jobs[0].array else jobs[0].id
        return Said(out=f"{number}\n" if "parsable" in options else f"Submitted batch job {number}\n")

    def _srun(
        self, words: list[str], asked: Mapping[str, Any], files: Sequence[int], connection: socket.socket
    ) -> Said:
        options, line = parse_options("srun", words)
        environment = dict(asked["environment"])
        found = self._scheduler.find(options.get("jobid") or environment.get("SLURM_JOB_ID", ""))
        if not found:
            raise RequestFault("Unable to allocate resources: a rehearsal's srun runs inside a job")
        if not line:
            return Said(err="srun: fatal: No command given to execute.\n", code=1)
        job = found[0]
        if len(found) > 1:  # an array's first element has the array's number
            job = next(each for each in found if str(each.id) == environment.get("SLURM_JOB_ID"))
        # SLURM_CPUS_PER_TASK is not read by srun since 22.05; SRUN_CPUS_PER_TASK is.
        if "SRUN_CPUS_PER_TASK" in environment:
            environment["SLURM_CPUS_PER_TASK"] = environment["SRUN_CPUS_PER_TASK"]
        start = StepStart(options, line, environment, asked["folder"], files[1], files[2])
        step = self._scheduler.open_step(job, start)
        threading.Thread(target=self._forward, args=(connection, step), daemon=True).start()
        step.ended.wait()
        return Said(code=step.code)

    def _forward(self, connection: socket.socket, step: Step) -> None:
        """Signals that srun was sent, to its ranks; an srun that is killed ends them."""
        with contextlib.suppress(OSError, ValueError), connection.makefile("rb") as lines:
            for line in lines:
                self._scheduler.signal_step(step, int(line))
            self._scheduler.end_step(step)


def _process_of(connection: socket.socket) -> int:
    """The pid at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", credentials)[0])


def _line(connection: socket.socket) -> bytes:
    """Up to the end of the line."""
    text = b""
    while not text.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        if not piece:
            raise ValueError("cut off")
        text += piece
    return text
