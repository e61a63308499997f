"""Engine command: starts and supervises the program of `[command]`, once per GPU, node or job."""

import contextlib
import functools
import json
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

from hpc_gpt.core.checkpoints.disk_space import free_space_text
from hpc_gpt.core.checkpoints.find_checkpoints import checkpoint_note, newest_checkpoint
from hpc_gpt.core.ends.end_policy import End, is_cancelled
from hpc_gpt.core.ends.exit_status import exit_code_text
from hpc_gpt.core.ends.failures import UNSPECIFIC
from hpc_gpt.core.ends.program_end import PrintedEnd, facts_of, read_said
from hpc_gpt.core.errors import ConfigError, RunFolderError
from hpc_gpt.core.files import json_in, write_once
from hpc_gpt.core.format import and_more
from hpc_gpt.core.process import die_with_parent, send
from hpc_gpt.core.runs.full_disk import reserve
from hpc_gpt.core.runs.provenance import complete_run
from hpc_gpt.core.runs.run_folder import WORK, Attempt, RunFolder, work_folder
from hpc_gpt.core.runs.work_archive import WORK_ARCHIVE, changed_since, link_work, take_work, unpack_work
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.settings.experiment import limit_s
from hpc_gpt.core.settings.program_text import fill, fill_line
from hpc_gpt.core.settings.sized import params
from hpc_gpt.core.slurm.environment import is_on_one_node, without_our_code
from hpc_gpt.reader.failures.live_lines import LiveLines
from hpc_gpt.trainer.program.process import ForeignLog, LastLines, said_by
from hpc_gpt.trainer.program.rank import ForeignRank, ProgramStart, Stop
from hpc_gpt.trainer.program.signs_of_life import ForeignHeartbeat, checkpoint_files
from hpc_gpt.trainer.supervision.signals import Signals
from hpc_gpt.trainer.supervision.stacks import stack_of

# Seconds that a program has to save and end, if no signal is sent ahead of the job's time limit.
_LEAD_S = 120
_BEGUN = "begun.json"  # the folder and checkpoint that the first task prepares for all tasks
# Exit codes of bash for a command that does not exist (127) or cannot be executed (126).
_NOT_RUN = (126, 127)
_NOT_FOUND = re.compile(
    r"^(?:\S*bash|program): (?:line \d+: )?"
    r"(.*(?:not found|No such file or directory|Permission denied|cannot execute.*))$"
)
_REACHES_S = 2.0
# Variables of our own rank, which are wrong for another program.
_OF_A_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
# Finds `module` as templates/base.sh.j2 does: a shell that is not a login shell lacks it.
_MODULES = """\
if ! type module >/dev/null 2>&1; then
  for init in "${MODULESHOME:-}/init/bash" "${LMOD_PKG:-}/init/bash" /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
    if [ -r "$init" ]; then . "$init" && break; fi
  done
fi"""


class CommandRank(ForeignRank):
    """One task's part in an attempt."""

    def __init__(self, run: RunFolder, attempt: Attempt, signals: Signals) -> None:
        super().__init__(run, attempt, signals)
        self._command = self._resolved.program
        first = self._command.run if isinstance(self._command.run, str) else self._command.run[0]
        self._name = hide_secrets(first.strip().splitlines()[0])[:80]
        self._lines, self._last = LiveLines(self._command.pattern), LastLines(self._name)
        self._signal = (
            None if self._command.stop_signal == "none" else signal.Signals[f"SIG{self._command.stop_signal}"]
        )
        self._lead_s = self._resolved.job.signal_lead_s or _LEAD_S
        self._said: PrintedEnd | None = None
        self._asked_at = 0.0
        self._killed = False
        self._witness: subprocess.Popen[bytes] | None = None

    # --- the start

    def prepare(self) -> ProgramStart:
        command, attempt = self._command, self._attempt
        folder, checkpoint, resumed = self._begin()
        argv = self._argv(checkpoint)
        if not isinstance(command.run, str) and not command.setup:
            program = folder / argv[0] if "/" in argv[0] else argv[0]
            if shutil.which(program) is None:
                raise ConfigError(f"no program {argv[0]} on {platform.node()}", "give its path, or set command.setup")
        # Slurm sends the signal ahead of the time limit to every process of a step; the program gets its own.
        ignored = "" if command.stop_signal == "USR2" else 'trap "" USR2\n'
        setup = "\n".join(command.setup)
        if re.search(r"\bmodule\b", f"{setup}\n{argv[0] if isinstance(command.run, str) else ''}"):
            setup = f"{_MODULES}\n{setup}"
        body = argv[0] if isinstance(command.run, str) else 'exec "$@"'
        text = f"{ignored}{setup}\n{body}" if setup else f"{ignored}{body}"
        line = ["bash", "-c", text, "program", *(() if isinstance(command.run, str) else argv)]
        lines, train = self._lines, self._resolved.train
        loss, planned = lambda: lines.loss, lambda: lines.planned
        log = ForeignLog(
            attempt,
            self._resolved,
            self._place.rank,
            lines.take,
            self._last.add,
            loss=loss,
            planned=planned,
            last_bar=lines.last_bar,
            interleaved=lambda: lines.is_interleaved,
        )
        files = functools.partial(checkpoint_files, self._run, command) if self._place.rank == 0 else dict
        heart = ForeignHeartbeat(train.hang_multiple, train.hang_floor_s, command.hang_s, files, is_on_one_node())
        attempt.folder.joinpath(ForeignLog.TRAINS).touch()
        environment = self._environment()
        if command.checkpoints is not None:
            environment["HPC_GPT_RESUME_FROM"] = str(checkpoint or "")
            environment["HPC_GPT_RESUME_STEP"] = str(resumed) if checkpoint else ""
        return ProgramStart(line, environment, log, heart, resumed, str(folder))

    def _argv(self, checkpoint: Path | None) -> list[str]:
        """The command with its braces filled in, and its arguments to resume: one line for bash, or a list."""
        resolved, command = self._resolved, self._command
        values = {
            "gpus": str(resolved.gpus),
            "nodes": str(resolved.nodes),
            "tp": str(resolved.layout.tp),
            "run": str(self._run.path),
            "attempt": str(self._attempt.number),
            "checkpoint": str(checkpoint or ""),
        }
        resume = command.resume if checkpoint is not None and command.resume else ""
        if isinstance(command.run, str):
            line = fill_line(command.run, values)
            return [f"{line.rstrip()} {fill_line(resume, values)}" if resume else line]
        return [fill(word, values) for word in (*command.run, *shlex.split(resume))]

    def _begin(self) -> tuple[Path, Path | None, int]:
        """Returns (folder, checkpoint, its step), which the first task determines for all tasks."""
        path = self._attempt.folder / _BEGUN
        if self._place.rank == 0:
            folder = self._ready_folder()
            self._run.checkpoints.mkdir(exist_ok=True)
            checkpoint, step = newest_checkpoint(self._run, self._command)
            complete_run(self._run.path, self._resolved)
            reserve(self._attempt)
            self._report_start(checkpoint, step)
            start = {"folder": str(folder), "checkpoint": checkpoint and str(checkpoint), "step": step or 0}
            write_once(path, json.dumps(start) + "\n")
        self.await_file(path, RunFolderError(f"the first task has not written {path}", "did it fail?"))
        begun = json_in(path)
        return Path(begun["folder"]), Path(begun["checkpoint"]) if begun["checkpoint"] else None, int(begun["step"])

    def _ready_folder(self) -> Path:
        """The folder that the program runs in, with the submitted files. Raises UserError."""
        run, command = self._run, self._command
        folder = work_folder(run, command)
        if not command.snapshot:
            if not folder.is_dir():
                raise ConfigError(
                    f"no folder {folder} on {platform.node()}", "command.workdir must name a folder that every node has"
                )
            return folder
        if not (run.path / WORK_ARCHIVE).exists() and not folder.is_dir():  # plain sbatch
            take_work(command.workdir).place(run.path)
        unpack_work(run.path)
        link_work(run.path, Path(command.workdir), command.link)
        with contextlib.suppress(OSError, EOFError):
            if changed := changed_since(run.path):
                others = and_more(len(changed), 5)
                print(f"note: changed since the submission, in {WORK}/: {', '.join(changed[:5])}{others}", flush=True)
        return folder

    def _environment(self) -> dict[str, str]:
        resolved = self._resolved
        environment = {
            name: value
            for name, value in without_our_code(os.environ, self._run.path).items()
            if name not in _OF_A_RANK and not name.startswith("SUBMITIT_")
        }
        environment |= {
            "HPC_GPT_RUN": str(self._run.path),
            "HPC_GPT_ATTEMPT": str(self._attempt.number),
            "HPC_GPT_CHECKPOINTS": str(self._run.checkpoints),
            "HPC_GPT_WORKDIR": self._command.workdir,
            "NNODES": str(resolved.nodes),
            "GPUS_PER_NODE": str(resolved.ranks_per_node),
        }
        if self._command.per == "gpu":
            environment |= {**self._place.variables, "LOCAL_WORLD_SIZE": str(resolved.tasks_per_node)}
        else:
            environment["NODE_RANK"] = str(self._place.rank)
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        return environment | self.rendezvous()

    def _report_start(self, checkpoint: Path | None, step: int | None) -> None:
        resolved = self._resolved
        facts = {"resumed_from": checkpoint and str(checkpoint), "params": params(resolved)}
        device = self.report_start(step, facts)
        per = {"gpu": "a GPU", "node": "a node", "job": "a job"}[self._command.per]
        devices = f" on {resolved.gpus} x {device}" if device else ""
        print(f"{resolved.name}: once {per}{devices}: {self._name}", flush=True)
        if checkpoint is not None:
            print(f"resumes from {checkpoint}", flush=True)
        if note := checkpoint_note(self._run):
            print(f"note: {note}", flush=True)

    # --- its end

    def reason(self) -> str | None:
        reason = super().reason()
        if reason == "walltime" and self._signal is None:
            return None  # no signal tells the program: the time limit itself ends it
        if reason == "terminated" and "walltime" in self._signals.raised and not is_cancelled(self._run, self._attempt):
            return "walltime"
        return reason

    def turn(self) -> None:
        """Starts the witness of Slurm's signals."""
        if self._witness is None and self._resolved.cluster.scheduler == "slurm" and self._signal is not None:
            self._witness = subprocess.Popen(
                ["sleep", "infinity"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                process_group=0,
                preexec_fn=die_with_parent,
            )

    def _slurm_tells_all(self) -> bool:
        """Whether Slurm's signal has reached a process outside this process's group, as the program is.

        With proctrack/linuxproc it does; with proctrack/pgid and, by default, proctrack/cgroup it does not.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._witness is None or self._witness.wait(_REACHES_S) < 0
        return False

    def ask_to_end(self, stop: Stop) -> None:
        self._asked_at = time.monotonic()
        if self._signal is None:
            # A SIGTERM of the scheduler has reached the program already; for any other request it is killed here.
            if stop.reason != "terminated":
                self._kill()
            return
        by_slurm = self._resolved.cluster.scheduler == "slurm" and (stop.reason, self._signal) in (
            ("terminated", signal.SIGTERM),
            ("walltime", signal.SIGUSR2),
        )
        if not (by_slurm and self._slurm_tells_all()):  # a second signal may end a program that saves
            for pid, started in self._tree.look(at_once=True).seen.items():
                send(pid, started, self._signal)

    def kill_if_late(self) -> None:
        """Kills a program that has not ended within the lead."""
        if time.monotonic() > self._asked_at + self._lead_s and not self._killed:
            self._killed = True
            self._kill()

    def _kill(self) -> None:
        for pid, started in self._tree.look(at_once=True).seen.items():
            send(pid, started, signal.SIGKILL)

    def rest_is_over(self) -> bool:
        """Whether the program's processes have ended: a signal may end the shell at once while the program still
        saves."""
        return not self._tree.is_alive()

    def quit(self) -> None:
        if self._process is not None:
            self._kill()
        super().quit()

    def said(self) -> PrintedEnd:
        self._said = self._said or said_by(self._lines)  # up to the program's end
        return self._said

    def failure(self, code: int) -> tuple[str, str, bool]:
        ended, cause, lost_peer = self._failure(code)
        return ended, f"{cause} ({free_space_text(self._run.path)})" if ended == "disk_full" else cause, lost_peer

    def _failure(self, code: int) -> tuple[str, str, bool]:
        if code in _NOT_RUN and (match := self._last.find(_NOT_FOUND)):
            return "user_error", f"{match[1]} on {platform.node()}", False
        shown = self._lines.failure
        # Before its table torchrun prints that it ends the other workers.
        vague = shown is None or shown.echo or shown.ended in (*UNSPECIFIC, "cancelled")
        if vague and (worker := self._last.killed_worker()) is not None:
            return "error", str(worker), False
        if shown is not None:
            return shown.ended, shown.message, shown.echo
        ended, cause, lost_peer = self._last.failure(code)
        return ended, self._last.end(code) if code < 0 else cause, lost_peer

    def end_of_all(self) -> End:
        """The end by the steps of all tasks: exit code 0 does not prove that the program has finished."""
        facts = facts_of(self._attempt, 0, self._resolved.train.steps, read_said(self._attempt))
        return self.end_by(replace(facts, near_limit=self._near_limit()))

    def _near_limit(self) -> str:
        """A text if the job's time limit is near, so the program may have ended because of it; else empty."""
        began = self._attempt.started().get("started")
        most_s = limit_s(self._resolved.job.time)
        is_near = bool(began and most_s) and time.time() - float(began or 0) > (most_s or 0) - self._lead_s
        return "the time limit is near" if is_near or "walltime" in self._signals.raised else ""

    def unsaved(self, stop: Stop, code: int) -> str:
        if self._killed and self._signal is not None:
            return f"the program was killed: {self._signal.name} had not ended it after {self._lead_s} s"
        if self._signal is None and stop.reason != "terminated":
            return "the program was killed: command.stop_signal is none, so nothing tells it to end"
        if code and self._signal is not None and code not in (-self._signal, 128 + self._signal):
            return f"the program ended with {exit_code_text(code)}"
        return ""

    def stacks(self, process: subprocess.Popen[bytes], log: ForeignLog) -> str:
        text = "\n".join(map(stack_of, sorted(self._tree.look(at_once=True).seen)))
        self._kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        log.finish()
        return text


RANK = CommandRank
