"""The parts of a log as they grow, in bounded memory: what lines say is added to the last of them."""

import math
import re
from collections.abc import Mapping
from typing import Any

from hpc_gpt.reader.dialects.generic import TESTS
from hpc_gpt.reader.logs import Fact, Part, PeakMemory, Place
from hpc_gpt.reader.logs.matches import DialectPattern, cut_value
from hpc_gpt.reader.logs.step_rows import StepRows
from hpc_gpt.reader.logs.tracebacks import Tracebacks
from hpc_gpt.reader.pattern import MEMORY_FIELDS, scaled

_MOST_ROWS = 1 << 17  # lines of steps that are kept of a file
_MOST_VALUES = 8  # distinct values kept of one fact
MOST_PARTS = 2000
# How many are kept of a part, and of a file; the rest is counted.
_MOST = {
    "failures": (1000, 10_000),
    "ends": (1000, 10_000),
    "arguments": (4000, 40_000),
    "bars": (100_000, 100_000),
    "evaluations": (100_000, 100_000),
    "saves": (100_000, 100_000),
    "ranks' memory": (20_000, 100_000),
    "ranks' parameters": (20_000, 100_000),
    "timers": (1000, 20_000),
}
MOST_WORDS = 700  # characters of a failure: those of memory end with what other processes hold
LONGEST_LINE = 64_000  # characters of a line that are looked at
MOST_GIB = 1e6  # no GPU's memory holds more
ALL_TIMERS = 1024  # so many lines of timers of a part are all added up
SOME_TIMERS = 1024  # of the lines after them, one in so many
TOO_MANY_PARTS = f"lines of steps after {MOST_PARTS} restarts"
MOST_RANKS = 100_000
JOB_OVER = "*** JOB "  # slurmstepd's message about the end of a whole job
OTHER_RANKS = "lines of steps that other ranks print too"
PRINTED_BEFORE = "lines of a step that was printed before"
_TASK = re.compile(r"\s*\d{1,7}: ")  # the label of `srun --label`
OTHER_BARS = "bars whose goal is not the number of steps"
BARS, GENERIC = "tqdm", "generic"
_MOST_OF_HEADER = 4000


class GrowingParts:
    """The parts of one log so far, and how near the file is to its bounds."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parts = [Part(file)]
        self.rows: list[dict[str, StepRows]] = [{}]  # of each part, by dialect
        self.tracebacks = Tracebacks()
        # How near the file is to its bounds.
        self.full = False  # there are so many parts that no more lines of steps are read
        self.most_rows = _MOST_ROWS  # of one dialect in one part
        self.kept = 0  # rows of the file
        self.taken: dict[str, int] = {}  # by key of _MOST
        self.timer_lines: dict[str, int] = {}  # of this part, by name of the timer if each timer has its own lines
        # What a program said after the last line of a step, `after`: of the next part if its steps begin again.
        self.header: list[tuple[bool, str, Fact]] = []  # whether an argument, its name, the text or value
        self.after = 0
        self.banner = 0  # the last line by which a program may begin anew: what follows is no epoch
        self.begun = 0  # the line by which a program began to train in this part
        self.taken_lines: dict[str, str] = {}  # of this part, by dialect: the last line of a step that was taken

    def saw(self, at: float | None) -> None:
        """Notes the time of day of a line in which something was found."""
        part = self.parts[-1]
        if at is not None:
            part.first_at = at if part.first_at is None else part.first_at
            part.last_at = at

    def next_part(self, number: int) -> None:
        if len(self.parts) >= MOST_PARTS:
            self.full = True
            return
        part = self.parts[-1]
        part.last_line = max(number - 1, part.first_line)
        self.parts.append(Part(self.file, number, number))
        self.parts[-1].facts.update({name: part.facts[name] for name in (TESTS,) if name in part.facts})
        self.rows.append({})
        self.timer_lines, self.taken_lines, self.begun = {}, {}, 0

    def begin_again(self, number: int) -> None:
        """Opens a part as the steps go back. What was said since the last step is of the part that begins."""
        before, last = self.parts[-1], self._last_step_line()
        header = self.header if self.after == last else []
        self.next_part(min([number, *(fact.place.line for _, _, fact in header)]))
        part = self.parts[-1]
        if part is before:
            return
        part.started = part.banner = self.banner > last > 0
        for is_argument, name, fact in header:
            part.dialects[fact.dialect] = part.dialects.get(fact.dialect, 0) + 1
            if is_argument:
                part.arguments.setdefault(name, (fact.value, fact.place))
                if before.arguments.get(name) == (fact.value, fact.place):
                    del before.arguments[name]
                continue
            known = part.facts.setdefault(name, [])
            if all(each.value != fact.value for each in known):
                known.append(fact)
            if kept := [each for each in before.facts.get(name, ()) if each.place != fact.place]:
                before.facts[name] = kept
            else:
                before.facts.pop(name, None)

    def add_to_header(self, is_argument: bool, name: str, fact: Fact) -> None:
        last = self._last_step_line()
        if last and fact.place.line > last and fact.dialect != BARS:  # a bar is drawn again when it is closed
            self.header = self.header if self.after == last else []
            self.after = last
            if len(self.header) < _MOST_OF_HEADER:
                self.header.append((is_argument, name, fact))

    def has_ended(self, dialect: str) -> bool:
        """Whether a program printed its totals in this part: what it trains then is another training."""
        return any(fact.dialect == dialect for fact in self.parts[-1].totals.values())

    def _last_step_line(self) -> int:
        return max((rows.open_line for rows in self.rows[-1].values()), default=0)

    def saw_again(self, line: str, taken: str | None) -> None:
        """Notes a line of a step that repeats the line `taken` of its program: under a label of srun several ranks of a
        task printed it."""
        if line == taken and _TASK.match(line):
            self.parts[-1].tasks = True

    def saw_rank(self, rank: int, line: str) -> None:
        """Notes another rank that prints lines of steps, such as this one."""
        part = self.parts[-1]
        if rank not in part.other_ranks and len(part.other_ranks) < MOST_RANKS:
            part.other_ranks[rank] = not line.lstrip().startswith("[default")

    def rows_of(self, dialect: str, rank: int | None) -> StepRows:
        """The lines of steps of a dialect in this part. Only lines of the first line's rank are read."""
        part = self.parts[-1]
        if dialect not in self.rows[-1]:
            self.rows[-1][dialect] = StepRows()
            part.step_rank = rank if part.step_rank is None else part.step_rank
        return self.rows[-1][dialect]

    def bound_rows(self, rows: StepRows, before: int) -> None:
        """Keeps the rows of the file within MOST_ROWS after `rows` grew from `before` lines.

        The longest parts are thinned first. How many rows a part keeps depends on the final numbers of lines, not on
        when this was called.
        """
        most = self.most_rows
        self.kept += min(rows.count, most) - min(before, most)
        if self.kept > _MOST_ROWS:
            every = [each for part in self.rows for each in part.values()]
            while (kept := sum(min(each.count, most) for each in every)) > _MOST_ROWS:
                most //= 2
            self.most_rows, self.kept = most, kept
            for each in every:
                each.keep_at_most(most)
        elif rows.count > most:
            rows.keep_at_most(most)

    def memory_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """Adds the memory of a line of steps, if it has any."""
        if any(name in values for name in MEMORY_FIELDS):
            self.memory(values, rank, place)

    def fact(self, name: str, value: str | int | float, place: Place, rule: DialectPattern) -> None:
        """Adds a value of a field, if it is new."""
        part = self.parts[-1]
        if isinstance(value, float):
            if not math.isfinite(value):
                return self.leave_out(f"impossible figures of {name}")
            value = int(value) if value.is_integer() else value
        value = cut_value(value)
        self.add_to_header(False, name, Fact(value, place, rule.dialect.name))
        known = part.facts.setdefault(name, [])
        if name == "steps_planned":
            self._drop_bars(value, rule)
        if all(fact.value != value for fact in known):
            if len(known) < _MOST_VALUES:
                known.append(Fact(value, place, rule.dialect.name))
            elif not isinstance(value, str) and not isinstance(known[-1].value, str) and value > known[-1].value:
                # Of what grows in many steps, such as a batch, the last value is kept.
                known[-1] = Fact(value, place, rule.dialect.name)
        return None

    def planned(self, rule: DialectPattern) -> list[Any]:
        """The goals that other dialects than that of a bar state: a bar with another goal counts no steps."""
        known = self.parts[-1].facts.get("steps_planned", ())
        return [fact.value for fact in known if fact.dialect != rule.dialect.name]

    def _drop_bars(self, planned: Any, rule: DialectPattern) -> None:
        """Drops the bars before a program's own goal if theirs is another, such as those of a tokenizer or a loader."""
        part = self.parts[-1]
        bars = [fact for fact in part.facts["steps_planned"] if fact.dialect == BARS and fact.value != planned]
        if bars and rule.dialect.name != BARS:
            self.leave_out(OTHER_BARS, len(part.progress))
            part.progress = []
            known = part.facts["steps_planned"]
            known[:] = [fact for fact in known if fact not in bars]

    def memory(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """Raises the peaks of a rank; the rank in the values takes precedence over the label of the line."""
        named = whole_rank(values.get("rank"))
        rank = rank if named is None else named
        part = self.parts[-1]
        for name in MEMORY_FIELDS:
            gib = values.get(name)
            if isinstance(gib, float) and not 0 <= gib <= MOST_GIB:
                self.leave_out(f"impossible figures of {name}")
                values = {key: value for key, value in values.items() if key != name}
        if rank not in part.memory and not self.room("ranks' memory", len(part.memory)):
            return
        at_start = not (self.rows[-1] or part.progress or "after_steps" in values)
        old = part.memory.get(rank, PeakMemory(None, None, place))
        if old.at_start and not at_start:
            old = PeakMemory(None, None, place)
        peaks = [
            max((each for each in (before, values.get(name)) if isinstance(each, float)), default=None)
            for before, name in zip((old.allocated_gib, old.reserved_gib), MEMORY_FIELDS, strict=True)
        ]
        if peaks != [old.allocated_gib, old.reserved_gib]:
            part.memory[rank] = PeakMemory(peaks[0], peaks[1], place, at_start)

    def timers(self, values: Mapping[str, float | str]) -> None:
        """Adds one line of timers. Of very many lines only some are added up and counted."""
        key = str(values.get("key", ""))[:64]
        pieces = [f"{key}:{values.get('value', '')}"] if key else str(values.get("value", "")).split("|")
        timers = self.parts[-1].timers_s
        if key and key not in self.timer_lines and not self.room("timers", len(self.timer_lines)):
            return
        nth = self.timer_lines.get(key, 0)
        self.timer_lines[key] = nth + 1
        if nth >= ALL_TIMERS and nth % SOME_TIMERS:
            return
        for piece in pieces:
            name, colon, text = piece.rpartition(":")
            name = name.strip()
            found = scaled("step_ms", text) if colon else None
            if found is None or not isinstance(found[1], float) or not math.isfinite(found[1]) or len(name) >= 64:
                continue
            if name in timers or self.room("timers", len(timers)):
                total, count = timers.get(name, (0.0, 0))
                timers[name] = (total + found[1], count + 1)

    def room(self, what: str, count: int, wanted: int = 1) -> int:
        """How many more of `wanted` a part may have that has `count` of these; the others are counted as left out."""
        of_part, of_file = _MOST[what]
        taken = self.taken.get(what, 0)
        room = max(0, min(wanted, of_part - count, of_file - taken))
        if room < wanted:
            self.leave_out(f"{what} beyond the limit", wanted - room)
        self.taken[what] = taken + room
        return room

    def count(self, dialect: str, lines: int = 1) -> None:
        """Counts lines of a dialect in the part."""
        dialects = self.parts[-1].dialects
        dialects[dialect] = dialects.get(dialect, 0) + lines

    def leave_out(self, what: str, count: int = 1) -> None:
        """Counts what is skipped of the part."""
        part = self.parts[-1]
        part.left_out[what] = part.left_out.get(what, 0) + count


def whole_rank(value: object) -> int | None:
    """The rank that a figure names, None if it names none."""
    if not isinstance(value, float) or not math.isfinite(value) or not 0 <= value < 1e7:
        return None
    return int(value)
