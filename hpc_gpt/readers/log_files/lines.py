"""A log line by line: every line against every pattern. What it finds is the truth that faster ways must equal."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from hpc_gpt.readers.fields import STEP_FACTS, STEP_FIELDS, scaled
from hpc_gpt.readers.log_files.armed import Armed, Found, find
from hpc_gpt.readers.log_files.match_values import LONGEST_TEXT, cut, float_of, row_of, values_of
from hpc_gpt.readers.log_files.prefix import rank_of, time_of, without_colours
from hpc_gpt.readers.log_files.sound import sound_gib, sound_step, whole_rank
from hpc_gpt.readers.log_files.step_rows import MOST_ROWS, StepRows
from hpc_gpt.readers.part import Fact, Failure, Memory, Part, Place
from hpc_gpt.readers.pattern import Pattern
from hpc_gpt.secrets import hide_secrets, is_secret

_MOST_VALUES = 8  # distinct values kept of one fact
MOST_PARTS = 2000
# Of a part, and of a file: what comes after is counted.
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
LONGEST_LINE = 64_000  # characters of a line that are looked at
ALL_TIMERS = 1024  # lines of timers of a part that are all added up
SOME_TIMERS = 1024  # of those after them, each so many-th
FULL = f"lines of steps after {MOST_PARTS} restarts"
OTHER_RANKS = "lines of steps that other ranks print too"
PRINTED_BEFORE = "lines of a step that was printed before"


class LineReader:
    """Takes the lines of one log in order and gives its parts."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parts = [Part(file)]
        self.rows: list[dict[str, StepRows]] = [{}]  # of each part, by dialect
        self.full = False  # so many parts that no more lines of steps are taken
        self._most_rows = MOST_ROWS  # of one dialect in one part
        self._taken: dict[str, int] = {}
        self._kept = 0
        self.timer_lines: dict[str, int] = {}  # of this part, by the timer's name where a line is of one

    def bounds(self) -> dict[str, Any]:
        """How near the reader is to its bounds, as plain values."""
        return {
            "full": self.full,
            "most_rows": self._most_rows,
            "kept": self._kept,
            "taken": self._taken,
            "timer_lines": self.timer_lines,
        }

    def set_bounds(self, bounds: dict[str, Any]) -> None:
        """As `bounds` gave them."""
        self.full, self._most_rows, self._kept = bounds["full"], bounds["most_rows"], bounds["kept"]
        self._taken, self.timer_lines = bounds["taken"], bounds["timer_lines"]

    def take(self, number: int, line: str) -> None:
        """One line, without its end. A carriage return in it parts two states of a bar."""
        for piece in without_colours(line).split("\r"):
            self.apply(number, *self.look(piece))

    def look(self, piece: str) -> tuple[str, list[Found]]:
        """A line or a piece of one, cut to what is looked at, and what is found in it."""
        if len(piece) > LONGEST_LINE:
            self.leave_out("lines over 64,000 characters, cut")
            piece = piece[:LONGEST_LINE]
        return piece, find(piece)

    def apply(self, number: int, line: str, found: list[Found]) -> None:
        """What was found in a line, into the part that it is of."""
        if not found:
            return
        at, rank = time_of(line), rank_of(line)
        self.saw(at)
        for match, each in found:
            self._apply(number, line, match, each, rank, at)

    def saw(self, at: float | None) -> None:
        """The time of day of a line with something in it."""
        part = self.parts[-1]
        if at is not None:
            part.first_at = at if part.first_at is None else part.first_at
            part.last_at = at

    def finish(self, last_line: int) -> list[Part]:
        """The parts, those without anything in them left out, but for the first. The reader is used up."""
        self.parts[-1].last_line = max(last_line, self.parts[-1].first_line)
        for part, rows in zip(self.parts, self.rows, strict=True):
            part.steps = {dialect: each.steps(part.left_out) for dialect, each in rows.items()}
        return [part for part in self.parts if part.dialects or part is self.parts[0]]

    def _apply(
        self, number: int, line: str, match: re.Match[str], each: Armed, rank: int | None, at: float | None
    ) -> None:
        pattern = each.pattern
        values = values_of(line, match, pattern)
        if pattern.kind == "start":
            self._start(number)
        elif pattern.kind == "step":
            self._step(number, values, each, rank, at)
        elif pattern.kind == "more":
            self._more(number, values, each, rank)
        part = self.parts[-1]
        part.dialects[each.dialect.name] = part.dialects.get(each.dialect.name, 0) + 1
        place = Place(self.file, number)
        for name, value in pattern.facts.items():
            if name not in STEP_FIELDS:
                self.fact(name, value, place, each)
        match pattern.kind:
            case "fact" | "start":
                rank_params, name = values.pop("rank_params", None), str(values.pop("rank_name", ""))[:LONGEST_TEXT]
                if isinstance(rank_params, float) and (
                    name in part.rank_params or self._room("ranks' parameters", len(part.rank_params))
                ):
                    part.rank_params.setdefault(name, (rank_params, place))
                for name, value in values.items():
                    self.fact(name, value, place, each)
            case "argument":
                key, value = str(values.get("key", ""))[:LONGEST_TEXT], str(values.get("value", ""))
                wanted = key and key not in part.arguments and not is_secret(key, value)
                if wanted and self._room("arguments", len(part.arguments)):
                    part.arguments[key] = (cut(value), place)
            case "total":
                for name, value in values.items():
                    part.totals.setdefault(name, Fact(cut(value), place, each.dialect.name))
            case "progress":
                step = float_of(values, "step")
                if step is not None and self._room("bars", len(part.progress)):
                    part.progress.append((step, float_of(values, "elapsed_s"), number))
                if "steps_planned" in values:
                    self.fact("steps_planned", values["steps_planned"], place, each)
            case "eval":
                loss = float_of(values, "loss_eval")
                if loss is not None and self._room("evaluations", len(part.evals)):
                    part.evals.append((float_of(values, "step"), loss if math.isfinite(loss) else math.nan, number))
            case "save":
                if self._room("saves", len(part.saves)):
                    part.saves.append((float_of(values, "step"), float_of(values, "save_s"), number))
            case "memory":
                self.memory(values, rank, place)
            case "timers":
                self.timers(values)
            case "failure":
                self._failure(line, match, pattern, values, rank, at, place)
            case "end":
                assert pattern.ended
                if self._room("ends", len(part.ends)):
                    part.ends.append((pattern.ended, place))
                for name in ("job_id", "node"):
                    if name in values:
                        self.fact(name, values[name], place, each)

    def _start(self, number: int) -> None:
        part = self.parts[-1]
        if self.rows[-1] or part.progress or part.totals or part.failures or part.ends:
            self._next_part(number)
        self.parts[-1].started = True

    def _next_part(self, number: int) -> None:
        if len(self.parts) >= MOST_PARTS:
            self.full = True
            return
        part = self.parts[-1]
        part.last_line = max(number - 1, part.first_line)
        self.parts.append(Part(self.file, number, number))
        self.rows.append({})
        self.timer_lines = {}

    def _step(
        self, number: int, values: Mapping[str, float | str], each: Armed, rank: int | None, at: float | None
    ) -> None:
        if self.full:
            return self.leave_out(FULL)
        row = row_of(values, at)
        step = row.get("step")
        if step is not None and not sound_step(step):
            return self.leave_out("lines of steps of a number that cannot be")
        rows = self.rows[-1].get(each.dialect.name)
        if rows is not None:
            if rank is not None and self.parts[-1].step_rank is not None and rank != self.parts[-1].step_rank:
                self.memory_of_step(values, rank, Place(self.file, number))
                if rows.lacks_first_loss and "loss" in row and step == rows.last_step:
                    # Of a pipeline only the last stage knows the loss: its lines are taken from here on.
                    rows.open_row["loss"], self.parts[-1].step_rank = row["loss"], rank
                return self.leave_out(OTHER_RANKS)
            last = rows.last_step
            if step is not None and last is not None and step == last:
                return self.leave_out(PRINTED_BEFORE)
            if (
                step is None
                and "epoch" in row
                and all(rows.open_row.get(key) == row[key] for key in row if key != "at")
            ):
                return self.leave_out(PRINTED_BEFORE)
            if step is not None and last is not None and step < last:
                self._next_part(number)
        if self.full:
            return self.leave_out(FULL)
        rows = self.rows_of(each.dialect.name, rank)
        rows.add(row, number)
        self.bound_rows(rows, rows.count - 1)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def rows_of(self, dialect: str, rank: int | None) -> StepRows:
        """The lines of steps of a dialect in this part; a first one's rank is that whose lines are taken."""
        part = self.parts[-1]
        if dialect not in self.rows[-1]:
            self.rows[-1][dialect] = StepRows()
            part.step_rank = rank if part.step_rank is None else part.step_rank
        return self.rows[-1][dialect]

    def bound_rows(self, rows: StepRows, before: int) -> None:
        """Keep the rows of the file within MOST_ROWS, now that some have more than `before`.

        The longest parts are thinned first. How many a part keeps follows from the numbers of lines in the end, not
        from when this was called.
        """
        most = self._most_rows
        self._kept += min(rows.count, most) - min(before, most)
        if self._kept > MOST_ROWS:
            every = [each for part in self.rows for each in part.values()]
            while (kept := sum(min(each.count, most) for each in every)) > MOST_ROWS:
                most //= 2
            self._most_rows, self._kept = most, kept
            for each in every:
                each.keep_at_most(most)
        elif rows.count > most:
            rows.keep_at_most(most)

    def _more(self, number: int, values: Mapping[str, float | str], each: Armed, rank: int | None) -> None:
        rows = self.rows[-1].get(each.dialect.name)
        if rows is None:
            return self.leave_out("figures of a step that no line before them names")
        if rank is not None and rank != self.parts[-1].step_rank:
            return self.leave_out(OTHER_RANKS)
        for name, value in values.items():
            if name in STEP_FIELDS and isinstance(value, float):
                rows.open_row.setdefault(name, value)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def _facts_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place, each: Armed) -> None:
        for name in STEP_FACTS:
            if name in values:
                self.fact(name, values[name], place, each)
        self.memory_of_step(values, rank, place)

    def memory_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """What a line of steps says of memory, if anything."""
        if "memory_allocated_gib" in values or "memory_reserved_gib" in values:
            self.memory(values, rank, place)

    def fact(self, name: str, value: str | int | float, place: Place, each: Armed) -> None:
        part = self.parts[-1]
        if isinstance(value, float):
            if not math.isfinite(value):
                return self.leave_out(f"figures of {name} that cannot be")
            value = int(value) if value.is_integer() else value
        value = cut(value)
        known = part.facts.setdefault(name, [])
        if all(fact.value != value for fact in known):
            if len(known) < _MOST_VALUES:
                known.append(Fact(value, place, each.dialect.name))
            elif _is_more(value, known[-1].value):
                # What grows in many steps, as a batch does, is known by where it got to.
                known[-1] = Fact(value, place, each.dialect.name)
        return None

    def memory(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        named = whole_rank(values.get("rank"))
        rank = rank if named is None else named
        part = self.parts[-1]
        for name in ("memory_allocated_gib", "memory_reserved_gib"):
            gib = values.get(name)
            if isinstance(gib, float) and not sound_gib(gib):
                self.leave_out(f"figures of {name} that cannot be")
                values = {key: value for key, value in values.items() if key != name}
        if rank not in part.memory and not self._room("ranks' memory", len(part.memory)):
            return
        old = part.memory.get(rank, Memory(None, None, place))
        peaks = [
            max((each for each in (before, values.get(name)) if isinstance(each, float)), default=None)
            for before, name in ((old.allocated_gib, "memory_allocated_gib"), (old.reserved_gib, "memory_reserved_gib"))
        ]
        if peaks != [old.allocated_gib, old.reserved_gib]:
            part.memory[rank] = Memory(peaks[0], peaks[1], place)

    def timers(self, values: Mapping[str, float | str]) -> None:
        """Of very many lines of timers some are added up: their count tells of how many."""
        key = str(values.get("key", ""))[:64]
        pieces = [f"{key}:{values['value']}"] if key else str(values.get("value", "")).split("|")
        timers = self.parts[-1].timers_s
        if key and key not in self.timer_lines and not self._room("timers", len(self.timer_lines)):
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
            if name in timers or self._room("timers", len(timers)):
                total, count = timers.get(name, (0.0, 0))
                timers[name] = (total + found[1], count + 1)

    def _failure(
        self,
        line: str,
        match: re.Match[str],
        pattern: Pattern,
        values: Mapping[str, float | str],
        rank: int | None,
        at: float | None,
        place: Place,
    ) -> None:
        part = self.parts[-1]
        if not self._room("failures", len(part.failures)):
            return
        assert pattern.ended
        words = hide_secrets(str(values.get("words") or line.strip())[:1000])[:400]
        named, node = whole_rank(values.get("rank")), values.get("node")
        rank = rank if named is None else named
        part.failures.append(Failure(pattern.ended, words, place, rank, str(node) if node else None, at, pattern.echo))

    def _room(self, what: str, count: int) -> bool:
        """Whether one more is taken where a part has `count`; one that is not is counted."""
        of_part, of_file = _MOST[what]
        if count >= of_part or self._taken.get(what, 0) >= of_file:
            self.leave_out(f"{what} after so many")
            return False
        self._taken[what] = self._taken.get(what, 0) + 1
        return True

    def leave_out(self, words: str, count: int = 1) -> None:
        part = self.parts[-1]
        part.left_out[words] = part.left_out.get(words, 0) + count


def _is_more(value: str | int | float, other: str | int | float) -> bool:
    return not isinstance(value, str) and not isinstance(other, str) and value > other


def read_lines(file: str, lines: Iterable[str]) -> list[Part]:
    """The parts of a log, given its lines without their ends."""
    reader = LineReader(file)
    number = 0
    for number, line in enumerate(lines, 1):
        reader.take(number, line)
    return reader.finish(number)
