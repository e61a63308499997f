"""A log read line by line: every line against every pattern. The faster reader must find the same."""

import math
import re
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np

from hpc_gpt.readers.dialects.generic import TESTS
from hpc_gpt.readers.logs import Fact, Failure, Part, PeakMemory, Place
from hpc_gpt.readers.logs.matches import (
    LONGEST_TEXT,
    DialectPattern,
    Found,
    cut_value,
    find,
    float_of,
    node_of,
    rank_of,
    row_of,
    time_of,
    values_of,
)
from hpc_gpt.readers.logs.tracebacks import NO_MESSAGE, Tracebacks, node_of_label, patterns_of
from hpc_gpt.readers.pattern import MEMORY_FIELDS, STEP_FACTS, STEP_FIELDS, scaled
from hpc_gpt.readers.steps import StepRows, StepTable, sound_step
from hpc_gpt.secrets import hide_secrets, is_secret

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
OTHER_BARS = "bars with another goal than the steps"
BARS, GENERIC = "tqdm", "generic"
_MOST_OF_HEADER = 4000


class LineReader:
    """Takes the lines of one log in order and makes its parts."""

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
        self.own_line = ""  # the last line of a step with the label of the rank that is read

    def look(self, piece: str) -> tuple[str, list[Found]]:
        """A line or a piece of one, cut to what is looked at, and what is found in it."""
        if len(piece) > LONGEST_LINE:
            self.leave_out("lines over 64,000 characters, cut")
            piece = piece[:LONGEST_LINE]
        return piece, find(piece)

    def apply(self, number: int, line: str, found: list[Found]) -> None:
        """Adds what was found in a line to its part."""
        if self.tracebacks.open:
            failed = any(each.pattern.kind == "failure" for _, each in found)
            if raised := self.tracebacks.take(number, line, failed):
                self._raised(*raised, line)
        if not found:
            return
        at, rank = time_of(line), rank_of(line)
        part = self.parts[-1]
        times = part.first_at, part.last_at
        self.saw(at)
        if len(found) > 1 and any(each.pattern.kind == "start" for _, each in found):
            found = sorted(found, key=lambda pair: pair[0].start())  # what precedes the banner is of the part before
        for match, each in found:
            self._apply(number, line, match, each, rank, at)
        if part is not self.parts[-1]:  # the line begins another part, and is none of the part before
            part.first_at, part.last_at = times
            self.saw(at)

    def saw(self, at: float | None) -> None:
        """Notes the time of day of a line in which something was found."""
        part = self.parts[-1]
        if at is not None:
            part.first_at = at if part.first_at is None else part.first_at
            part.last_at = at

    def finish(self, last_line: int) -> list[Part]:
        """The first part, and the others in which something was found. The reader cannot be used again."""
        self.parts[-1].last_line = max(last_line, self.parts[-1].first_line)
        for part, rows in zip(self.parts, self.rows, strict=True):
            part.steps = one_table({dialect: each.table(part.left_out) for dialect, each in rows.items()})
            if part.tasks:  # which say nothing of the number of ranks
                part.other_ranks = dict.fromkeys(part.other_ranks, False)
            # One step may be printed late, by another rank; a program that goes on has not ended.
            late = [int(steps.line[-2]) for steps in part.steps.values() if len(steps) > 1]
            part.ends = [end for end in part.ends if end[1].line > max(late, default=0)]
        return [part for part in self.parts if part.dialects or part is self.parts[0]]

    def _apply(
        self, number: int, line: str, match: re.Match[str], each: DialectPattern, rank: int | None, at: float | None
    ) -> None:
        pattern = each.pattern
        if pattern.own and each.dialect.name not in self.parts[-1].dialects:
            return
        values = values_of(line, match, pattern)
        if pattern.kind in ("fact", "argument") and self._is_of_next_job(each, values):
            self._next_part(number)
        if pattern.kind == "start":
            self._start(number)
            starts, name = self.parts[-1].starts, each.dialect.name
            starts[name] = starts.get(name, 0) + 1
        elif pattern.kind == "step":
            self._step(number, values, each, rank, at, line)
        elif pattern.kind == "more":
            self._more(number, values, each, rank)
        part = self.parts[-1]
        if not pattern.weak:
            self.count(each.dialect.name)
        place = Place(self.file, number)
        for name, value in pattern.facts.items():
            if name not in STEP_FIELDS:
                self.fact(name, value, place, each)
        match pattern.kind:
            case "fact" | "start":
                rank_params, name = values.pop("rank_params", None), str(values.pop("rank_name", ""))[:LONGEST_TEXT]
                if isinstance(rank_params, float) and (
                    name in part.rank_params or self.room("ranks' parameters", len(part.rank_params))
                ):
                    part.rank_params.setdefault(name, (rank_params, place))
                for name, value in values.items():
                    self.fact(name, value, place, each)
            case "argument":
                key, value = str(values.get("key", ""))[:LONGEST_TEXT], str(values.get("value", ""))
                if key and "value" in values and not is_secret(key, value):
                    given = Fact(cut_value(value), place, each.dialect.name)
                    self._add_to_header(True, key, given)
                    if key not in part.arguments and self.room("arguments", len(part.arguments)):
                        part.arguments[key] = (given.value, place)
            case "total":
                for name, value in values.items():
                    if not pattern.weak or each.dialect.name in part.dialects:
                        part.totals.setdefault(name, Fact(cut_value(value), place, each.dialect.name))
            case "progress":
                step, planned = float_of(values, "step"), self.planned(each)
                other = bool(planned) and values.get("steps_planned", planned[0]) not in planned
                if other:
                    self.leave_out(OTHER_BARS)
                elif step is not None and self.room("bars", len(part.progress)):
                    part.progress.append((step, float_of(values, "elapsed_s"), number))
                if "steps_planned" in values and not other:
                    self.fact("steps_planned", values["steps_planned"], place, each)
            case "eval":
                loss = float_of(values, "loss_eval")
                if loss is not None and self.room("evaluations", len(part.evals)):
                    part.evals.append((float_of(values, "step"), loss if math.isfinite(loss) else math.nan, number))
            case "save":
                if self.room("saves", len(part.saves)):
                    part.saves.append((float_of(values, "step"), float_of(values, "save_s"), number))
            case "memory":
                self.memory(values, rank, place)
            case "timers":
                self.timers(values)
            case "failure":
                assert pattern.ended
                if self.room("failures", len(part.failures)):
                    words = hide_secrets(self.tracebacks.with_source(str(values.get("words") or line.strip()))[:1000])
                    named, node = _whole_rank(values.get("rank")), str(values.get("node") or "") or node_of(line)
                    whose = rank if named is None else named
                    if NO_MESSAGE.match(words):
                        self.tracebacks.wait(number, line, words)
                    words = words[:MOST_WORDS]
                    part.failures.append(
                        Failure(pattern.ended, words, place, whose, node, at, pattern.echo, pattern.to_do)
                    )
            case "traceback" if match[0].startswith("Traceback"):
                self.tracebacks.begin(line[: match.start()])
            case "traceback":
                self._forget(self.tracebacks.caught(number))
            case "end":
                assert pattern.ended
                shown = not pattern.weak or bool(self.rows[-1] or part.progress)
                if shown and self.room("ends", len(part.ends)):
                    part.ends.append((pattern.ended, place))
                for name in ("job_id", "node"):
                    if name in values:
                        self.fact(name, values[name], place, each)

    def _raised(self, number: int, text: str, line: str) -> None:
        """Adds an exception that ends with `line` and that no pattern knows by its name, or not with its message."""
        part = self.parts[-1]
        self._forget(number)
        words = hide_secrets(self.tracebacks.with_source(text)[:1000])[:MOST_WORDS]
        node = node_of(line) or node_of_label(line)
        for each in patterns_of(text):
            if self.room("failures", len(part.failures)):
                self.count("python_exceptions")
                at = Place(self.file, number), rank_of(line), node, time_of(line)
                part.failures.append(Failure(str(each.ended), words, *at, each.echo, each.to_do))

    def _forget(self, number: int) -> None:
        """Drops the failures of a line, one of the last."""
        kept = self.parts[-1].failures
        kept[-8:] = [each for each in kept[-8:] if each.place.line != number]

    def _start(self, number: int) -> None:
        part = self.parts[-1]
        if self.rows[-1] or part.progress or part.totals or part.failures or part.ends:
            self._next_part(number)
        self.parts[-1].started = True

    def _is_of_next_job(self, each: DialectPattern, values: Mapping[str, float | str]) -> bool:
        """Whether a fact or an argument is of the next job in a file to which several were appended.

        After Slurm's message that it cancelled the job, a program says what it trains; or a job names itself.
        """
        part = self.parts[-1]
        if not part.failures and "job_id" not in values:
            return False
        known = part.fact("job_id")
        if "job_id" in values and known is not None and each.pattern.literal == "JobId=":
            return scaled("job_id", str(values["job_id"])) != ("job_id", known.value) and bool(self.rows[-1])
        over = bool(part.failures) and part.failures[-1].words.startswith(JOB_OVER)
        return over and each.dialect.engine is not None

    def _next_part(self, number: int) -> None:
        if len(self.parts) >= MOST_PARTS:
            self.full = True
            return
        part = self.parts[-1]
        part.last_line = max(number - 1, part.first_line)
        self.parts.append(Part(self.file, number, number))
        self.parts[-1].facts.update({name: part.facts[name] for name in (TESTS,) if name in part.facts})
        self.rows.append({})
        self.timer_lines = {}

    def _begin_again(self, number: int) -> None:
        """Opens a part as the steps go back. What was said since the last step is of the part that begins."""
        before, header = self.parts[-1], self.header if self.after == self._last_step_line() else []
        self._next_part(min([number, *(fact.place.line for _, _, fact in header)]))
        part = self.parts[-1]
        for is_argument, name, fact in header if part is not before else ():
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

    def _add_to_header(self, is_argument: bool, name: str, fact: Fact) -> None:
        last = self._last_step_line()
        if last and fact.place.line > last:
            self.header = self.header if self.after == last else []
            self.after = last
            if len(self.header) < _MOST_OF_HEADER:
                self.header.append((is_argument, name, fact))

    def _last_step_line(self) -> int:
        return max((rows.open_line for rows in self.rows[-1].values()), default=0)

    def _step(
        self,
        number: int,
        values: Mapping[str, float | str],
        each: DialectPattern,
        rank: int | None,
        at: float | None,
        line: str,
    ) -> None:
        if self.full:
            return self.leave_out(TOO_MANY_PARTS)
        row = row_of(values, at)
        step = row.get("step")
        if step is not None and not sound_step(step):
            return self.leave_out("lines of steps with an impossible number")
        rows = self.rows[-1].get(each.dialect.name)
        if rows is not None:
            if rank is not None and self.parts[-1].step_rank is not None and rank != self.parts[-1].step_rank:
                self.memory_of_step(values, rank, Place(self.file, number))
                self.saw_rank(rank, line)
                if "loss" not in row or step is None:
                    return self.leave_out(OTHER_RANKS)
                if rows.lacks_loss and not (row["loss"] <= 0 and rows.no_loss == row["loss"]):
                    # Only the last stage of a pipeline has the loss: its lines are read from here on.
                    self.parts[-1].step_rank = rank
                    if step == rows.last_step:
                        rows.open_row["loss"] = row["loss"]
                        return self.leave_out(OTHER_RANKS)
                    self.leave_out(OTHER_RANKS, rows.count)
                    self.kept -= min(rows.count, self.most_rows)
                    rows = self.rows[-1][each.dialect.name] = StepRows()
                else:
                    if rows.count == 1 and step == rows.last_step and rank < self.parts[-1].step_rank:
                        # Each rank prints its own loss: those of rank 0 are read, whoever printed first.
                        rows.open_row, rows.open_line, self.parts[-1].step_rank = row, number, rank
                        self.own_line = line
                    return self.leave_out(OTHER_RANKS)
            last = rows.last_step
            if step is not None and last is not None and step == last:
                self.saw_again(line, self.own_line)
                return self.leave_out(PRINTED_BEFORE)
            if (
                step is None
                and "epoch" in row
                and all(rows.open_row.get(key) == row[key] for key in row if key != "at")
            ):
                return self.leave_out(PRINTED_BEFORE)
            if step is not None and last is not None and step < last:
                self._begin_again(number)
        if self.full:
            return self.leave_out(TOO_MANY_PARTS)
        rows = self.rows_of(each.dialect.name, rank)
        rows.add(row, number)
        self.own_line = line
        if each.dialect.last_resort:
            rows.see_shape(line)
        self.bound_rows(rows, rows.count - 1)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def saw_again(self, line: str, before: str) -> None:
        """Notes that a line is as the one before it: under a label of srun several ranks of a task printed it."""
        if line == before and _TASK.match(line):
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

    def _more(self, number: int, values: Mapping[str, float | str], each: DialectPattern, rank: int | None) -> None:
        rows = self.rows[-1].get(each.dialect.name)
        if rows is None:
            return self.leave_out("figures of a step without a line of the step before them")
        if rank is not None and rank != self.parts[-1].step_rank:
            return self.leave_out(OTHER_RANKS)
        for name, value in values.items():
            if name in STEP_FIELDS and isinstance(value, float):
                rows.open_row.setdefault(name, value)
        self._facts_of_step(values, rank, Place(self.file, number), each)
        return None

    def _facts_of_step(
        self, values: Mapping[str, float | str], rank: int | None, place: Place, each: DialectPattern
    ) -> None:
        for name in STEP_FACTS:
            if name in values:
                self.fact(name, values[name], place, each)
        self.memory_of_step(values, rank, place)

    def memory_of_step(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """Adds the memory of a line of steps, if it has any."""
        if any(name in values for name in MEMORY_FIELDS):
            self.memory(values, rank, place)

    def fact(self, name: str, value: str | int | float, place: Place, each: DialectPattern) -> None:
        """Adds a value of a field, if it is new."""
        part = self.parts[-1]
        if isinstance(value, float):
            if not math.isfinite(value):
                return self.leave_out(f"impossible figures of {name}")
            value = int(value) if value.is_integer() else value
        value = cut_value(value)
        self._add_to_header(False, name, Fact(value, place, each.dialect.name))
        known = part.facts.setdefault(name, [])
        if name == "steps_planned":
            self._drop_bars(value, each)
        if all(fact.value != value for fact in known):
            if len(known) < _MOST_VALUES:
                known.append(Fact(value, place, each.dialect.name))
            elif not isinstance(value, str) and not isinstance(known[-1].value, str) and value > known[-1].value:
                # Of what grows in many steps, such as a batch, the last value is kept.
                known[-1] = Fact(value, place, each.dialect.name)
        return None

    def planned(self, each: DialectPattern) -> list[Any]:
        """The goals that other dialects than that of a bar state: a bar with another goal counts no steps."""
        known = self.parts[-1].facts.get("steps_planned", ())
        return [fact.value for fact in known if fact.dialect != each.dialect.name]

    def _drop_bars(self, planned: Any, each: DialectPattern) -> None:
        """Drops the bars before a program's own goal if theirs is another, such as those of a tokenizer or a loader."""
        part = self.parts[-1]
        bars = [fact for fact in part.facts["steps_planned"] if fact.dialect == BARS and fact.value != planned]
        if bars and each.dialect.name != BARS:
            self.leave_out(OTHER_BARS, len(part.progress))
            part.progress = []
            known = part.facts["steps_planned"]
            known[:] = [fact for fact in known if fact not in bars]

    def memory(self, values: Mapping[str, float | str], rank: int | None, place: Place) -> None:
        """Raises the peaks of a rank; the rank in the values takes precedence over the label of the line."""
        named = _whole_rank(values.get("rank"))
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

    def leave_out(self, words: str, count: int = 1) -> None:
        """Counts what is skipped of the part."""
        part = self.parts[-1]
        part.left_out[words] = part.left_out.get(words, 0) + count


def one_table(tables: dict[str, StepTable]) -> dict[str, StepTable]:
    """The tables, those of one program joined: its lines changed their form, and the steps continue."""
    named = [(name, table) for name, table in tables.items() if len(table) and np.isfinite(table["step"]).all()]
    named.sort(key=lambda pair: int(pair[1].line[0]))
    for (name, before), (other, after) in pairwise(named):
        first, last = float(before["step"][-1]), float(after["step"][0])
        apart = np.diff(np.concatenate((before["step"], after["step"])))
        continues = before.line[-1] < after.line[0] and 0 < last - first <= 2 * float(np.median(apart[apart > 0]))
        if continues and set(before.columns) & set(after.columns) >= {"loss"}:
            whole = StepTable.joined([before, after])
            main = max((name, other), key=lambda each: (each != GENERIC, tables[each].count))
            rest = {each: table for each, table in tables.items() if each not in (name, other)}
            return one_table({**rest, main: whole})
    return tables


def _whole_rank(value: object) -> int | None:
    """The rank that a figure names, None if it names none."""
    if not isinstance(value, float) or not math.isfinite(value) or not 0 <= value < 1e7:
        return None
    return int(value)
