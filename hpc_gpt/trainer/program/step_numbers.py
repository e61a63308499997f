"""Decides which numbers in a program's lines of steps are steps that it made, and how long a step takes."""

import collections
import math
from collections.abc import Mapping, Sequence

_ALONE_S = 2.0  # ranks that print the same steps do so within this time

# The figures of a line of steps by the fields of reader/lines/fields.py, `step` among them. They cover all steps since
# the previous line: their mean time and loss, and how many of them were skipped.
StepRow = Mapping[str, float]


class StepNumbers:
    """Decides, line by line, which numbers are steps that were made.

    A number above the last one is a step. The same number is a second line of that step, from a progress bar or another
    rank. A smaller number is a step if a second stage or the next epoch begins with it: if it is not above the number
    with which this stage began, and the next line continues from it, or no line comes for `_ALONE_S`; else if a third
    line continues from it. Until then it waits, as ranks that print on their own are some steps apart. A number up to
    `resumed` belongs to an earlier attempt, unless it has a loss and is followed by others: then the program has begun
    from an older checkpoint.
    """

    def __init__(self, resumed: int | None = None) -> None:
        self._last, self._first = resumed, None if resumed is None else resumed + 1
        self._passed = resumed is None
        self._waiting: list[StepRow] = []
        self._came = 0.0

    def take(self, row: StepRow, now: float) -> list[StepRow]:
        """Takes a row that has come at `now`, by a monotonic clock; returns the rows that are now known to be steps."""
        step, waiting = int(row["step"]), self._waiting
        if self._last is None or step >= self._last:
            if not self._passed and waiting:
                waiting.append(row)
                return self._begin()
            self._waiting = []
            if step == self._last:
                return []
            self._passed, self._last = True, step
            self._first = step if self._first is None else self._first
            return [row]
        if (waiting and step == waiting[-1]["step"]) or not (self._passed or "loss" in row):
            return []
        if waiting and step < waiting[-1]["step"]:
            waiting.clear()
        waiting.append(row)
        self._came = now
        return self._begin() if len(waiting) >= (2 if self._passed and self._begins_anew else 3) else []

    def flush_steps(self, now: float = math.inf) -> list[StepRow]:
        """Returns the row with which a stage began, if no other line has contradicted it until `now`, or at the
        end."""
        if not self._passed:
            return self._begin() if self._waiting and now == math.inf else []
        is_alone = (
            self._begins_anew and now >= self._came + _ALONE_S and self._waiting[0]["step"] < (self._last or 0) - 1
        )
        return self._begin() if is_alone else []

    @property
    def _begins_anew(self) -> bool:
        return bool(self._waiting) and self._waiting[0]["step"] <= (self._first or 0)

    def _begin(self) -> list[StepRow]:
        rows, self._waiting, self._passed = self._waiting, [], True
        self._first, self._last = int(rows[0]["step"]), int(rows[-1]["step"])
        return rows


class StepClock:
    """Measures the seconds per step of a program whose lines do not say it, by the moments at which lines were read.

    Lines that came together have one time. Each figure covers a stretch of at least `least` and at most `most` moments:
    from the last step of the first moment to the last step of the last one.
    """

    def __init__(self, least: int = 1, most: int = 1) -> None:
        self._least, self._most, self._count = least, most, 0
        self._began: collections.deque[tuple[int, float, int]] = collections.deque()  # (moment, time, its last step)

    def pass_moment(self, now: float, step: int | None) -> float | None:
        """Returns the seconds per step up to `step`, the last step that came at this moment; None if no step came, or
        before the first whole stretch."""
        self._count += 1
        if step is None:
            return None
        began = self._began
        if began and step <= began[-1][2]:  # another stage
            began.clear()
        while len(began) > 1 and began[0][0] < self._count - self._most and began[1][0] <= self._count - self._least:
            began.popleft()
        is_whole = bool(began) and began[0][0] <= self._count - self._least
        began.append((self._count, now, step))
        return (now - began[0][1]) / (step - began[0][2]) if is_whole else None


def rows_after(written: Sequence[int], rows: list[StepRow]) -> list[StepRow]:
    """The rows after those with the numbers `written`, the last steps in the file; all rows if these are not among
    them.

    >>> [row["step"] for row in rows_after([8, 9, 1], [{"step": step} for step in (7, 8, 9, 1, 2)])]
    [2]
    """
    steps, last = [int(row["step"]) for row in rows], [*written]
    ends = [end for end in range(1, len(steps) + 1) if steps[max(0, end - len(last)) : end] == last[-end:]]
    return rows[ends[-1] :] if ends else rows
