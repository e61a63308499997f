"""Reads a log line by line, as its program writes it: the figures of its steps, and the last failures.

The supervisor of a program that is not ours uses it. `reader.lines` reads a finished log, whole and in blocks.
"""

import collections
import math
import re
import time
from dataclasses import dataclass
from typing import Literal

from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.failures.part_failures import plainness, without_ignored
from hpc_gpt.reader.lines.fields import MEMORY_FIELDS
from hpc_gpt.reader.lines.line_reader import LineReader
from hpc_gpt.reader.lines.matches import RuleMatch, find, float_of, rank_of, row_of, values_of, without_colours
from hpc_gpt.reader.lines.part import Failure
from hpc_gpt.reader.lines.pattern import ANY_NAME, LOSS, Pattern, raised
from hpc_gpt.reader.lines.step_order import StepOrder
from hpc_gpt.reader.lines.step_rows import sound_step

# A failure further up did not end the program.
_KEPT_LINES = 200
# Consequences that show for sure that a process failed, but not why.
_FAILED = re.compile(
    r"[Ee]xit(?:ed with exit)? ?code|return(?:ed non-zero exit| code)|(?:^|:|\d) *(?:Killed|Aborted)\b"
)
# A signal ended a program: the messages of bash, srun, slurmstepd and launchers.
_KILLED = re.compile(
    r": (?:line )?\d{1,6}: {1,8}\d{1,10} (?:Killed|Aborted|Segmentation fault|Bus error|Illegal inst|Floating point)"
    r"|srun: error: .{1,400}: (?:Killed|Aborted|Segmentation fault|Bus error|Illegal inst|Floating point|Out Of Memory)"
    r"|[Dd]etected \d{1,9} oom[-_]kill event"
    r"|^(?:\S{1,20} )?(?:Killed|Segmentation fault|Bus error)(?: \(core dumped\))?\s*$"
    r"|exitcode {2,10}: -(?!15\b)\d|return code = -(?!15\b)\d|died with <Signals\.SIG(?!TERM|INT)"
    r"|exited on signal (?!15\b|2\b)\d"
)
# A command or a module is missing.
_NOT_THERE = re.compile(
    r": (?:command not found|No such file or directory|Permission denied)$|execve\(\): |: bad interpreter: "
    r"|python[\w.]{0,20}: (?:No module named |can't open file|can't find )"
)
# Lines that a failure itself prints, unlike lines that only mention one.
_SURE = re.compile(
    r"srun: |slurmstepd|sbatch: |Fatal Python error|terminate called|ProcessGroupNCCL|: line \d|/env: |Signal: "
    r"|Caught signal"
)
_RAISED = re.compile(raised(ANY_NAME))
# After steps, a line of these belongs to a command beside the training.
_NEVER_BEGAN = re.compile(r"[^:\[]{1,200}: (?:(?:command )?not found|No such file or directory|Permission denied)")
# Lines that a program prints when it fails, after its traceback, and those that join two tracebacks.
_OF_FAILURE = re.compile(
    r"[\s\[]|\w*Warning\b|srun: |slurmstepd|CUDA kernel errors|For debugging consider|Compile with|Search for `"
    r"|Exception ignored|terminate called|During handling of|The above exception"
)
_LONGEST = 4000
_OF_FAILURES = ("failure", "traceback")
_LOSS = re.compile(rf"(?i){LOSS}")
# The total after the number of a step; in a line with an epoch it may be the total of the epoch.
_TOTAL = re.compile(r" ?/ ?(\d{1,12})\b")


@dataclass(frozen=True)
class LiveFailure:
    """A failure that came at `moment` or later, by time.monotonic(); None if that is not known.

    `how` sure it is: `program`, a traceback or a signal ended a program, or the program is missing; `some`, some
    process failed; `words`, the line only mentions a failure.
    """

    failure: Failure
    moment: float | None
    how: Literal["program", "some", "words"]


class LiveLines:
    """The lines of one program, taken in their order. Dialects read its steps, or the regex `pattern` if there is one.

    `moment`: a time at which the next lines did not exist yet; None if that is not known. By default lines are taken as
    soon as they exist. `stream`: the number of the file that has the next lines. Between the lines of two files there
    is no order, so a loss in one of them gets no step from a bar in the other.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._own_pattern = None if pattern is None else (re.compile(pattern), Pattern("step", pattern, "own"))
        self.moment: float | Literal["now"] | None = "now"
        self.stream = 0
        self._late: collections.deque[LiveFailure] = collections.deque(maxlen=_KEPT_LINES)
        self._reader = LineReader("")  # of the failures
        self._count = 0
        self._rank: int | None = None
        # The figures of a step whose number comes with the next bar, and the loss of an evaluation for the next step.
        self._waits: dict[str, float] | None = None
        self._waits_in = 0  # the stream of these figures
        self._loss_eval: float | None = None
        self._orders: dict[int, StepOrder] = {}  # of each stream
        self._skipped = 0.0  # steps that fp16's loss scaler skipped, by separate lines before the line of the step
        # The planned number of steps: True, by lines of steps; False, by another line.
        self._planned: dict[bool, int] = {}
        self.spoke_at = 0  # the last line that no failure has printed
        self.loss: float | None = None  # the last loss, with or without the number of its step
        self.limit = ""  # the line in which the program says that its own time limit ends it
        self.over = ""  # the line in which it says that it ends for another reason
        self.loaded = 0  # the step of the checkpoint that it says it has loaded
        self._stepped_at: int | None = None  # the last line with a step or a bar
        self.has_steps = False  # lines, not only bars
        self._asked_at: int | None = None  # the line in which srun was asked to end: it then kills its tasks
        self._bar: float | None = None
        # The total of the bar whose numbers are steps, and its last number; None without such a bar.
        self._bar_total: float | None = None
        self._bar_step: float | None = None

    def take(self, line: str) -> dict[str, float] | None:
        """Takes the next line; returns the figures of its step by the fields of reader/lines/fields.py, `step` among them,
        None without one."""
        self._count += 1
        line = without_colours(line[:_LONGEST])
        row: dict[str, float] | None = None
        if self._own_pattern is not None and (own_match := self._own_pattern[0].search(line)):
            values = values_of(line, own_match, self._own_pattern[1])
            row = _figures(values)
            self._plan(values, True)
        matches = find(line)
        self._take_failures(line, matches)
        fails = bool(self._reader.tracebacks.count or _OF_FAILURE.match(line))
        fails |= bool(self._late) and self._late[-1].failure.place.line == self._count
        self.spoke_at = self._count if line.strip() and not fails else self.spoke_at
        for match, rule in matches:
            kind = rule.pattern.kind
            if kind == "end":
                words = hide_secrets(match[0].strip("[] "))[:400]
                self.limit, self.over = (words, "") if rule.pattern.ended == "walltime" else (self.limit, words)
            elif kind == "fact":
                values = values_of(line, match, rule.pattern)
                self._plan(values, False)
                loaded = float_of(values, "resumed_step")
                self.loaded = int(loaded) if loaded and math.isfinite(loaded) else self.loaded
            elif self._own_pattern is None and kind in ("step", "progress", "eval"):
                values = values_of(line, match, rule.pattern)
                row = row or self._by_dialect(kind, values, rank_of(line))
                if kind == "progress" and values.get("step") != self._bar:  # a closed bar is drawn again
                    self._stepped_at, self._bar = self._count, float_of(values, "step")
                # Only a bar with the number of a step counts: another one may count anything.
                if kind == "step" or (row is not None and row.get("step") == values.get("step")):
                    begins_with_step = "step" in match.re.groupindex and "poch" not in line
                    if begins_with_step and (total := _TOTAL.match(line, match.end("step"))):
                        values = {"steps_planned": float(total[1]), **values}
                    self._plan(values, kind == "step")
        if row is not None:
            self._stepped_at, self.has_steps, self.limit, self.over = self._count, True, "", ""
        if line.startswith("srun: forcing job termination"):
            self._asked_at = self._count
        shown = row or self._waits or {}
        if "loss" in shown:
            self.loss = shown["loss"]
        elif self._own_pattern is None and "oss" in line and (alone := _LOSS.search(line)):
            self.loss = float(alone["loss"].replace(",", ""))
        if row is None or not sound_step(row.get("step", -1.0)):
            return None
        if "loss" in row:  # a bar may be drawn in another order
            self._orders.setdefault(self.stream, StepOrder()).take(row["step"])
        if self._loss_eval is not None:
            row, self._loss_eval = {"loss_eval": self._loss_eval, **row}, None
        return row

    def _take_failures(self, line: str, matches: list[RuleMatch]) -> None:
        """Takes the failures of a line, and drops those of lines before it that it completes or explains."""
        matches = [pair for pair in matches if pair[1].pattern.kind in _OF_FAILURES]
        failures, before = self._reader.parts[-1].failures, self._reader.tracebacks.count
        if not matches and not before:
            return
        failures[:] = [late.failure for late in self._late]
        self._reader.entries.clear()  # one failure a line is kept, and only those of the last lines
        self._reader.apply(self._count, line, matches)
        left = {id(failure) for failure in failures}
        dropped = [late for late in self._late if id(late.failure) not in left]
        for late in dropped:
            self._late.remove(late)
        new = failures[len(self._late) :]
        if not new:
            return
        failure = min(new, key=plainness)  # the most specific: a line with an exception also matches `error`
        # The line ends a traceback, whose message may be on the next line.
        ended = self._reader.tracebacks.count < before or bool(failure.raised_in)
        how = _how(line, failure, ended or any(late.how == "program" for late in dropped))
        if self._asked_at is not None and line.startswith("srun: error: ") and "Killed" in line:
            how = "words" if self._count <= self._asked_at + _KEPT_LINES else how
        self._late.append(LiveFailure(failure, time.monotonic() if self.moment == "now" else self.moment, how))

    @property
    def is_interleaved(self) -> bool:
        """Whether the lines are those of several trainings at once."""
        return any(order.is_interleaved for order in self._orders.values())

    @property
    def planned(self) -> int:
        """The number of steps that the program plans, by its log; 0 if the log does not say it."""
        return self._planned.get(True) or self._planned.get(False) or 0

    def _plan(self, values: dict[str, float | str], by_step: bool) -> None:
        planned = float_of(values, "steps_planned")
        if planned is not None and 1 <= planned < 1e15:
            self._planned[by_step] = int(planned)

    def _by_dialect(self, kind: str, values: dict[str, float | str], rank: int | None) -> dict[str, float] | None:
        """The row that these values complete, if they do. If all ranks print, the first rank's lines count."""
        if kind == "eval":
            self._loss_eval = float_of(values, "loss_eval")
            return None
        if kind == "progress":
            step, total, waits = float_of(values, "step"), float_of(values, "steps_planned"), self._waits
            self._waits = None
            counts_steps = waits is not None or (total is not None and total == self._bar_total)
            if step is None or not counts_steps:
                return None
            self._bar_total, self._bar_step = total, step
            if waits is None:
                return None
            return {**waits, "step": step} if self._waits_in == self.stream else {"step": step}
        if rank is not None and self._rank is not None and rank != self._rank:
            return None
        self._rank = rank if self._rank is None else self._rank
        row = _figures(values)
        if row.keys() == {"skipped"}:
            self._skipped += row["skipped"]
            return None
        if self._skipped:
            row, self._skipped = {"skipped": self._skipped, **row}, 0.0
        if "step" in row:
            return row
        self._waits, self._waits_in = row, self.stream
        return None

    def last_bar(self) -> dict[str, float] | None:
        """The figures of the last step by the bar that counts steps: its number alone; None without such a bar."""
        return None if self._bar_step is None or not sound_step(self._bar_step) else {"step": self._bar_step}

    @property
    def failure(self) -> Failure | None:
        """The first failure in the last lines that is not a consequence, else the first one; None without one."""
        failures = [failure.failure for failure in self._late]
        late = [failure for failure in failures if failure.place.line > self._count - _KEPT_LINES]
        return next((failure for failure in late if not failure.echo), late[0] if late else None)

    def end_failures(self) -> list[LiveFailure]:
        """The failures after the last line of a step (all, in a log without steps) that ended something or may have."""
        left = {id(failure) for failure in without_ignored([one.failure for one in self._late])}
        late = [one for one in self._late if id(one.failure) in left and not (one.failure.echo and one.how == "words")]
        if self._stepped_at is not None and not self.is_interleaved:  # else the next step is another training's
            late = [one for one in late if one.failure.place.line > self._stepped_at]
            # After steps such a line belongs to a command beside the training.
            late = [one for one in late if not _NEVER_BEGAN.match(one.failure.message)]
        return late


def _how(line: str, failure: Failure, of_program: bool) -> Literal["program", "some", "words"]:
    if _KILLED.search(line) or _NOT_THERE.search(line.rstrip()):
        return "program"
    if failure.echo and not _FAILED.search(failure.message):
        return "words"
    if of_program:
        return "program"
    return "some" if failure.echo or _RAISED.match(line) or _SURE.search(line) else "words"


def _figures(values: dict[str, float | str]) -> dict[str, float]:
    memory = {name: gib for name in MEMORY_FIELDS if (gib := float_of(values, name)) is not None}
    return {**row_of(values, None), **memory}
