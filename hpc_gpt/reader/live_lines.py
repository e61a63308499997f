"""A log line by line, as its program writes it: the figures of its steps, and what went wrong last.

For the supervisor of a program that is not ours. A log that is there is read by `reader.logs`, whole and in blocks.
"""

import collections
import re
import time
from dataclasses import dataclass
from typing import Literal

from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.reader.dialects import generic
from hpc_gpt.reader.logs import Failure, Place
from hpc_gpt.reader.logs.matches import find, float_of, rank_of, row_of, values_of, without_colours
from hpc_gpt.reader.logs.step_rows import sound_step
from hpc_gpt.reader.logs.tracebacks import NO_MESSAGE, Tracebacks, patterns_of
from hpc_gpt.reader.part_failures import plainness, without_ignored
from hpc_gpt.reader.pattern import ANY_NAME, MEMORY_FIELDS, Pattern, raised

# A failure further up is not why the program ended.
_KEPT_LINES = 200
# Consequences that say for sure that a process failed, though not why.
_FAILED = re.compile(
    r"[Ee]xit(?:ed with exit)? ?code|return(?:ed non-zero exit| code)|(?:^|:|\d) *(?:Killed|Aborted)\b"
)
# A signal ended a program, by the words of bash, srun, slurmstepd and launchers.
_KILLED = re.compile(
    r": (?:line )?\d{1,6}: {1,8}\d{1,10} (?:Killed|Aborted|Segmentation fault|Bus error|Illegal inst|Floating point)"
    r"|srun: error: .{1,400}: (?:Killed|Aborted|Segmentation fault|Bus error|Illegal inst|Floating point|Out Of Memory)"
    r"|[Dd]etected \d{1,9} oom[-_]kill event|^(?:\S{1,20} )?(?:Killed|Segmentation fault|Bus error)\b"
    r"|exitcode {2,10}: -(?!15\b)\d|return code = -(?!15\b)\d|died with <Signals\.SIG(?!TERM|INT)"
    r"|exited on signal (?!15\b|2\b)\d"
)
# A command or a module is not there.
_NOT_THERE = re.compile(
    r": (?:command not found|No such file or directory|Permission denied)$|execve\(\): |: bad interpreter: "
    r"|python[\w.]{0,20}: (?:No module named |can't open file|can't find )"
)
# Lines that a failure of its kind ends, and not words about it.
_SURE = re.compile(
    r"srun: |slurmstepd|sbatch: |Fatal Python error|terminate called|ProcessGroupNCCL|: line \d|/env: |Signal: "
    r"|Caught signal"
)
_RAISED = re.compile(raised(ANY_NAME))
# After steps it is of a command beside the training.
_NEVER_BEGAN = re.compile(r"[^:\[]{1,200}: (?:command not found|No such file or directory|Permission denied)")
_LONGEST = 4000
_LOSS = re.compile(rf"(?i){generic.LOSS}")
# After the number of a step: how many there are, which of a line with an epoch may be those of the epoch.
_TOTAL = re.compile(r" ?/ ?(\d{1,12})\b")


@dataclass(frozen=True)
class LiveFailure:
    """A failure that came at `moment` or later, by time.monotonic(), None if that is not known.

    `how` sure it is: of a `program` that a traceback or a signal ended, or that is not there; of `some` process; or no
    more than `words`.
    """

    failure: Failure
    moment: float | None
    how: Literal["program", "some", "words"]


class LiveLines:
    """The lines of one program, in their order. Dialects read its steps, or `pattern`, a regex, if it is given.

    `moment`: no line that comes was there then; None if that is not known, and by default lines come at once.
    """

    def __init__(self, pattern: str | None = None) -> None:
        self._own = None if pattern is None else (re.compile(pattern), Pattern("step", pattern, "own"))
        self.moment: float | Literal["now"] | None = "now"
        self._late: collections.deque[LiveFailure] = collections.deque(maxlen=_KEPT_LINES)
        self._tracebacks = Tracebacks()
        self._count = 0
        self._rank: int | None = None
        # The figures of a step whose number the next bar has, and of an evaluation that the next step has.
        self._waits: dict[str, float] | None = None
        self._loss_eval: float | None = None
        self._skipped = 0.0  # steps that fp16's loss scaler skipped, by lines of their own before that of the step
        # The steps that the program is to make by its lines of steps, and else by another line.
        self._planned: dict[bool, int] = {}
        self.loss: float | None = None  # the last one, with or without the number of its step
        self.limit = ""  # the program's line that a time limit of its own ends it
        self._stepped_at: int | None = None  # the last line of a step, or of a bar
        self.has_steps = False  # lines, not only bars
        self._asked_at: int | None = None  # the line in which srun was asked to end: it then kills its tasks
        self._bar: float | None = None

    def take(self, line: str) -> dict[str, float] | None:
        """The figures of a step by the fields of reader/pattern.py, `step` among them, if the line has one."""
        self._count += 1
        line = without_colours(line[:_LONGEST])
        row: dict[str, float] | None = None
        failures: list[Failure] = []
        if self._own is not None and (own := self._own[0].search(line)):
            values = values_of(line, own, self._own[1])
            row = _figures(values)
            self._plan(values, True)
        matches = find(line)
        failed = any(rule.pattern.kind == "failure" for _, rule in matches)
        before = self._tracebacks.count
        ends = self._tracebacks.take(self._count, line, failed) if before else None
        of_program = self._tracebacks.count < before and (failed or ends is not None)  # a traceback's last line
        if ends is not None:
            of_program = self._forget(ends[0]) or of_program
            message = self._tracebacks.with_source(ends[1])
            failures += [_live(pattern, message, ends[0]) for pattern in patterns_of(ends[1])]
        for match, rule in matches:
            kind = rule.pattern.kind
            if kind == "failure":
                message = self._tracebacks.with_source(
                    str(values_of(line, match, rule.pattern).get("words") or line.strip())
                )
                failures.append(_live(rule.pattern, message, self._count))
                if NO_MESSAGE.match(message):
                    self._tracebacks.wait(self._count, line, message)
            elif kind == "traceback" and match[0].startswith("Traceback"):
                self._tracebacks.begin(line[: match.start()])
            elif kind == "traceback":
                self._forget(self._tracebacks.caught(self._count))
            elif kind == "end" and rule.pattern.ended == "walltime":
                self.limit = hide_secrets(match[0].strip("[] "))[:400]
            elif kind == "fact":
                self._plan(values_of(line, match, rule.pattern), False)
            elif self._own is None and kind in ("step", "progress", "eval"):
                values = values_of(line, match, rule.pattern)
                row = row or self._by_dialect(kind, values, rank_of(line))
                if kind == "progress" and values.get("step") != self._bar:  # a closed bar is drawn again
                    self._stepped_at, self._bar = self._count, float_of(values, "step")
                # Of bars only that counts which has the number of a step: another one may count anything.
                if kind == "step" or (row is not None and row.get("step") == values.get("step")):
                    if "step" in values and "poch" not in line and (total := _TOTAL.match(line, match.end("step"))):
                        values = {"steps_planned": float(total[1]), **values}
                    self._plan(values, kind == "step")
        if row is not None:
            self._stepped_at, self.has_steps, self.limit = self._count, True, ""
        if failures:  # of one line the most specific: each exception is also an `error`
            failure = min(failures, key=plainness)
            now = time.monotonic() if self.moment == "now" else self.moment
            how = _how(line, failure, of_program)
            if self._asked_at is not None and line.startswith("srun: error: ") and "Killed" in line:
                how = "words" if self._count <= self._asked_at + _KEPT_LINES else how
            self._late.append(LiveFailure(failure, now, how))
        if line.startswith("srun: forcing job termination"):
            self._asked_at = self._count
        shown = row or self._waits or {}
        if "loss" in shown:
            self.loss = shown["loss"]
        elif self._own is None and "oss" in line and (alone := _LOSS.search(line)):
            self.loss = float(alone["loss"].replace(",", ""))
        if row is None or not sound_step(row.get("step", -1.0)):
            return None
        if self._loss_eval is not None:
            row, self._loss_eval = {"loss_eval": self._loss_eval, **row}, None
        return row

    def _forget(self, number: int) -> bool:
        """Drops the failure of a line; returns whether it was of a program."""
        dropped = [each for each in self._late if each.failure.place.line == number]
        for each in dropped:
            self._late.remove(each)
        return any(each.how == "program" for each in dropped)

    @property
    def planned(self) -> int:
        """How many steps the program is to make, by its log; 0 if that does not say."""
        return self._planned.get(True) or self._planned.get(False) or 0

    def _plan(self, values: dict[str, float | str], by_step: bool) -> None:
        planned = float_of(values, "steps_planned")
        if planned is not None and 1 <= planned < 1e15:
            self._planned[by_step] = int(planned)

    def _by_dialect(self, kind: str, values: dict[str, float | str], rank: int | None) -> dict[str, float] | None:
        """The row that is whole with these values. Of ranks that all print, the first one's lines count."""
        if kind == "eval":
            self._loss_eval = float_of(values, "loss_eval")
            return None
        if kind == "progress":
            step, waits = float_of(values, "step"), self._waits
            self._waits = None
            return None if waits is None or step is None else {**waits, "step": step}
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
        self._waits = row
        return None

    @property
    def failure(self) -> Failure | None:
        """The first failure in the last lines that no other caused, else the first one; None without one."""
        failures = [each.failure for each in self._late]
        late = [each for each in failures if each.place.line > self._count - _KEPT_LINES]
        return next((each for each in late if not each.echo), late[0] if late else None)

    def end_failures(self) -> list[LiveFailure]:
        """The failures after the last line of a step, or of a log without any, that ended something, or may have."""
        left = {id(failure) for failure in without_ignored([each.failure for each in self._late])}
        late = [
            each
            for each in self._late
            if id(each.failure) in left and (self._stepped_at is None or each.failure.place.line > self._stepped_at)
        ]
        # After steps it is of a command beside the training.
        if self._stepped_at is not None:
            late = [each for each in late if not _NEVER_BEGAN.match(each.failure.message)]
        return [each for each in late if not each.failure.echo or each.how != "words"]


def _how(line: str, failure: Failure, of_program: bool) -> Literal["program", "some", "words"]:
    if _KILLED.search(line) or _NOT_THERE.search(line.rstrip()):
        return "program"
    if failure.echo and not _FAILED.search(failure.message):
        return "words"
    if of_program:
        return "program"
    return "some" if failure.echo or _RAISED.match(line) or _SURE.search(line) else "words"


def _live(pattern: Pattern, message: str, number: int) -> Failure:
    place = Place("", number)
    return Failure(str(pattern.ended), hide_secrets(message)[:400], place, echo=pattern.echo, to_do=pattern.to_do)


def _figures(values: dict[str, float | str]) -> dict[str, float]:
    memory = {name: gib for name in MEMORY_FIELDS if (gib := float_of(values, name)) is not None}
    return {**row_of(values, None), **memory}
