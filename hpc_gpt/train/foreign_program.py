"""Follows the foreign program of one rank: its output, and whether it hangs. Needs no torch.

The output is copied to the attempt's log, its iteration lines become metrics.jsonl, and its last lines are kept in case
it fails. The watchdog counts the steps that the log reports.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from hpc_gpt.engines.megatron_lm import IterationLine, read_iteration
from hpc_gpt.errors import RunFolderError
from hpc_gpt.files import append_line, write_once
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.ending import classify, is_lost_peer
from hpc_gpt.train.heartbeat import LEAVING, SAVING, Heartbeat
from hpc_gpt.train.watchdog import Watchdog

_KEPT_LINES = 200
_BEGINS = "before the start of training step"
_ERROR = re.compile(r"^(?:\d+: ?)?(?:\[\w+\]:? ?)?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?:: ?(.*))?$")
_USAGE = re.compile(r"^\S+\.py: error: (.*)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_NAN = re.compile(r"found nan|Unexpected result (nan|inf)", re.IGNORECASE)
_LOOK_S = 1.0
_ABORT_S = 3.0


class ForeignLog:
    """The output of one rank's program.

    The rank whose program prints the iterations, the last one in Megatron-LM, writes the metrics. A line is of all
    iterations since the line before, with their mean time and loss.
    """

    TRAINS = "trains"  # a file in the attempt's folder: the program has begun to train

    def __init__(self, attempt: Attempt, resolved: Resolved, resumed: int) -> None:
        self._attempt = attempt
        self._sample_tokens = resolved.model.seq
        self._global_batch = resolved.batch.global_batch
        self._log_every = resolved.train.log_every
        self._last = resumed
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Reads the output on a thread, so that the program never waits for this process."""
        self._thread = threading.Thread(target=self._read, args=(process,), name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the last line, but not for a process that the program left and that holds the pipe open."""
        assert self._thread is not None
        self._thread.join(timeout=5)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
            self.take(raw.decode(errors="replace").rstrip("\n"))

    def take(self, line: str) -> None:
        """Takes one line of the program."""
        self._kept.append(line)
        if _BEGINS in line:
            (self._attempt.folder / self.TRAINS).touch()
        found = read_iteration(line)
        # Megatron also logs an attempt's first iteration, and counts it again in the next line.
        if found is not None and found.iteration > self._last and found.iteration % self._log_every == 0:
            append_line(self._attempt.metrics, json.dumps(self._metrics(found)))
            self._last = found.iteration

    def _metrics(self, found: IterationLine) -> dict[str, object]:
        count = found.iteration - self._last
        batch = found.global_batch or self._global_batch
        tokens = batch * self._sample_tokens
        return {
            "step": found.iteration,
            "loss": found.loss,
            "loss_eval": None,
            "grad_norm": found.grad_norm,
            "lr": found.lr,
            "step_s": round(found.step_s, 6),
            "tokens_per_s": round(tokens / found.step_s, 1) if found.step_s else None,
            "tokens": count * tokens,
            "skipped": bool(found.skipped) if count == 1 else found.skipped,
            "memory_allocated_gib": None,
            "memory_reserved_gib": None,
            "save_s": None,
            "time": round(time.time(), 3),
        }

    def stacks(self) -> str:
        """What the program's own faulthandler wrote last; empty if it wrote nothing."""
        kept = list(self._kept)
        begins = [number for number, line in enumerate(kept) if line.startswith("Fatal Python error")]
        return "\n".join(kept[begins[-1] :]) + "\n" if begins else ""

    def failure(self, code: int) -> tuple[str, str, bool]:
        """(class of the end, cause, whether another rank failed) for the program's exit code."""
        for line in reversed(self._kept):
            if usage := _USAGE.match(line):
                return "user_error", usage[1], False
            if error := _ERROR.match(line):
                name, text = error[1], (error[2] or "").strip()
                cause = f"{name}: {text}" if text else name
                if _FULL.search(line):
                    return "disk_full", cause, False
                if _NAN.search(line):
                    return "nan", cause, False
                # `classify` takes an exception; a foreign program leaves only its name and text.
                fault = type(name, (RuntimeError,), {})(text)
                return classify(fault)[0], cause, is_lost_peer(fault)
        return "error", f"pretrain_gpt.py ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}", True


class ForeignWatch:
    """The watchdog of a rank whose steps are made by another process, which writes its stacks when it is aborted."""

    def __init__(self, attempt: Attempt, resolved: Resolved, process: subprocess.Popen[bytes], log: ForeignLog) -> None:
        self._attempt = attempt
        self._train = resolved.train
        self._process = process
        self._log = log
        self._heart = Heartbeat(resolved.train.hang_multiple, resolved.train.hang_floor_s)
        self._looked = 0.0
        self._rank = 0
        self._hangs = False

    def start(self, rank: int, size: int, resumed: int) -> None:
        self._rank, self._heart.step = rank, resumed
        Watchdog(self._attempt, rank, size, self._heart, self._leave, self._find_wait).start()

    def look(self) -> None:
        """Reads the last step in metrics.jsonl, at most once a second."""
        now = time.monotonic()
        if self._heart.phase == LEAVING or now < self._looked + _LOOK_S:
            return
        self._looked = now
        step, before = int(self._attempt.last_metrics().get("step") or 0), self._heart.step
        if step <= before:
            return
        self._heart.stepped(step, step - before)
        # Evaluations and saves have no line of their own, and come before the next line.
        until = step + self._train.log_every
        if any(every and until // every * every >= step for every in (self._train.eval_every, self._train.save_every)):
            self._heart.enter(SAVING)

    def leaving(self) -> None:
        """To be called when the program is asked to end, or has ended."""
        if self._heart.phase != LEAVING:
            self._heart.enter(LEAVING)
        if self._hangs:  # the watchdog's thread ends this process
            threading.Event().wait()

    def _find_wait(self) -> tuple[str, str]:
        """(collective, place) of the program, as far as they can be seen from outside."""
        try:
            state = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (OSError, IndexError):
            state = "?"
        if state in "tT":
            return "", "a process that is stopped"
        return "its program", f"process {self._process.pid}"

    def _leave(self, message: str) -> None:
        """Lets the program write its stacks, and ends both processes. Runs on the watchdog's thread."""
        self._hangs = True
        print(message, flush=True)
        self._process.send_signal(signal.SIGABRT)
        until = time.monotonic() + _ABORT_S
        while self._process.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        self._process.kill()
        self._log.finish()
        if stacks := self._log.stacks():
            with contextlib.suppress(RunFolderError):
                write_once(self._attempt.stacks / f"{self._rank}.txt", stacks)
        os._exit(1)
