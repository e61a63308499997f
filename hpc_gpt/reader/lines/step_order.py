"""The order of the steps in one output: whether several trainings print into it at the same time."""

import math
from dataclasses import dataclass

_MIN_CROSSINGS = 3  # fewer may be a rank that prints late
_FEW_LINES = 4  # lines between two falls that are no stretch of one training


@dataclass
class StepOrder:
    """Takes the numbers of the steps of one output in their order, live or from a file.

    Steps of trainings that run at the same time interleave: 1 1 2 1 3 2. They fall back again and again, and either
    only a few lines lie between two falls, or after a fall a step goes on, by a jump, where it had been before. The
    steps of epochs, of a training that resumes, and of ranks that print the same steps (1 1 2 2) do not.
    """

    _falls: int = 0
    _crossings: int = 0  # stretches that another training's lines interrupt
    _last: float = math.inf
    _first: float = math.inf  # of the stretch since the last fall
    _lines: int = 0  # of this stretch
    _length: int = 0  # the lines of the stretch before
    _jumps: bool = False  # this stretch leaves out steps
    _highest: float = -math.inf
    _interval: float = math.inf  # the shortest distance between two lines
    _returned: bool = False  # this stretch goes on, by a jump, above the highest step before it

    def take(self, step: float) -> None:
        """Takes the step of the next line."""
        if step < self._last:
            if self._last < math.inf:
                # Ranks that write a few lines at a time print stretches of one length, which leave out no step.
                is_regular = self._lines == self._length and not self._jumps
                is_short = self._lines <= _FEW_LINES and step > self._first and not is_regular
                self._crossings += self._returned or is_short
                self._falls += 1
            self._length, self._jumps = self._lines, False
            self._first, self._lines, self._returned = step, 0, False
        elif step > self._last:
            self._interval = min(self._interval, step - self._last)
            self._jumps |= step - self._last > self._interval
            passes = self._falls > 0 and self._last < self._highest < step
            self._returned |= passes and step - self._last > self._interval
        self._lines += step != self._last
        self._highest = max(self._highest, step)
        self._last = step

    def begin(self) -> None:
        """Notes that a program starts, or that one has failed: the next step is compared with none before it."""
        self._last = math.inf
        self._highest = -math.inf

    @property
    def is_interleaved(self) -> bool:
        """Whether the steps are those of several trainings that run at the same time."""
        return self._crossings >= _MIN_CROSSINGS and 2 * self._crossings > self._falls
