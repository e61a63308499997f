"""What a foreign program prints: passed on to the attempt's log, its iteration lines turned into metrics.jsonl, its
last words kept for the case that it fails."""

from __future__ import annotations

import collections
import json
import re
import subprocess
import sys
import threading
import time

from hpc_gpt.megatron_line import IterationLine, read_iteration
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.small_files import append_line
from hpc_gpt.train.failure import classify, is_lost_peer

_KEPT_LINES = 200
_BEGINS = "before the start of training step"
_ERROR = re.compile(r"^(?:\d+: ?)?(?:\[\w+\]:? ?)?(?:\w+\.)*(\w*(?:Error|Exception|Interrupt))(?:: ?(.*))?$")
_USAGE = re.compile(r"^\S+\.py: error: (.*)")
_FULL = re.compile(r"No space left on device|Disk quota exceeded")
_NAN = re.compile(r"found nan|Unexpected result (nan|inf)", re.IGNORECASE)


class ForeignLog:
    """The output of one rank's program. The rank whose program prints the iterations, the last in Megatron-LM, writes
    the metrics; a line of them stands for all iterations since the one before, with their mean time and loss."""

    TRAINS = "trains"  # a mark in the attempt's folder: the program has begun to train

    def __init__(self, attempt: Attempt, resolved: Resolved, resumed: int) -> None:
        self._attempt = attempt
        self._sample_tokens = resolved.model.seq
        self._global_batch = resolved.batch.global_batch
        self._log_every = resolved.train.log_every
        self._last = resumed
        self._kept: collections.deque[str] = collections.deque(maxlen=_KEPT_LINES)
        self._thread: threading.Thread | None = None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        """Reads in a thread of its own, so that the program never waits for this one."""
        self._thread = threading.Thread(target=self._read, args=(process,), name="output", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Waits for the last line: a process that the program left behind may hold the pipe, and is not waited for."""
        assert self._thread is not None
        self._thread.join(timeout=5)

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for raw in process.stdout:
            sys.stdout.buffer.write(raw)
            sys.stdout.buffer.flush()
            self.take(raw.decode(errors="replace").rstrip("\n"))

    def take(self, line: str) -> None:
        """One line of the program's."""
        self._kept.append(line)
        if _BEGINS in line:
            (self._attempt.folder / self.TRAINS).touch()
        found = read_iteration(line)
        # Beside every log_every-th iteration Megatron tells of an attempt's first one, and counts it again later.
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
        """What the program's own faulthandler wrote last; empty where it did not."""
        kept = list(self._kept)
        begins = [number for number, line in enumerate(kept) if line.startswith("Fatal Python error")]
        return "\n".join(kept[begins[-1] :]) + "\n" if begins else ""

    def failure(self, code: int) -> tuple[str, str, bool]:
        """(class of the end, the cause in words, whether it was another rank that failed) of an exit code."""
        for line in reversed(self._kept):
            if usage := _USAGE.match(line):
                return "user_error", usage[1], False
            if error := _ERROR.match(line):
                name, words = error[1], (error[2] or "").strip()
                cause = f"{name}: {words}" if words else name
                if _FULL.search(line):
                    return "disk_full", cause, False
                if _NAN.search(line):
                    return "nan", cause, False
                # What the words mean is settled for exceptions; of a foreign program there is the name alone.
                fault = type(name, (RuntimeError,), {})(words)
                return classify(fault)[0], cause, is_lost_peer(fault)
        return "error", f"pretrain_gpt.py ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}", True
