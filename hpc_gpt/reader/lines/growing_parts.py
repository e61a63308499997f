"""The parts of a log while it is read, in bounded memory: each line adds to the last part."""

import math
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from hpc_gpt.reader.lines.fields import EPOCHS, MEMORY_FIELDS, TESTS, scaled
from hpc_gpt.reader.lines.matches import ROLE_HOST, DialectPattern, cut_value
from hpc_gpt.reader.lines.part import Fact, Part, PeakMemory, Place
from hpc_gpt.reader.lines.step_rows import StepRows
from hpc_gpt.reader.lines.tracebacks import Tracebacks

MAX_ROWS = 1 << 17  # lines of steps kept per file
MAX_VALUES = 8  # distinct values kept per fact
MOST_PARTS = 2000
# The most entries kept per part and per file; the others are only counted.
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
MOST_WORDS = 700  # characters of a failure that are kept: a message about memory ends with the share of other processes
LONGEST_LINE = 64_000  # characters of a line that are searched
MOST_GIB = 1e6  # no GPU has more memory
ALL_TIMERS = 1024  # the first lines of timers of a part, which are all added up
SOME_TIMERS = 1024  # after these, one line in so many is added up
TOO_MANY_PARTS = f"lines of steps after {MOST_PARTS} restarts"
MOST_RANKS = 100_000
JOB_OVER = "*** JOB "  # slurmstepd's message about the end of a whole job
OTHER_RANKS = "lines of steps that other ranks print too"
PRINTED_BEFORE = "lines of a step that was printed before"
_TASK = re.compile(r"\s*\d{1,7}: ")  # the label of `srun --label`
OTHER_BARS = "bars whose goal is not the number of steps"
BARS, GENERIC = "tqdm", "generic"
_MOST_OF_HEADER = 4000
_MIN_STEPS_OF_BAR = 3


class GrowingParts:
    """The parts of one log so far, and how near the file is to its bounds."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parts = [Part(file)]
        self.rows: list[dict[str, StepRows]] = [{}]  # per part, by dialect
        self.bar_totals: list[list[float]] = [[]]  # per part, for each entry of its progress, NaN if not known
        self.tracebacks = Tracebacks()
        # Counts that show how near the file is to its bounds.
        self.full = False  # MOST_PARTS is reached: no more lines of steps are read
        self.most_rows = MAX_ROWS  # rows per dialect and part
        self.kept_rows = 0  # rows kept of the file
        self.entries: dict[str, int] = {}  # key of _MOST -> entries kept of the file
        self.timer_lines: dict[str, int] = {}  # lines of this part, by timer if each has its own lines
        # The facts after the last line of a step, `after`: they belong to the next part if the steps begin again.
        self.header: list[tuple[bool, str, Fact]] = []  # (is an argument, its name, its value)
        self.after = 0
        self.banner = 0  # the last line that may begin another training, and not another epoch
        self.begun = 0  # the line with which a program began to train in this part
        self.taken_lines: dict[str, str] = {}  # by dialect, the last line of a step taken in this part

    def note_time(self, at: float | None) -> None:
        """Notes the time of day of a line with matches."""
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
        self.bar_totals.append([])
        self.timer_lines, self.taken_lines, self.begun = {}, {}, 0

    def begin_again(self, number: int, step: float = -1.0) -> None:
        """Opens a part because the steps go back, to `step`. The facts since the last step move to the new part, and so
        do evaluations before its first step."""
        before, last = self.parts[-1], self._last_step_line()
        header = self.header if self.after == last else []
        evals = [one for one in before.evals if one[2] > last and one[0] is not None and one[0] <= step]
        self.next_part(min([number, *(fact.place.line for _, _, fact in header), *(line for _, _, line in evals)]))
        part = self.parts[-1]
        if part is before:
            return
        part.evals = evals
        before.evals = [one for one in before.evals if one not in evals]
        part.started = part.banner = self.banner > last > 0
        for is_argument, name, fact in header:
            part.dialects[fact.dialect] = part.dialects.get(fact.dialect, 0) + 1
            if is_argument:
                part.arguments.setdefault(name, (fact.value, fact.place))
                if before.arguments.get(name) == (fact.value, fact.place):
                    del before.arguments[name]
                continue
            facts = part.facts.setdefault(name, [])
            if all(known.value != fact.value for known in facts):
                facts.append(fact)
            if remaining := [stated for stated in before.facts.get(name, ()) if stated.place != fact.place]:
                before.facts[name] = remaining
            else:
                before.facts.pop(name, None)

    def add_to_header(self, is_argument: bool, name: str, fact: Fact) -> None:
        last = self._last_step_line()
        if last and fact.place.line > last and fact.dialect != BARS:  # a closed bar is drawn again
            self.header = self.header if self.after == last else []
            self.after = last
            if len(self.header) < _MOST_OF_HEADER:
                self.header.append((is_argument, name, fact))

    def has_ended(self, dialect: str) -> bool:
        """Whether a program printed its totals in this part, or counts epochs: an earlier is of another training."""
        return dialect == EPOCHS or any(fact.dialect == dialect for fact in self.parts[-1].totals.values())

    def failed_after_steps(self) -> bool:
        """Whether a failure is later than the last step or bar of this part, and than a step that was made: a bar that
        begins after it is of another start."""
        part = self.parts[-1]
        if not part.failures or not (self.rows[-1] or any(step > 1 for step, _, _ in part.progress[-1:])):
            return False
        last = max([self._last_step_line(), *(line for _, _, line in part.progress[-1:])])
        return any(failure.place.line > last and not failure.echo for failure in part.failures[-8:])

    def _last_step_line(self) -> int:
        return max((rows.open_line for rows in self.rows[-1].values()), default=0)

    def note_repeated(self, line: str, taken: str | None) -> None:
        """Notes that a line of a step repeats the line `taken` of its program. With srun's label this means that
        several ranks of a task print it."""
        if line == taken and _TASK.match(line):
            self.parts[-1].tasks = True

    def note_rank(self, rank: int, line: str) -> None:
        """Notes another rank that prints lines of steps; `line` is one of them."""
        part = self.parts[-1]
        if rank not in part.other_ranks and len(part.other_ranks) < MOST_RANKS:
            part.other_ranks[rank] = not line.lstrip().startswith("[default") and not ROLE_HOST.match(line)

    def rows_of(self, dialect: str, rank: int | None) -> StepRows:
        """The lines of steps of a dialect in this part, added if new. Only lines of the first line's rank are read."""
        part = self.parts[-1]
        if dialect not in self.rows[-1]:
            self.rows[-1][dialect] = StepRows()
            part.step_rank = rank if part.step_rank is None else part.step_rank
        return self.rows[-1][dialect]

    def bound_rows(self, rows: StepRows, before: int) -> None:
        """Keeps the rows of the file within MAX_ROWS after `rows` grew from `before` lines.

        The longest parts are thinned first. How many rows a part keeps depends on the final numbers of lines, not on
        when this was called.
        """
        most = self.most_rows
        self.kept_rows += min(rows.count, most) - min(before, most)
        if self.kept_rows > MAX_ROWS:
            every = [table_rows for part in self.rows for table_rows in part.values()]
            while (kept_rows := sum(min(table_rows.count, most) for table_rows in every)) > MAX_ROWS:
                most //= 2
            self.most_rows, self.kept_rows = most, kept_rows
            for table_rows in every:
                table_rows.keep_at_most(most)
        elif rows.count > most:
            rows.keep_at_most(most)

    def memory_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """Adds the memory of a line of steps, if it has any."""
        if any(name in values for name in MEMORY_FIELDS):
            self.memory(values, rank, place)

    def fact(self, name: str, value: str | int | float, place: Place, rule: DialectPattern) -> None:
        """Adds a value of a field if it is new."""
        part = self.parts[-1]
        if isinstance(value, float):
            if not math.isfinite(value):
                return self.leave_out(f"impossible figures of {name}")
            value = int(value) if value.is_integer() else value
        value = cut_value(value)
        self.add_to_header(False, name, Fact(value, place, rule.dialect.name))
        facts = part.facts.setdefault(name, [])
        if name == "steps_planned":
            self._drop_bars(value, rule)
        if all(fact.value != value for fact in facts):
            if len(facts) < MAX_VALUES:
                facts.append(Fact(value, place, rule.dialect.name))
            elif not isinstance(value, str) and value > max(
                (fact.value for fact in facts if not isinstance(fact.value, str)), default=math.inf
            ):
                # A field that grows in many steps, such as a batch, keeps its largest value.
                facts[-1] = Fact(value, place, rule.dialect.name)
        return None

    def planned(self, rule: DialectPattern) -> list[Any]:
        """The goals that dialects other than the bar's state: a bar with another goal does not count steps."""
        goals = self.parts[-1].facts.get("steps_planned", ())
        return [fact.value for fact in goals if fact.dialect != rule.dialect.name]

    def _drop_bars(self, planned: Any, rule: DialectPattern) -> None:
        """Drops earlier bars whose goal is not the program's, such as bars of a tokenizer or a loader."""
        part = self.parts[-1]
        bars = [fact for fact in part.facts["steps_planned"] if fact.dialect == BARS and fact.value != planned]
        if bars and rule.dialect.name != BARS:
            self.leave_out(OTHER_BARS, len(part.progress))
            part.progress = []
            self.bar_totals[-1] = []
            goals = part.facts["steps_planned"]
            goals[:] = [fact for fact in goals if fact not in bars]

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
        if rank not in part.memory and not self.reserve("ranks' memory", len(part.memory)):
            return
        at_start = not (self.rows[-1] or part.progress or "after_steps" in values)
        old = part.memory.get(rank, PeakMemory(None, None, place))
        if old.at_start and not at_start:
            old = PeakMemory(None, None, place)
        peaks = [
            max((gib for gib in (before, values.get(name)) if isinstance(gib, float)), default=None)
            for before, name in zip((old.allocated_gib, old.reserved_gib), MEMORY_FIELDS, strict=True)
        ]
        if peaks != [old.allocated_gib, old.reserved_gib]:
            part.memory[rank] = PeakMemory(peaks[0], peaks[1], place, at_start)

    def timers(self, values: Mapping[str, float | str]) -> None:
        """Adds one line of timers. Only some lines are added up and counted if there are very many."""
        key = str(values.get("key", ""))[:64]
        pieces = [f"{key}:{values.get('value', '')}"] if key else str(values.get("value", "")).split("|")
        timers = self.parts[-1].timers_s
        if key and key not in self.timer_lines and not self.reserve("timers", len(self.timer_lines)):
            return
        nth = self.timer_lines.get(key, 0)
        self.timer_lines[key] = nth + 1
        if nth >= ALL_TIMERS and nth % SOME_TIMERS:
            return
        for piece in pieces:
            name, colon, text = piece.rpartition(":")
            name = name.strip()
            figure = scaled("step_ms", text) if colon else None
            if figure is None or not isinstance(figure[1], float) or not math.isfinite(figure[1]) or len(name) >= 64:
                continue
            if name in timers or self.reserve("timers", len(timers)):
                total, count = timers.get(name, (0.0, 0))
                timers[name] = (total + figure[1], count + 1)

    def reserve(self, what: str, count: int, wanted: int = 1) -> int:
        """Takes up to `wanted` entries for a part with `count` of them; returns how many fit, and counts the others."""
        of_part, of_file = _MOST[what]
        taken = self.entries.get(what, 0)
        room = max(0, min(wanted, of_part - count, of_file - taken))
        if room < wanted:
            self.leave_out(f"{what} beyond the limit", wanted - room)
        self.entries[what] = taken + room
        return room

    def count(self, dialect: str, lines: int = 1) -> None:
        """Counts lines of a dialect in the part."""
        dialects = self.parts[-1].dialects
        dialects[dialect] = dialects.get(dialect, 0) + lines

    def leave_out(self, what: str, count: int = 1) -> None:
        """Counts lines or figures of the part that are skipped, by reason."""
        part = self.parts[-1]
        part.left_out[what] = part.left_out.get(what, 0) + count


def whole_rank(value: object) -> int | None:
    """The rank that a value gives, None if it is not a rank."""
    if not isinstance(value, float) or not math.isfinite(value) or not 0 <= value < 1e7:
        return None
    return int(value)


def drop_nested_bars(part: Part, totals: list[float]) -> None:
    """Drops the bars of a part, with these totals, that count something other than the steps of its training, such as
    the batches of an evaluation within a step. The steps' bar advances by several steps without another bar between,
    which a bar of epochs does not, and takes the longest."""
    alike = [
        (total, list(bars)) for total, bars in groupby(zip(totals, part.progress, strict=True), lambda bar: bar[0])
    ]
    took_s: dict[float, float] = {}
    for total, bars in alike:
        if len({step for _, (step, _, _) in bars}) >= _MIN_STEPS_OF_BAR:
            elapsed_s = max(elapsed_s or 0.0 for _, (_, elapsed_s, _) in bars)
            took_s[total] = max(took_s.get(total, 0.0), elapsed_s)
    took_s.pop(math.nan, None)
    if len(set(totals)) < 2 or not took_s:
        return
    main = max(took_s, key=lambda total: took_s[total])
    of_training = [bar for total, bar in zip(totals, part.progress, strict=True) if total == main or math.isnan(total)]
    left_out = len(part.progress) - len(of_training)
    if left_out:
        part.progress = of_training
        part.left_out[OTHER_BARS] = part.left_out.get(OTHER_BARS, 0) + left_out
        goals = part.facts.get("steps_planned", [])
        goals[:] = [fact for fact in goals if fact.dialect != BARS or fact.value == main]
