"""A thread on every rank that writes its heartbeat, and ends the attempt as a hang if no rank makes a step.

It runs while the main thread is in a collective of gloo's or NCCL's, which hold no GIL. If the main thread holds the
GIL for ever, Python's own C-level watch writes the stacks to the rank's heartbeat file, and the others find the rank
silent.

When the limit of a phase is passed:

1. Every rank that can writes its threads' stacks, `stacks/<rank>.txt`, and the flight recorder's record.
2. The first rank that lives watches the heartbeats of all, until it knows which ones do not grow (`heartbeat.judge`).
   If a rank that lives may be at work, ranks watch again, more rarely in a large run (`heartbeat.next_watch_s`).
3. It writes `ended.json`, and every rank that lives leaves with 1, without asking rank 0, whose store may be gone. A
   rank that cannot leave is ended by srun's --kill-on-bad-exit, or by the controller of a local run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import IO

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.heartbeats import RankHeartbeat, read_c_dump, read_heartbeats, write_heartbeat
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.train.flight_recorder import read_records, write_record
from hpc_gpt.train.heartbeat import Heartbeat, Seen, Verdict, judge, next_watch_s

_TICK_S = 1.0
# Shortest and longest pause between two heartbeats of a rank that makes its steps.
_PERIOD_S = 1.0, 15.0


class Watchdog:
    """`leave` ends the process after a hang. `stands` is given if the rank is a foreign program: it returns what the
    program waits in, and where. The stacks of this process say nothing then, and are not written.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        size: int,
        heart: Heartbeat,
        leave: Callable[[str], None],
        stands: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self._attempt = attempt
        self._rank, self._size = rank, size
        self._heart = heart
        self._leave = leave

        self._foreign_stands = stands
        self._host = os.environ.get("SLURMD_NODENAME") or platform.node()
        self._over = threading.Event()
        self._period_s = min(max(heart.floor_s / 20, _PERIOD_S[0]), _PERIOD_S[1])
        # Two heartbeats are at most this far apart for any reader.
        self._silent_s = 2 * self._period_s + 3 * _TICK_S
        # All of these count seconds in which this process ran; it may be stopped, or its machine suspended.
        self._awake_s = self._moved_s = self._written_s = self._armed_s = 0.0
        self._moves = heart.moves
        self._count = 0
        self._dumped = False
        self._stands: tuple[str, str] = "", ""
        self._since_s: float | None = None
        # Watches without a verdict since the last move.
        self._watches = 0
        # Each rank's last heartbeat, and when it was seen to grow; when the watch began, and when it last looked.
        self._seen: dict[int, tuple[RankHeartbeat | None, float]] = {}
        self._began_s = self._looked_s = 0.0
        self._c_dump: IO[bytes] | None = None

    def start(self) -> None:
        """Begins to watch; the first heartbeat is written before this returns. A disk that refuses is no error."""
        with contextlib.suppress(OSError):
            self._attempt.heartbeats.mkdir(exist_ok=True)
        self._write()
        if self._foreign_stands is None:
            with contextlib.suppress(OSError):
                self._c_dump = open(self._beat().path(self._attempt.heartbeats), "ab", buffering=0)  # noqa: SIM115
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            # In a longer gap this process was stopped, and made no step.
            self._awake_s += min(now - last, 2 * _TICK_S)
            last = now
            try:
                self._turn()
            except Exception:  # a fault of the watchdog must not end the training
                print(f"rank {self._rank}: the watchdog failed:\n{traceback.format_exc()}", flush=True)

    def _turn(self) -> None:
        if self._heart.moves != self._moves:
            self._moves, self._moved_s = self._heart.moves, self._awake_s
            self._dumped, self._since_s, self._watches, self._stands = False, None, 0, ("", "")
        limit_s, quiet_s = self._heart.limit_s(), self._awake_s - self._moved_s
        hangs = 0 < limit_s <= quiet_s
        if hangs and not self._dumped:
            self._dump(quiet_s)
        self._arm(limit_s)
        if self._awake_s - self._written_s >= self._period_s or (0 < limit_s / 2 < quiet_s):
            self._write()
        if hangs and not self._over.is_set():
            if self._attempt.ended():
                self._end(f"rank {self._rank} leaves: the attempt has ended")
            self._watch_others(quiet_s)

    def _beat(self) -> RankHeartbeat:
        collective, place = self._stands
        quiet_s, limit_s = self._awake_s - self._moved_s, self._heart.limit_s()
        return RankHeartbeat(
            self._rank, self._host, os.getpid(), self._count, self._heart.step, self._heart.phase, round(quiet_s, 1),
            round(limit_s, 1), round(time.time(), 1), self._dumped, collective, place, self._heart.probe_s,
        )  # fmt: skip

    def _write(self) -> None:
        self._count += 1
        self._written_s = self._awake_s
        with contextlib.suppress(OSError):
            write_heartbeat(self._attempt.heartbeats, self._beat())

    def _arm(self, limit_s: float) -> None:
        """Sets Python's C-level watch, in case this thread never runs again."""
        if self._c_dump is None or not limit_s or (self._armed_s and self._awake_s < self._armed_s + limit_s / 8):
            return
        self._armed_s = self._awake_s
        # It may write once after a job that was stopped as a whole continues; nobody reads that.
        faulthandler.dump_traceback_later(limit_s, file=self._c_dump, exit=False)

    def _dump(self, quiet_s: float) -> None:
        """Writes the stacks of all threads; the next heartbeat says where the main thread is."""
        self._dumped = True
        if self._foreign_stands is not None:
            self._stands = self._foreign_stands()
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = reversed(traceback.extract_stack(frame)) if frame is not None else []
        self._stands = stands_at([Frame(call.filename, call.lineno or 0, call.name) for call in calls])
        head = (
            f"rank {self._rank} on {self._host}, pid {os.getpid()}: no step for {quiet_s:.0f} s after step "
            f"{self._heart.step}, {self._heart.phase}\n"
        )
        with contextlib.suppress(OSError):
            self._attempt.stacks.mkdir(exist_ok=True)
            with open(self._attempt.stacks / f"{self._rank}.txt", "a", encoding="utf-8") as file:
                file.write(head)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
        # In a thread of its own, because the library that it asks may be stuck.
        write = threading.Thread(target=write_record, args=(self._attempt, self._rank), name="flight recorder")
        write.daemon = True
        write.start()

    def _watch_others(self, quiet_s: float) -> None:
        """Reads all heartbeats from time to time, from its turn on; ends the attempt when there is a verdict."""
        if self._since_s is None:
            pause_s = next_watch_s(self._rank, self._size, self._watches, self._silent_s)
            self._since_s = self._awake_s + pause_s
            self._seen = {}
        if self._awake_s < self._since_s or (self._seen and self._awake_s - self._looked_s < self._silent_s / 5):
            return
        if not self._seen:
            self._began_s = self._awake_s
        self._looked_s = self._awake_s
        beats = read_heartbeats(self._attempt.heartbeats) | {self._rank: self._beat()}
        for rank in range(self._size):
            before, grown_s = self._seen.get(rank, (None, self._awake_s))
            beat = beats.get(rank, before)
            grew = beat is not None and (before is None or beat.beat != before.beat)
            self._seen[rank] = beat, self._awake_s if grew else grown_s
        if self._awake_s - self._began_s < self._silent_s:
            return
        seen = {rank: Seen(beat, self._awake_s - grown_s) for rank, (beat, grown_s) in self._seen.items()}
        verdict = judge(seen, self._silent_s, quiet_s, read_records(self._attempt))
        if verdict is None:
            self._since_s = None
            self._watches += 1
        elif self._heart.moves == self._moves:
            self._pronounce(verdict)

    def _c_dumps(self, ranks: Iterable[int]) -> str:
        """Copies the stacks that the C-level watch of silent ranks left to `stacks/`; words on the first one."""
        words = ""
        for rank in ranks:
            if text := read_c_dump(self._attempt.heartbeats, rank):
                path = self._attempt.stacks / f"{rank}.txt"
                with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
                    file.write(f"rank {rank}, by its C-level watch, as its Python does not run\n{text}")
                words = words or f"; rank {rank} holds Python's lock at {stands_at(main_frames(text))[1]}"
        return words

    def _pronounce(self, verdict: Verdict) -> None:
        cause = verdict.cause + self._c_dumps(verdict.silent)
        # Before anything is printed: the main thread may hold the lock of stdout.
        try:
            self._attempt.write_ended("hang", cause, self._heart.step, rank=verdict.rank, node=verdict.node)
        except RunFolderError as fault:
            cause += f"; {fault}"
        self._end(f"hang: {cause}; stacks in {self._attempt.stacks}")

    def _end(self, words: str) -> None:
        self._over.set()
        self._leave(words)


_FRAME = re.compile(r'File "(?P<file>[^"\n]{1,400})", line (?P<line>\d+) in (?P<function>\S{1,100})')


@dataclass(frozen=True)
class Frame:
    """One call of a stack: `file` is its path, `function` its name."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


def main_frames(dump: str) -> list[Frame]:
    """The main thread's calls, innermost first, in a dump that faulthandler wrote: its last block."""
    block = re.split(r"^(?:Current thread|Thread) 0x", dump, flags=re.MULTILINE)[-1]
    return [Frame(found["file"], int(found["line"]), found["function"]) for found in _FRAME.finditer(block)]


# The functions in which a rank waits for another, beside those of torch.distributed.
_WAITS = {
    ("hpc_gpt/train/ranks.py", "finish"): "the all_reduce of a step's words",
    ("torch/autograd/graph.py", "_engine_run_backward"): "backward, with its all_reduce of gradients",
    ("torch/cuda/streams.py", "synchronize"): "the device",
    ("torch/cuda/__init__.py", "synchronize"): "the device",
}
_C10D = "torch/distributed/distributed_c10d.py"


def stands_at(frames: list[Frame]) -> tuple[str, str]:
    """(the collective in which the main thread waits, empty for none; our call, else the innermost one)."""
    collective = next((name for frame in frames if (name := _collective(frame))), "")
    ours = next((frame for frame in frames if "hpc_gpt/" in frame.file), None)
    place = ours if collective else frames[0] if frames else None
    return collective, str(place or ours or "")


def _collective(frame: Frame) -> str:
    if frame.file.endswith(_C10D) and not frame.function.startswith("_"):
        return frame.function
    known = ((file, name) for (file, function), name in _WAITS.items() if function == frame.function)
    return next((name for file, name in known if frame.file.endswith(file)), "")
