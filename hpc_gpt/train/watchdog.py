"""A thread on every rank that says that the rank lives, and ends the attempt as a hang where no rank makes a step.

It runs while the main thread stands in a collective of gloo's or NCCL's, which hold no GIL. Where the main thread holds
it for ever, Python's own C-level watch writes the stacks behind the rank's beat, and the others find the rank silent.

What happens when the limit of the phase is passed:

1. Every rank that can writes its threads' stacks, `stacks/<rank>.txt`, and the flight recorder's account.
2. The first rank that lives watches the beats of all, until it knows which of them do not grow (`hang.judge`); where
   one that lives may be at work, ranks watch again, ever more rarely in a great run (`hang.next_watch_s`).
3. It writes `ended.json`, and every rank that lives leaves with 1, without asking rank 0, whose store may be gone.
   What cannot leave is ended by srun's --kill-on-bad-exit, or by the controller of a local run.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import IO

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.beats import Beat, read_beats, read_c_dump, write_beat
from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.train.hang import Frame, Seen, Verdict, judge, main_frames, next_watch_s, stands_at
from hpc_gpt.train.heartbeat import Heartbeat

_TICK_S = 1.0
# Longest and shortest pause between two beats of a rank that makes its steps.
_PERIOD_S = 1.0, 15.0


class Watchdog:
    """`leave` ends the process after a hang. `record` writes the flight recorder's account, `read_records` says what
    all those that were written tell. `stands` is given where the rank is a foreign program: it says what that is in,
    and where; the stacks of this process tell nothing then, and are not written.
    """

    def __init__(
        self,
        attempt: Attempt,
        rank: int,
        size: int,
        heart: Heartbeat,
        leave: Callable[[str], None],
        record: Callable[[], None] = lambda: None,
        read_records: Callable[[], str] = lambda: "",
        stands: Callable[[], tuple[str, str]] | None = None,
    ) -> None:
        self._attempt = attempt
        self._rank, self._size = rank, size
        self._heart = heart
        self._leave = leave
        self._record, self._read_records = record, read_records
        self._foreign_stands = stands
        self._host = os.environ.get("SLURMD_NODENAME") or platform.node()
        self._over = threading.Event()
        self._period_s = min(max(heart.floor_s / 20, _PERIOD_S[0]), _PERIOD_S[1])
        # Beats come this far apart at the most, whoever writes and whoever reads them.
        self._silent_s = 2 * self._period_s + 3 * _TICK_S
        # Seconds in which this process ran: it may be stopped, and its machine suspended.
        self._awake_s = self._moved_s = self._written_s = self._armed_s = 0.0
        self._moves = heart.moves
        self._count = 0
        self._dumped = False
        self._stands: tuple[str, str] = "", ""
        self._since_s: float | None = None
        # That have come to no verdict on this quiet.
        self._watches = 0
        # Of each rank the last beat, and when it was seen to grow; since when that is watched, and when last.
        self._seen: dict[int, tuple[Beat | None, float]] = {}
        self._began_s = self._looked_s = 0.0
        self._c_dump: IO[bytes] | None = None

    def start(self) -> None:
        """Begins to watch: the first beat is written before this returns. A disk that refuses stops nobody."""
        with contextlib.suppress(OSError):
            self._attempt.beats.mkdir(exist_ok=True)
        self._write()
        if self._foreign_stands is None:
            with contextlib.suppress(OSError):
                self._c_dump = open(self._beat().path(self._attempt.beats), "ab", buffering=0)  # noqa: SIM115
        threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """The rank leaves in good order: nothing is a hang any more."""
        self._over.set()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._over.wait(_TICK_S):
            now = time.monotonic()
            # A longer gap was no time in which anybody could make a step.
            self._awake_s += min(now - last, 2 * _TICK_S)
            last = now
            try:
                self._turn()
            except Exception:  # what watches must not end what it watches
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

    def _beat(self) -> Beat:
        collective, place = self._stands
        quiet_s, limit_s = self._awake_s - self._moved_s, self._heart.limit_s()
        return Beat(
            self._rank, self._host, os.getpid(), self._count, self._heart.step, self._heart.phase, round(quiet_s, 1),
            round(limit_s, 1), round(time.time(), 1), self._dumped, collective, place, self._heart.probe_s,
        )  # fmt: skip

    def _write(self) -> None:
        self._count += 1
        self._written_s = self._awake_s
        with contextlib.suppress(OSError):
            write_beat(self._attempt.beats, self._beat())

    def _arm(self, limit_s: float) -> None:
        """Python's C-level watch, for the case that this thread does not come to run again."""
        if self._c_dump is None or not limit_s or (self._armed_s and self._awake_s < self._armed_s + limit_s / 8):
            return
        self._armed_s = self._awake_s
        # After a job that was stopped as a whole goes on, this may write once, and nobody reads it.
        faulthandler.dump_traceback_later(limit_s, file=self._c_dump, exit=False)

    def _dump(self, quiet_s: float) -> None:
        """Writes the stacks of all threads, and where the main thread stands into the next beat."""
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
        # In a thread of its own: it asks a library that may itself be stuck.
        threading.Thread(target=self._record, name="flight recorder", daemon=True).start()

    def _watch_others(self, quiet_s: float) -> None:
        """Looks at all beats once in a while, from its turn on; ends the attempt once the verdict is clear."""
        if self._since_s is None:
            pause_s = next_watch_s(self._rank, self._size, self._watches, self._silent_s)
            self._since_s = self._awake_s + pause_s
            self._seen = {}
        if self._awake_s < self._since_s or (self._seen and self._awake_s - self._looked_s < self._silent_s / 5):
            return
        if not self._seen:
            self._began_s = self._awake_s
        self._looked_s = self._awake_s
        beats = read_beats(self._attempt.beats) | {self._rank: self._beat()}
        for rank in range(self._size):
            before, grown_s = self._seen.get(rank, (None, self._awake_s))
            beat = beats.get(rank, before)
            grew = beat is not None and (before is None or beat.beat != before.beat)
            self._seen[rank] = beat, self._awake_s if grew else grown_s
        if self._awake_s - self._began_s < self._silent_s:
            return
        seen = {rank: Seen(beat, self._awake_s - grown_s) for rank, (beat, grown_s) in self._seen.items()}
        verdict = judge(seen, self._silent_s, quiet_s, self._read_records())
        if verdict is None:
            self._since_s = None
            self._watches += 1
        elif self._heart.moves == self._moves:
            self._pronounce(verdict)

    def _c_dumps(self, ranks: Iterable[int]) -> str:
        """Puts the stacks that the C-level watch of silent ranks left where the others' are; words on the first."""
        words = ""
        for rank in ranks:
            if text := read_c_dump(self._attempt.beats, rank):
                path = self._attempt.stacks / f"{rank}.txt"
                with contextlib.suppress(OSError), open(path, "a", encoding="utf-8") as file:
                    file.write(f"rank {rank}, by its C-level watch, as its Python does not run\n{text}")
                words = words or f"; rank {rank} holds Python's lock at {stands_at(main_frames(text))[1]}"
        return words

    def _pronounce(self, verdict: Verdict) -> None:
        cause = verdict.cause + self._c_dumps(verdict.silent)
        # Before anything is printed: the main thread may hold what that needs.
        try:
            self._attempt.write_ended("hang", cause, self._heart.step, rank=verdict.rank, node=verdict.node)
        except RunFolderError as fault:
            cause += f"; {fault}"
        self._end(f"hang: {cause}; stacks in {self._attempt.stacks}")

    def _end(self, words: str) -> None:
        self._over.set()
        self._leave(words)
