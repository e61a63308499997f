"""A log line by line: every line against every pattern. What it finds is the truth that faster ways must equal."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from hpc_gpt.readers.dialects import dialects
from hpc_gpt.readers.fields import STEP_FACTS, STEP_FIELDS, scaled
from hpc_gpt.readers.part import Fact, Failure, Memory, Part, Place, Steps
from hpc_gpt.readers.pattern import Dialect, Pattern
from hpc_gpt.readers.prefix import rank_of, time_of, without_colours

_MOST_VALUES = 8  # distinct values kept of one fact
_MOST_FAILURES = 1000
_MOST_ARGUMENTS = 4000
_MOST_ROWS = 100_000  # of evaluations, saves, bars
LONGEST_LINE = 64_000  # characters of a line that are looked at


@dataclass(frozen=True)
class Armed:
    """A pattern of a dialect, ready to search with."""

    dialect: Dialect
    pattern: Pattern
    regex: re.Pattern[str]


@cache
def armed() -> tuple[Armed, ...]:
    """Every pattern of every dialect."""
    return tuple(Armed(dialect, each, re.compile(each.regex)) for dialect in dialects() for each in dialect.patterns)


@dataclass
class _Rows:
    """The lines of steps of one dialect in one part, before they are columns."""

    rows: list[dict[str, float]] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)


class LineReader:
    """Takes the lines of one log in order and gives its parts."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.parts = [Part(file)]
        self._rows: dict[str, _Rows] = {}

    def take(self, number: int, line: str) -> None:
        """One line, without its end. A carriage return in it parts two states of a bar."""
        if len(line) > LONGEST_LINE:
            self._leave_out("lines over 64,000 characters, cut")
            line = line[:LONGEST_LINE]
        for piece in without_colours(line).split("\r"):
            self._take(number, piece)

    def finish(self) -> list[Part]:
        """The parts, those without anything in them left out, but for the first."""
        self._close()
        return [part for part in self.parts if part.dialects or part is self.parts[0]]

    def _take(self, number: int, line: str) -> None:
        part = self.parts[-1]
        part.last_line = number
        found = [
            (match, each) for each in armed() if each.pattern.literal in line for match in each.regex.finditer(line)
        ]
        if not found:
            return
        at = time_of(line)
        if at is not None:
            part.first_at = at if part.first_at is None else part.first_at
            part.last_at = at
        rank = rank_of(line)
        steps = [(match, each) for match, each in found if each.pattern.kind == "step"]
        if steps:
            # A line is of one dialect: that whose match begins first, then the longest.
            _, winner = min(steps, key=lambda pair: (pair[0].start(), -pair[0].end()))
            found = [pair for pair in found if pair[1].pattern.kind != "step" or pair[1].dialect is winner.dialect]
        for match, each in found:
            self._apply(number, line, match, each, rank, at)

    def _apply(
        self, number: int, line: str, match: re.Match[str], each: Armed, rank: int | None, at: float | None
    ) -> None:
        pattern = each.pattern
        values = self._values(line, match, pattern)
        if pattern.kind == "start":
            self._start(number)
        elif pattern.kind == "step":
            self._step(number, values, each, rank, at)
        elif pattern.kind == "more":
            self._more(number, values, each, rank)
        part = self.parts[-1]
        part.last_line = number
        part.dialects[each.dialect.name] = part.dialects.get(each.dialect.name, 0) + 1
        place = Place(self.file, number)
        for name, value in pattern.facts.items():
            if name not in STEP_FIELDS:
                self._fact(name, value, place, each)
        match pattern.kind:
            case "fact" | "start":
                rank_params = values.pop("rank_params", None)
                if isinstance(rank_params, float):
                    part.rank_params.setdefault(str(values.pop("rank_name", "")), (rank_params, place))
                for name, value in values.items():
                    self._fact(name, value, place, each)
            case "argument":
                key = str(values.get("key", ""))
                if key and len(part.arguments) < _MOST_ARGUMENTS:
                    part.arguments.setdefault(key, (str(values.get("value", "")), place))
            case "total":
                for name, value in values.items():
                    part.totals.setdefault(name, Fact(value, place, each.dialect.name))
            case "progress":
                if isinstance(values.get("step"), float) and len(part.progress) < _MOST_ROWS:
                    elapsed = values.get("elapsed_s")
                    part.progress.append(
                        (float(values["step"]), elapsed if isinstance(elapsed, float) else None, number)
                    )
                if "steps_planned" in values:
                    self._fact("steps_planned", values["steps_planned"], place, each)
            case "eval":
                if isinstance(values.get("loss_eval"), float) and len(part.evals) < _MOST_ROWS:
                    step = values.get("step")
                    part.evals.append((step if isinstance(step, float) else None, float(values["loss_eval"]), number))
            case "save":
                if len(part.saves) < _MOST_ROWS:
                    step, took = values.get("step"), values.get("save_s")
                    part.saves.append(
                        (
                            step if isinstance(step, float) else None,
                            took if isinstance(took, float) else None,
                            number,
                        )
                    )
            case "memory":
                self._memory(values, rank, place)
            case "timers":
                self._timers(values)
            case "failure":
                self._failure(line, match, pattern, values, rank, at, place)
            case "end":
                assert pattern.ended
                if len(part.ends) < _MOST_FAILURES:
                    part.ends.append((pattern.ended, place))
                for name in ("job_id", "node"):
                    if name in values:
                        self._fact(name, values[name], place, each)

    @staticmethod
    def _values(line: str, match: re.Match[str], pattern: Pattern) -> dict[str, float | str]:
        texts = {name: text for name, text in match.groupdict().items() if text is not None}
        if pattern.keys:
            pieces = line[match.end() :].split(pattern.separator)
            for piece in pieces[:-1] if pattern.closed else pieces:
                key, colon, text = piece.partition(":")
                if colon and (name := pattern.keys.get(key.strip())):
                    texts.setdefault(name, text)
        if pattern.kind == "timers":
            return dict(texts)
        stated = {name: float(value) for name, value in pattern.facts.items() if name in STEP_FIELDS}
        return stated | {
            found[0]: found[1] for name, text in texts.items() if (found := scaled(name, text)) is not None
        }

    def _start(self, number: int) -> None:
        part = self.parts[-1]
        if self._rows or part.progress or part.totals or part.failures or part.ends:
            self._close()
            self.parts.append(Part(self.file, number, number))
        self.parts[-1].started = True

    def _close(self) -> None:
        for dialect, rows in self._rows.items():
            self.parts[-1].steps[dialect] = Steps.of(rows.rows, rows.lines)
        self._rows = {}

    def _step(
        self, number: int, values: Mapping[str, float | str], each: Armed, rank: int | None, at: float | None
    ) -> None:
        row = {name: value for name, value in values.items() if name in STEP_FIELDS and isinstance(value, float)}
        step = row.get("step")
        part, name = self.parts[-1], each.dialect.name
        rows = self._rows.get(name)
        if rows is not None:
            if rank is not None and part.step_rank is not None and rank != part.step_rank:
                return self._leave_out("lines of steps that other ranks print too")
            last = rows.rows[-1].get("step")
            if step is not None and last is not None and step == last:
                return self._leave_out("lines of a step that was printed before")
            if step is None and "epoch" in row and all(rows.rows[-1].get(key) == row[key] for key in row):
                return self._leave_out("lines of a step that was printed before")
            if step is not None and last is not None and step < last:
                self._close()
                self.parts.append(Part(self.file, number, number))
                part, rows = self.parts[-1], None
        if rows is None:
            rows = self._rows.setdefault(name, _Rows())
            part.step_rank = rank if part.step_rank is None else part.step_rank
        if at is not None and "at" not in row:
            row["at"] = at
        rows.rows.append(row)
        rows.lines.append(number)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def _more(self, number: int, values: Mapping[str, float | str], each: Armed, rank: int | None) -> None:
        rows = self._rows.get(each.dialect.name)
        if rows is None:
            return self._leave_out("figures of a step that no line before them names")
        if rank is not None and rank != self.parts[-1].step_rank:
            return self._leave_out("lines of steps that other ranks print too")
        for name, value in values.items():
            if name in STEP_FIELDS and isinstance(value, float):
                rows.rows[-1].setdefault(name, value)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def _facts_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place, each: Armed) -> None:
        for name in STEP_FACTS:
            if name in values:
                self._fact(name, values[name], place, each)
        if "memory_allocated_gib" in values or "memory_reserved_gib" in values:
            self._memory(values, rank, place)

    def _fact(self, name: str, value: str | int | float, place: Place, each: Armed) -> None:
        part = self.parts[-1]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        known = part.facts.setdefault(name, [])
        if len(known) < _MOST_VALUES and all(fact.value != value for fact in known):
            known.append(Fact(value, place, each.dialect.name))

    def _memory(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        named = values.get("rank")
        rank = int(named) if isinstance(named, float) else rank
        part = self.parts[-1]
        old = part.memory.get(rank, Memory(None, None, place))
        peaks = [
            max((each for each in (before, values.get(name)) if isinstance(each, float)), default=None)
            for before, name in ((old.allocated_gib, "memory_allocated_gib"), (old.reserved_gib, "memory_reserved_gib"))
        ]
        if peaks != [old.allocated_gib, old.reserved_gib]:
            part.memory[rank] = Memory(peaks[0], peaks[1], place)

    def _timers(self, values: Mapping[str, float | str]) -> None:
        pieces = str(values.get("value", "")).split("|")
        if "key" in values:
            pieces = [f"{values['key']}:{values['value']}"]
        for piece in pieces:
            name, colon, text = piece.rpartition(":")
            found = scaled("step_ms", text) if colon else None
            if found is not None and isinstance(found[1], float) and len(name) < 64:
                total, count = self.parts[-1].timers_s.get(name.strip(), (0.0, 0))
                self.parts[-1].timers_s[name.strip()] = (total + found[1], count + 1)

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
        if len(part.failures) >= _MOST_FAILURES:
            return self._leave_out("failures after the first 1,000")
        assert pattern.ended
        words = str(values.get("words") or line.strip())[:400]
        named, node = values.get("rank"), values.get("node")
        rank = int(named) if isinstance(named, float) else rank
        part.failures.append(Failure(pattern.ended, words, place, rank, str(node) if node else None, at, pattern.echo))
        return None

    def _leave_out(self, words: str) -> None:
        part = self.parts[-1]
        part.left_out[words] = part.left_out.get(words, 0) + 1


def read_lines(file: str, lines: Iterable[str]) -> list[Part]:
    """The parts of a log, given its lines without their ends."""
    reader = LineReader(file)
    for number, line in enumerate(lines, 1):
        reader.take(number, line)
    return reader.finish()
