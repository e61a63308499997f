"""Engine megatron-lm: starts and supervises one rank of pretrain_gpt.py from a checkout of Megatron-LM.

Megatron-LM itself handles SIGTERM (it saves, and its ranks leave together), its checkpoints and its log. This module
does the rest: the data, the rendezvous, the signals of a job, metrics.jsonl from the log's lines, and ended.json.
Nothing here needs torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from hpc_gpt.engines.base.megatron_checkout import PROGRAM, check_is_checkout, check_options, checkout_of
from hpc_gpt.engines.megatron_lm import megatron_arguments, names_of
from hpc_gpt.errors import ConfigError, DataError, LayoutError, RunFolderError
from hpc_gpt.files import read_json, write_once
from hpc_gpt.runs.end_policy import SIGNALS, End, end_for, first_reason, limits_reached
from hpc_gpt.runs.provenance import complete_run, git_state, list_gpus
from hpc_gpt.runs.run_folder import Attempt, RunFolder
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.tokens.run_data import data_path, ensure_data, located
from hpc_gpt.train.ending import end_of_sigterm, write_end
from hpc_gpt.train.foreign_program import ForeignLog, ForeignWatch
from hpc_gpt.train.signals import Inbox, Signals

# The newest checkpoint's iteration, which Megatron writes last.
TRACKER = "latest_checkpointed_iteration.txt"
# Written by the rank that is asked to stop, and read by all.
_STOP = "stop.json"
_WAIT_S = 900
_TURN_S = 0.1
_LOOK_S = 1.0
_GRACE_S = 5.0
_ENDED_S = 10.0


@dataclass(frozen=True)
class _Place:
    """`rank` of `size` ranks, and its number on its node, from job.sh."""

    rank: int
    size: int
    local_rank: int


@dataclass(frozen=True)
class _Stop:
    """A stop that all ranks follow: its `reason`, and whether there is anything to save."""

    reason: str
    save: bool


class MegatronRank:
    """One rank's part in an attempt."""

    def __init__(self, run: RunFolder, attempt: Attempt, signals: Signals) -> None:
        self._run = run
        self._attempt = attempt
        self._signals = signals
        self._resolved = run.resolved()
        self._place = _identify(os.environ, self._resolved)
        self._saved = run.checkpoints / "megatron"
        self._process: subprocess.Popen[bytes] | None = None
        self._stop: _Stop | None = None
        self._looked = 0.0
        self._inbox = Inbox(attempt)

    @property
    def step(self) -> int:
        """The last iteration in the log or in a checkpoint."""
        return max(int(self._attempt.last_metrics().get("step") or 0), saved_iteration(self._saved))

    def train(self) -> int:
        """Runs pretrain_gpt.py to its end, and returns the exit code. The caller reports exceptions."""
        resolved, is_first = self._resolved, self._place.rank == 0
        checkout = checkout_of(resolved, os.environ)
        prefix = self._await_data()
        arguments = megatron_arguments(resolved, str(self._saved), prefix)
        check_is_checkout(checkout)
        resumed = saved_iteration(self._saved)
        if is_first:
            check_options(checkout, names_of(arguments))
            complete_run(self._run.path, resolved)
            self._report_start(checkout, resumed)
        log = ForeignLog(self._attempt, resolved, resumed)
        environment = self._environment(checkout)
        # Slurm sends signals to every process of a step. This process handles those that would end Megatron: all but
        # SIGTERM, after which it saves.
        names = " ".join(number.name for number in SIGNALS if number != signal.SIGTERM)
        ignoring = ["bash", "-c", f'trap "" {names}; exec "$@"', "rank"]
        self._process = subprocess.Popen(
            [*ignoring, sys.executable, str(checkout / PROGRAM), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        log.follow(self._process)
        watch = ForeignWatch(self._attempt, resolved, self._process, log)
        watch.start(self._place.rank, self._place.size, resumed)
        code = self._wait(log, watch)
        if code and not (self._stop is not None and _was_stopped(code, log)):
            return self._report_failure(code, log)
        end = self._end(code)
        if is_first:
            write_end(self._run, self._attempt, end, self.step)
        return 1 if end.ended == "error" else 0

    def quit(self) -> None:
        """Ends the program at once, without a save, and writes ended.json."""
        if self._process is not None:
            self._process.kill()
        self._attempt.write_ended("stopped", "Ctrl-C twice: left without saving", self.step)

    def _wait(self, log: ForeignLog, watch: ForeignWatch) -> int:
        """Waits for the program's exit code. Asks it to stop when this rank or another has been asked."""
        assert self._process is not None
        while (code := self._process.poll()) is None:
            if self._stop is None and (stop := self._asked()):
                self._stop = stop
                self._process.send_signal(signal.SIGTERM if stop.save else signal.SIGKILL)
                watch.leaving()
            watch.look()
            time.sleep(_TURN_S)
        watch.leaving()
        log.finish()
        # After a signal to another rank, all Megatron ranks may have left before this process reads stop.json.
        early = _was_stopped(code, log) if code else self.step < self._resolved.train.steps
        until = time.monotonic() + (_GRACE_S if early else 0)
        while self._stop is None and not self._attempt.ended():
            self._looked = 0.0
            self._stop = self._asked()
            if time.monotonic() >= until:
                break
            time.sleep(_TURN_S)
        return code

    def _asked(self) -> _Stop | None:
        """The stop that a rank has been asked for, if any. The first rank to write stop.json decides for all."""
        path = self._attempt.folder / _STOP
        if reason := self._reason():
            # Before the first iteration Megatron may not listen yet, and has nothing to save.
            save = self._attempt.metrics.exists() or (self._attempt.folder / ForeignLog.TRAINS).exists()
            write_once(path, json.dumps({"reason": reason, "save": save}) + "\n")
        elif time.monotonic() < self._looked + _LOOK_S:
            return None
        self._looked = time.monotonic()
        found = read_json(path)
        return _Stop(str(found["reason"]), bool(found["save"])) if found else None

    def _reason(self) -> str | None:
        asked = set(self._signals.raised)
        if self._place.rank == 0:
            asked |= self._inbox.look() | limits_reached(self._resolved, self._train_s)
        return first_reason(asked)

    def _train_s(self) -> float:
        """Seconds of training in all attempts together."""
        total = 0.0
        for attempt in self._run.attempts():
            with contextlib.suppress(FileNotFoundError):
                began = (attempt.folder / ForeignLog.TRAINS).stat().st_mtime
                total += max(0.0, float(attempt.ended().get("time") or time.time()) - began)
        return total

    def _end(self, code: int) -> End:
        """The end of an attempt that was asked to stop, or whose program ended with 0. Rank 0 writes its own."""
        if self._stop is None:
            step, steps = self.step, self._resolved.train.steps
            return End("done") if step >= steps else End("error", f"{PROGRAM} ended at iteration {step} of {steps}")
        end = end_for(self._stop.reason, self._resolved, self._end_of_sigterm)
        if not self._stop.save or (code and not self._has_saved()):
            how = "before its first iteration" if not self._stop.save else f"with exit code {code}"
            return End(end.ended, f"{end.cause}; {PROGRAM} ended {how}, unsaved")
        return end

    def _end_of_sigterm(self) -> End:
        """Rank 0 writes the end, so it alone asks Slurm."""
        if self._place.rank:
            return End("cancelled")
        return end_of_sigterm(self._run, self._attempt, self._signals)

    def _has_saved(self) -> bool:
        """Whether there is a checkpoint since stop.json was written.

        A rank may get its own signal while it already leaves, and python then dies of it at its very end.
        """
        try:
            return (self._saved / TRACKER).stat().st_mtime >= (self._attempt.folder / _STOP).stat().st_mtime
        except FileNotFoundError:
            return False

    def _report_failure(self, code: int, log: ForeignLog) -> int:
        """Writes how the program failed, by its last lines. A rank that only lost a peer first waits for that rank."""
        ended, cause, lost_peer = log.failure(code)
        until = time.monotonic() + _ENDED_S
        while lost_peer and not self._attempt.ended() and time.monotonic() < until:
            time.sleep(_TURN_S)
        self._attempt.write_ended(ended, f"rank {self._place.rank}: {cause}", self.step)
        return code if code > 0 else 1

    def _await_data(self) -> str | None:
        """The prefix of Megatron's data, which the first rank of each node makes if missing; None for mock data."""
        resolved = located(self._resolved, self._run.data_beside)
        path = data_path(resolved)
        if path is None:
            return None
        if self._place.local_rank == 0:
            path = ensure_data(resolved)
            assert path is not None
        until = time.monotonic() + _WAIT_S
        while not path.with_name(path.name + ".idx").exists():
            if self._attempt.ended() or time.monotonic() > until:
                raise DataError(f"{path}.idx was not made in {_WAIT_S} s", "did the node's first rank fail?")
            time.sleep(_TURN_S)
        return os.path.abspath(path)

    def _environment(self, checkout: Path) -> dict[str, str]:
        """This process's environment, with the variables that Megatron-LM and torch's env:// rendezvous read."""
        place = self._place
        known = {"RANK": place.rank, "WORLD_SIZE": place.size, "LOCAL_RANK": place.local_rank}
        environment = {**os.environ, **{name: str(number) for name, number in known.items()}}
        # After a hang SIGABRT ends it, and its faulthandler writes the stacks.
        environment.setdefault("PYTHONFAULTHANDLER", "1")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH")]))
        # Megatron requires it to overlap communication: kernels run in the order of their launch.
        environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if "MASTER_PORT" not in environment:
            host, port = self._meet()
            environment |= {"MASTER_ADDR": host, "MASTER_PORT": port}
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return environment

    def _meet(self) -> tuple[str, str]:
        """(host, port) on this machine. Rank 0 finds a free port and writes it to the attempt's `rendezvous` file."""
        import socket

        if self._place.rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                write_once(self._attempt.rendezvous, f"127.0.0.1 {free.getsockname()[1]}\n")
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until and not self._attempt.ended():
            try:
                host, port = self._attempt.rendezvous.read_text(encoding="utf-8").split()
            except FileNotFoundError:
                time.sleep(_TURN_S)
            else:
                return host, port
        raise RunFolderError(f"rank 0 has not written {self._attempt.rendezvous}", "did it fail?")

    def _report_start(self, checkout: Path, resumed: int) -> None:
        resolved = self._resolved
        gpus = list_gpus()
        # Without nvidia-smi only the profile knows the device of a cluster.
        name = gpus[0]["name"] if gpus else "cpu" if resolved.cluster.scheduler == "local" else None
        sha, dirty = git_state(checkout, PROGRAM)
        start = {
            "device": name,
            "host": platform.node(),
            "torch": _version("torch"),
            "params": resolved.model.params,
            "resumed_step": resumed,
            "megatron_lm": {"path": str(checkout), "git_sha": sha, "git_dirty": dirty},
        }
        write_once(self._attempt.folder / "trainer.json", json.dumps(start) + "\n")
        batch = resolved.batch.global_batch
        print(
            f"{resolved.name}: {resolved.layout} on {resolved.gpus} x {name or resolved.cluster.device}, Megatron-LM "
            f"in {checkout} ({(sha or 'no commit')[:12]}), global batch {batch} x {resolved.model.seq} tokens",
            flush=True,
        )
        if resumed:
            print(f"resumed after step {resumed} of {resolved.train.steps}", flush=True)


def saved_iteration(folder: Path) -> int:
    """The iteration of Megatron's newest checkpoint; 0 without one."""
    try:
        text = (folder / TRACKER).read_text(encoding="utf-8").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def _was_stopped(code: int, log: ForeignLog) -> bool:
    """Whether a failed program may have been stopped, or have lost ranks that were: it has no fault of its own."""
    return code in (-signal.SIGTERM, -signal.SIGKILL) or log.failure(code)[2]


def _identify(environment: Mapping[str, str], resolved: Resolved) -> _Place:
    values = [environment.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not all(value.isdigit() for value in values):
        raise ConfigError(
            "this process is not a rank of a run: RANK, WORLD_SIZE and LOCAL_RANK are not set",
            "start runs with hpc-gpt submit, or sbatch job.sh",
        )
    place = _Place(*map(int, values))
    if place.size != resolved.layout.gpus:
        raise LayoutError(
            f"{place.size} ranks were started, but layout {resolved.layout} has {resolved.layout.gpus}",
            "start one task for each GPU of the layout",
        )
    return place


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


RANK = MegatronRank
