"""A thread on every rank that writes its heartbeat, and ends the attempt as a hang if no rank makes a step.

It runs while the main thread is in a collective of gloo or NCCL, as these release the GIL. If the main thread holds the
GIL for ever, Python's own C-level watch writes the stacks to a file of the rank, and the others find the rank silent.
A rank sends its heartbeat once a second to its node's first rank (`node_mates`), which writes all heartbeats of the
node once a period; a rank that gets no answer writes its own.

After the time limit of a phase:

1. Every rank that can run writes its threads' stacks, `stacks/<rank>.txt`, and torch's flight recorder of the last
   collectives, `flight/<rank>.json`.
2. The first living rank watches the heartbeats of all ranks, until it knows which ones do not grow
   (`heartbeat.judge_heartbeats`). If a living rank may be at work, ranks watch again, more rarely in a large run
   (`heartbeat.next_watch_s`).
3. It writes `ended.json`, and every living rank leaves with 1, without asking rank 0, whose store may be gone. srun's
   --kill-on-bad-exit, or the controller of a local run, ends a rank that cannot leave.
"""

import contextlib
import faulthandler
import functools
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import IO

from hpc_gpt.core.ends.end_policy import OVER
from hpc_gpt.core.errors import RunFolderError
from hpc_gpt.core.files import json_object
from hpc_gpt.core.processes.heartbeats import (
    RankHeartbeat,
    c_dump,
    line_of,
    period_s,
    read_c_dump,
    read_heartbeats,
    silent_after_s,
    write_heartbeat,
)
from hpc_gpt.core.runs.run_folder import Attempt, CachedAttempt
from hpc_gpt.trainer.supervision.gpus import GpuReader
from hpc_gpt.trainer.supervision.heartbeat import HangVerdict, Heartbeat, LastHeartbeat, judge_heartbeats, next_watch_s
from hpc_gpt.trainer.supervision.node_mates import NodeMates
from hpc_gpt.trainer.supervision.stacks import Frame, find_wait, main_frames, read_flight_records

_TICK_S = 1.0
# The ranks of a node usually all start within this time.
_START_S = 30.0
# In a hang, with 8 ranks per node, the ranks together look at most this many times a second whether the attempt has
# ended.
_LOOKS_S = 2000.0
# A longer gap does not come from a busy machine: the process was stopped.
_STOPPED_S = 30.0


class Watchdog:
    """Writes the heartbeat of a rank, and calls `leave` with a message after a hang.

    `foreign_wait`, for the rank of a foreign program: returns (collective, place) as `find_wait` does; the stacks of
    this process are not written then. `write_record` writes the record of the rank's library.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        size: int,
        heart: Heartbeat,
        leave: Callable[[str], None],
        foreign_wait: Callable[[], tuple[str, str]] | None = None,
        write_record: Callable[[], None] | None = None,
    ) -> None:
        self._attempt = attempt
        self._rank, self._size = rank, size
        self._heart = heart
        self._leave = leave
        self._foreign_wait = foreign_wait
        self._write_record = write_record
        self._host = os.environ.get("SLURMD_NODENAME") or platform.node()
        local_rank = os.environ.get("LOCAL_RANK", "0")
        self.mates = NodeMates(attempt, self._host, int(local_rank) if local_rank.isdigit() else 0)
        # {rank: (its last line, whether its stacks are written)} of the node's other ranks.
        self._others: dict[int, tuple[bytes, tuple[bool, str]]] = {}
        self._start = CachedAttempt(attempt.folder)
        self.gpus = GpuReader()
        self._over = threading.Event()
        self._heard = ""
        self._period_s, self._silent_s = period_s(heart.floor_s), silent_after_s(heart.floor_s)
        # These count seconds in which this process ran: it may be stopped, or its machine suspended.
        self._awake_s = self._moved_s = self._written_s = self._armed_s = self._asked_s = 0.0
        self._moves = heart.moves
        self._count = 0
        self._dumped = False
        self._wait: tuple[str, str] = "", ""
        self._since_s: float | None = None
        # Watches without a verdict since the last move.
        self._watches = 0
        # Each rank's last heartbeat, and when it was seen to grow; begin of the watch, and its last look.
        self._seen: dict[int, tuple[RankHeartbeat | None, float]] = {}
        self._began_s = self._looked_s = 0.0
        self._c_dump: IO[bytes] | None = None

    def start(self) -> None:
        """Writes the first heartbeat and begins to watch. Errors of the disk are ignored."""
        if self.mates.is_first:  # one rank of a node reads its GPUs
            self.gpus.start()
        self._beat()
        if self._foreign_wait is None:
            with contextlib.suppress(OSError):
                self._c_dump = self._open_c_dump()
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            # In a longer gap this process was stopped.
            self._awake_s += min(now - last, 2 * _TICK_S)
            if now - last > _STOPPED_S:
                self._heart.stopped_s += now - last
            last = now
            try:
                self._turn()
            except Exception:  # a fault of the watchdog must not end the training
                print(f"rank {self._rank}: the watchdog failed:\n{traceback.format_exc()}", flush=True)

    def _turn(self) -> None:
        if self._heart.moves != self._moves:
            self._moves, self._moved_s = self._heart.moves, self._awake_s
            self._dumped, self._since_s, self._watches, self._wait = False, None, 0, ("", "")
        limit_s, quiet_s = self._heart.limit_s(), self._awake_s - self._moved_s
        hangs = 0 < limit_s <= quiet_s
        dumps = hangs and not self._dumped
        if dumps:
            self._dump(quiet_s)
        self._arm(limit_s)
        heard, self._heard = self._heard, self._heart.asked_by
        self._beat(at_once=dumps or heard != self._heard)
        if hangs and not self._over.is_set():
            # If a node's first rank runs, only it looks: the others learn it from the store, or when it has left.
            if self._awake_s >= self._asked_s + self._size / _LOOKS_S and not self.mates.is_served:
                self._leave_ended()
            self._watch_others(quiet_s)

    def _heartbeat(self) -> RankHeartbeat:
        collective, place = self._wait
        quiet_s, limit_s = self._awake_s - self._moved_s, self._heart.limit_s()
        elapsed_s = self._start.elapsed_s() if self.mates.is_first else None
        still_s, still = self._heart.still()
        return RankHeartbeat(
            self._rank, self._host, os.getpid(), self._count, self._heart.step, self._heart.phase, round(quiet_s, 1),
            round(limit_s, 1), round(time.time(), 1), self._dumped, collective, place, self._heart.probe.probe_s,
            None if elapsed_s is None else round(elapsed_s - self._heart.stopped_s, 1),
            self.gpus.latest(), None if still_s is None else round(still_s, 1), still, *self._heart.probe[1:4],
            self._heart.asked_by, self._heart.probe.device, self._heart.lost,
        )  # fmt: skip

    def _leave_ended(self) -> None:
        self._asked_s = self._awake_s
        if self._attempt.ended():
            self._end(f"rank {self._rank} leaves: the attempt has ended")

    def _beat(self, at_once: bool = True) -> None:
        """Sends this rank's heartbeat to its node's first rank. The first rank writes all heartbeats of the node once a
        period, or `at_once`; a rank that gets no answer writes its own."""
        self._count += 1
        if self.mates.is_first:
            at_once |= self._gather()
        else:
            self.mates.send(line_of(self._heartbeat()))
            starts = self.mates.heard_s is None and self._awake_s < _START_S
            if starts or self.mates.is_served:
                return
        if self._awake_s - self._written_s < self._period_s and not at_once:
            return
        self._written_s = self._awake_s
        others = [line for line, _ in self._others.values()]
        with contextlib.suppress(OSError):
            try:
                write_heartbeat(self._attempt.heartbeats, self._heartbeat(), others)
            except FileNotFoundError:
                self._attempt.heartbeats.mkdir(exist_ok=True)
                write_heartbeat(self._attempt.heartbeats, self._heartbeat(), others)

    def _gather(self) -> bool:
        """Reads the heartbeats of the node's other ranks; returns whether one of them is a rank's first, or its first
        since it wrote its stacks or heard a signal."""
        is_news = False
        for line in self.mates.gather():
            if heartbeat := json_object(line):
                before = self._others.get(heartbeat["rank"])
                news = heartbeat["dumped"], heartbeat.get("heard", "")
                self._others[heartbeat["rank"]] = line, news
                is_news |= before is None or before[1] < news
        return is_news

    def _open_c_dump(self) -> IO[bytes]:
        path = c_dump(self._attempt.heartbeats, self._rank)
        with contextlib.suppress(FileNotFoundError):
            return open(path, "ab", buffering=0)
        path.parent.mkdir(exist_ok=True)
        return open(path, "ab", buffering=0)

    def _arm(self, limit_s: float) -> None:
        """Sets Python's C-level watch, in case this thread never runs again."""
        if self._c_dump is None or not limit_s or (self._armed_s and self._awake_s < self._armed_s + limit_s / 8):
            return
        self._armed_s = self._awake_s
        # It may write once after a stopped job continues; nobody reads that.
        faulthandler.dump_traceback_later(limit_s, file=self._c_dump, exit=False)

    def _dump(self, quiet_s: float) -> None:
        """Writes the stacks of all threads. The next heartbeat says where the main thread is."""
        self._dumped = True
        if self._foreign_wait is not None:
            self._wait = self._foreign_wait()
            return
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        calls = reversed(traceback.extract_stack(frame)) if frame is not None else []
        self._wait = find_wait([Frame(call.filename, call.lineno or 0, call.name) for call in calls])
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
        if self._write_record is not None:  # on a thread of its own, because NCCL may be stuck
            threading.Thread(target=self._write_record, name="flight recorder", daemon=True).start()

    def _watch_others(self, quiet_s: float) -> None:
        """Once it is this rank's turn, reads all heartbeats from time to time, and ends the attempt on a verdict."""
        if self._since_s is None:
            pause_s = next_watch_s(self._rank, self._size, self._watches, self._silent_s)
            self._since_s = self._awake_s + pause_s
            self._seen = {}
        if self._awake_s < self._since_s or (self._seen and self._awake_s - self._looked_s < self._silent_s / 2):
            return
        if not self._seen:
            self._began_s = self._awake_s
        self._looked_s = self._awake_s
        heartbeats = read_heartbeats(self._attempt.heartbeats) | {self._rank: self._heartbeat()}
        for rank in range(self._size):
            before, grown_s = self._seen.get(rank, (None, self._awake_s))
            last = heartbeats.get(rank, before)
            grew = last is not None and (before is None or last.beat != before.beat)
            self._seen[rank] = last, self._awake_s if grew else grown_s
        if self._awake_s - self._began_s < self._silent_s:
            return
        self._leave_ended()
        seen = {rank: LastHeartbeat(last, self._awake_s - grown_s) for rank, (last, grown_s) in self._seen.items()}
        for rank in self._ended_well():  # its process is gone, and nobody waits for it
            if seen[rank].unchanged_s >= self._silent_s and rank != self._rank:
                del seen[rank]
        recorded = functools.partial(read_flight_records, self._attempt)
        verdict = judge_heartbeats(seen, self._silent_s, quiet_s, recorded)
        if verdict is None:
            self._since_s = None
            self._watches += 1
        elif self._heart.moves == self._moves and not self._over.is_set():
            self._write_verdict(verdict)

    def _ended_well(self) -> list[int]:
        """The ranks whose programs, which are not ours, have ended with 0."""
        with contextlib.suppress(OSError):
            names = os.listdir(self._attempt.folder / OVER)
            return [int(name) for name in names if name.isdigit() and int(name) < self._size]
        return []

    def _copy_c_dumps(self, ranks: Iterable[int]) -> str:
        """Copies the stacks that the C-level watch of silent ranks wrote to `stacks/`; returns a text about the first
        rank that has one."""
        text = ""
        for rank in ranks:
            if dump := read_c_dump(self._attempt.heartbeats, rank):
                path = self._attempt.stacks / f"{rank}.txt"
                with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
                    file.write(f"rank {rank}, by its C-level watch, as its Python does not run\n{dump}")
                text = text or f"; rank {rank} holds Python's lock at {find_wait(main_frames(dump))[1]}"
        return text

    def _write_verdict(self, verdict: HangVerdict) -> None:
        cause = verdict.cause + self._copy_c_dumps(verdict.silent)
        # Written before anything is printed: the main thread may hold the lock of stdout.
        try:
            self._attempt.write_ended("hang", cause, self._heart.step, rank=verdict.rank, node=verdict.node)
        except RunFolderError as fault:
            cause += f"; {fault}"
        self._end(f"hang: {cause}; stacks in {self._attempt.stacks}")

    def _end(self, message: str) -> None:
        self._over.set()
        self._leave(message)
