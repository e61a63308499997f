"""Where the main thread of a rank is, in its own words, and how long it may stay there. Needs no torch.

Only the main thread writes here, a few attributes a step; the watchdog's thread reads them. Limits are multiples of
what the attempt has seen, and of `train.hang_floor_s`: a step may take `hang_multiple` medians of the last ones, an
evaluation as many of the longest before it. What has no example yet (start-up, the first steps, which compile, the
first evaluation), saves, whose time is the file system's, and the leaving have 12 times the floor, an hour by default.
"""

from __future__ import annotations

import collections
import statistics
import time

STARTING, COMPILING, TRAINING = "starting", "compiling", "training"
EVALUATING, SAVING, LEAVING = "evaluating", "saving", "leaving"
# In the order in which ranks come to them within a step: of two ranks at one step the one in the earlier is behind.
PHASES = (STARTING, COMPILING, TRAINING, EVALUATING, SAVING, LEAVING)
PATIENT = 12
_PATIENT_S = 60.0
# Of torch's own, between hosts.
_WAIT_S = 1800.0
# Steps of an attempt that compile, allocate and choose kernels.
_WARM_UP = 2
_KEPT = 50


class Heartbeat:
    """The main thread's account. `moves` grows with every step and every change of phase."""

    def __init__(self, multiple: float, floor_s: float) -> None:
        self.multiple = multiple
        self.floor_s = floor_s
        self.step = 0
        self.phase = STARTING
        self.moves = 0
        self.probe_s: float | None = None
        self._steps = 0
        self._began = time.monotonic()
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._longest: dict[str, float] = {}
        self._as_steps = 0
        self._at_a_time = 1

    @property
    def patience_s(self) -> float | None:
        """How long a rank should wait for another before its connection gives up: longer than any phase may last, so
        that the watchdog is the one to speak. None where it does not watch."""
        return max(_WAIT_S, 2 * PATIENT * self.floor_s) if self.multiple else None

    def enter(self, phase: str, as_steps: int = 0) -> None:
        """Another phase begins, one that takes no longer than `as_steps` steps where that is known."""
        now = time.monotonic()
        if self.phase in (EVALUATING, SAVING):
            self._longest[self.phase] = max(now - self._began, self._longest.get(self.phase, 0.0))
        self._began, self._as_steps = now, as_steps
        if phase == TRAINING and self._steps < _WARM_UP:
            phase = COMPILING
        self.phase = phase
        self.moves += 1

    def stepped(self, step: int, count: int = 1) -> None:
        """`step` is done, and the next begins. `count` steps, where a foreign program tells of so many at a time."""
        now = time.monotonic()
        if self._steps >= _WARM_UP:
            self._seconds.append((now - self._began) / count)
        self._steps += 1
        self._at_a_time = count
        self.step, self._began, self._as_steps = step, now, 0
        self.phase = TRAINING if self._steps >= _WARM_UP else COMPILING
        self.moves += 1

    def limit_s(self) -> float:
        """Seconds that the phase may last without a move; 0 for ever."""
        if not self.multiple:
            return 0.0
        step_s = statistics.median(tuple(self._seconds)) if self._seconds else 0.0
        least_s = max(self.floor_s, self.multiple * step_s * max(1, self._as_steps) + step_s * (self._at_a_time - 1))
        longest_s = self._longest.get(self.phase)
        if self.phase == TRAINING and self._seconds:
            return least_s
        if self.phase == EVALUATING and longest_s is not None:
            return max(least_s, self.multiple * longest_s)
        return max(least_s, PATIENT * self.floor_s, _PATIENT_S, self.multiple * (longest_s or 0.0))
