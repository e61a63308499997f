"""Reads a log line by line, each line with every pattern. The faster `read_log.BlockReader` must find the same."""

import bisect
import math
import re
from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from hpc_gpt.core.ends.failures import meaning
from hpc_gpt.core.secrets import hide_secrets, is_secret
from hpc_gpt.reader.lines.fields import STEP_FACTS, STEP_FIELDS, scaled
from hpc_gpt.reader.lines.growing_parts import (
    JOB_OVER,
    LONGEST_LINE,
    MOST_WORDS,
    OTHER_BARS,
    OTHER_RANKS,
    PRINTED_BEFORE,
    TOO_MANY_PARTS,
    GrowingParts,
    drop_nested_bars,
    whole_rank,
)
from hpc_gpt.reader.lines.matches import (
    LONGEST_TEXT,
    DialectPattern,
    RuleMatch,
    cut_value,
    find,
    float_of,
    node_of,
    rank_of,
    row_of,
    time_of,
    time_of_failure,
    values_of,
)
from hpc_gpt.reader.lines.part import SAID_DONE, Fact, Failure, Part, Place
from hpc_gpt.reader.lines.step_rows import StepRows, sound_step
from hpc_gpt.reader.lines.tracebacks import NO_MESSAGE, node_of_label, patterns_of

_TOTAL = re.compile(r"\b(\d{1,12}) ?/ ?(\d{1,12})\b")
TOTAL_PRINTED = "total_printed"  # the fact of a total after the step in the line before a word such as "Done!"
_FEW_LAST_LINES = 20  # that may follow a word alone which ends a log: saves and figures
_LAST_FAILURES = 50  # so many of a part's last failures are kept: Slurm's message about its end is among them


class LineReader(GrowingParts):
    """Takes the lines of one log in order and makes its parts."""

    def look(self, piece: str) -> tuple[str, list[RuleMatch]]:
        """Returns (the text of a line, or of a piece of one, cut to LONGEST_LINE; its matches)."""
        if len(piece) > LONGEST_LINE:
            self.leave_out("lines over 64,000 characters, cut")
            piece = piece[:LONGEST_LINE]
        return piece, find(piece)

    def apply(self, number: int, line: str, matches: list[RuleMatch]) -> None:
        """Adds the matches of a line to its part."""
        self.tracebacks.raised_in = ""
        if self.tracebacks.count:
            if matches and self.tracebacks.quotes(line):
                matches = []
            failed = any(rule.pattern.kind == "failure" for _, rule in matches)
            if raised := self.tracebacks.take(number, line, failed):
                self._raised(*raised, line)
        if not matches:
            return
        at, rank = time_of(line), rank_of(line)
        part = self.parts[-1]
        times = part.first_at, part.last_at
        self.note_time(at)
        if len(matches) > 1 and any(rule.pattern.kind == "start" for _, rule in matches):
            # Matches before the banner belong to the part before it.
            matches = sorted(matches, key=lambda pair: pair[0].start())
        for match, rule in matches:
            self._apply(number, line, match, rule, rank, at)
        if part is not self.parts[-1]:  # the line begins another part: it does not belong to the part before
            part.first_at, part.last_at = times
            self.note_time(at)

    def finish(self, last_line: int) -> list[Part]:
        """The first part, and all others that have matches. The reader cannot be used again."""
        self._note_cut_off()
        self.parts[-1].last_line = max(last_line, self.parts[-1].first_line)
        for part, rows, totals in zip(self.parts, self.rows, self.bar_totals, strict=True):
            drop_nested_bars(part, totals)
            part.steps = {dialect: table_rows.table(part.left_out) for dialect, table_rows in rows.items()}
            if part.tasks:  # labels of tasks do not give the number of ranks
                part.other_ranks = dict.fromkeys(part.other_ranks, False)
            # Another rank may print one step late; a program that prints more steps has not ended.
            late = [int(steps.line[-2]) for steps in part.steps.values() if len(steps) > 1]
            part.ends = [end for end in part.ends if end[1].line > max(late, default=0)]
            part.ends = [
                ("done" if ended == SAID_DONE else ended, at)
                for ended, at in part.ends
                if ended != SAID_DONE or _is_end(part, at.line)
            ]
        return [part for part in self.parts if part.dialects or part is self.parts[0]]

    def _note_cut_off(self) -> None:
        """Adds the traceback that the log cuts off before its exception as a failure, unless another one follows it."""
        cut, failures = self.tracebacks.cut_off(), self.parts[-1].failures
        if cut is None or any(each.place.line > cut[0] and not each.echo for each in failures):
            return
        number, file, label = cut
        if self.reserve("failures", len(failures)):
            self.count("python_exceptions")
            message = f"a traceback that the log cuts off before its exception, in {file}"
            rank, node = rank_of(f"{label} "), node_of_label(f"{label} ")
            failures.append(Failure("error", message, Place(self.file, number), rank, node, raised_in=file))

    def _apply(
        self, number: int, line: str, match: re.Match[str], rule: DialectPattern, rank: int | None, at: float | None
    ) -> None:
        pattern = rule.pattern
        if pattern.own and rule.dialect.name not in self.parts[-1].dialects:
            return
        values = values_of(line, match, pattern)
        if pattern.kind in ("fact", "argument") and self._is_of_next_job(rule, values):
            self.next_part(number)
        if pattern.kind == "start":
            self._start(number, rule)
        elif pattern.kind == "step":
            self._step(number, values, rule, rank, at, line)
        elif pattern.kind == "more":
            self._more(number, values, rule, rank)
        part = self.parts[-1]
        if not pattern.weak:
            self.count(rule.dialect.name)
        place = Place(self.file, number)
        for name, value in pattern.facts.items():
            if name not in STEP_FIELDS:
                self.fact(name, value, place, rule)
        match pattern.kind:
            case "fact" | "start":
                self._facts(values, place, rule)
            case "argument":
                self._argument(values, place, rule)
            case "total":
                for name, value in values.items():
                    if not pattern.weak or rule.dialect.name in part.dialects:
                        part.totals.setdefault(name, Fact(cut_value(value), place, rule.dialect.name))
            case "progress":
                self._progress(values, place, rule)
            case "eval":
                loss = float_of(values, "loss_eval")
                if loss is not None and self.reserve("evaluations", len(part.evals)):
                    part.evals.append((float_of(values, "step"), loss if math.isfinite(loss) else math.nan, number))
                if 0 < (float_of(values, "eval_s") or 0.0) < 1e9 and self.reserve("evaluations", len(part.eval_s)):
                    part.eval_s.append((float(values["eval_s"]), number))
            case "save":
                if self.reserve("saves", len(part.saves)):
                    part.saves.append((float_of(values, "step"), float_of(values, "save_s"), number))
            case "memory":
                self.memory(values, rank, place)
            case "timers":
                self.timers(values)
            case "failure":
                self._failure(line, values, place, rule, rank, at)
            case "traceback" if match[0].startswith("Traceback"):
                self.tracebacks.begin(number, line[: match.start()])
            case "traceback":
                self._forget(self.tracebacks.caught(number))
            case "end":
                assert pattern.ended
                if pattern.ended == SAID_DONE:  # the last one counts
                    part.ends = [end for end in part.ends if end[0] != SAID_DONE]
                    self._note_totals(place, rule)
                shown = not pattern.weak or bool(self.rows[-1] or part.progress)
                if shown and self.reserve("ends", len(part.ends)):
                    part.ends.append((pattern.ended, place))
                for name in ("job_id", "node"):
                    if name in values:
                        self.fact(name, values[name], place, rule)

    def _note_totals(self, place: Place, rule: DialectPattern) -> None:
        """Notes the totals that the last lines of steps print after their steps."""
        for dialect, line in self.taken_lines.items():
            rows = self.rows[-1].get(dialect)
            for total in _TOTAL.finditer(line):
                if rows is not None and float(total[1]) == rows.last_step:
                    self.fact(TOTAL_PRINTED, float(total[2]), place, rule)

    def _facts(self, values: dict[str, float | str], place: Place, rule: DialectPattern) -> None:
        part = self.parts[-1]
        params, name = values.pop("rank_params", None), str(values.pop("rank_name", ""))[:LONGEST_TEXT]
        if isinstance(params, float) and (
            name in part.rank_params or self.reserve("ranks' parameters", len(part.rank_params))
        ):
            part.rank_params.setdefault(name, (params, place))
        for name, value in values.items():
            self.fact(name, value, place, rule)

    def _argument(self, values: Mapping[str, float | str], place: Place, rule: DialectPattern) -> None:
        part = self.parts[-1]
        key, value = str(values.get("key", ""))[:LONGEST_TEXT], str(values.get("value", ""))
        if key and "value" in values and not is_secret(key, value):
            argument = Fact(cut_value(value), place, rule.dialect.name)
            self.add_to_header(True, key, argument)
            if key not in part.arguments and self.reserve("arguments", len(part.arguments)):
                part.arguments[key] = (argument.value, place)

    def _progress(self, values: Mapping[str, float | str], place: Place, rule: DialectPattern) -> None:
        step = float_of(values, "step")
        goals = [fact.value for fact in self.parts[-1].facts.get("steps_planned", ())]
        is_of_training = not goals or values.get("steps_planned") in goals
        if step is not None and step <= 1 and is_of_training and self.failed_after_steps():
            self.begin_again(place.line)
        progress, planned = self.parts[-1].progress, self.planned(rule)
        if planned and values.get("steps_planned", planned[0]) not in planned:
            self.leave_out(OTHER_BARS)
            return
        if step is not None and self.reserve("bars", len(progress)):
            progress.append((step, float_of(values, "elapsed_s"), place.line))
            total = float_of(values, "steps_planned")
            self.bar_totals[-1].append(math.nan if total is None else total)
        if "steps_planned" in values:
            self.fact("steps_planned", values["steps_planned"], place, rule)

    def _failure(
        self,
        line: str,
        values: Mapping[str, float | str],
        place: Place,
        rule: DialectPattern,
        rank: int | None,
        at: float | None,
    ) -> None:
        failures, pattern = self.parts[-1].failures, rule.pattern
        assert pattern.ended
        if self.reserve("failures", len(failures)):
            message = hide_secrets(self.tracebacks.with_source(str(values.get("words") or line.strip()))[:1000])
            named, node = whole_rank(values.get("rank")), str(values.get("node") or "") or node_of(line)
            if NO_MESSAGE.match(message):
                self.tracebacks.wait(place.line, line, message)
            whose = rank if named is None else named
            about = message[:MOST_WORDS], place, whose, node, time_of_failure(line) if at is None else at
            raised_in = self.tracebacks.raised_in
            failures.append(Failure(pattern.ended, *about, pattern.echo, pattern.to_do, raised_in))

    def _raised(self, number: int, text: str, line: str) -> None:
        """Adds the failure of an exception that ends with `line` and that no pattern matches as a whole."""
        part = self.parts[-1]
        self._forget(number)
        message = hide_secrets(self.tracebacks.with_source(text)[:1000])[:MOST_WORDS]
        node = node_of(line) or node_of_label(line)
        for pattern in patterns_of(text):
            if self.reserve("failures", len(part.failures)):
                self.count("python_exceptions")
                at = Place(self.file, number), rank_of(line), node, time_of_failure(line)
                raised_in = self.tracebacks.raised_in
                part.failures.append(Failure(str(pattern.ended), message, *at, pattern.echo, pattern.to_do, raised_in))

    def _forget(self, number: int) -> None:
        """Drops the failures of a line that is one of the last."""
        failures = self.parts[-1].failures
        failures[-8:] = [failure for failure in failures[-8:] if failure.place.line != number]

    def _start(self, number: int, rule: DialectPattern) -> None:
        if rule.pattern.weak:
            return self._begin(number, rule)
        part = self.parts[-1]
        if self.rows[-1] or part.progress or part.totals or part.failures or part.ends:
            self.next_part(number)
        starts, name = self.parts[-1].starts, rule.dialect.name
        self.parts[-1].started, starts[name] = True, starts.get(name, 0) + 1
        return None

    def _begin(self, number: int, rule: DialectPattern) -> None:
        """Handles a start banner that a program prints after its settings: either another node's copy, or a new
        training."""
        if rule.dialect.last_resort:
            self.banner = number
            return
        part = self.parts[-1]
        trained = self.rows[-1] or part.totals or any(step for step, _, _ in part.progress[-1:])
        if self.begun and (trained or any(failure.place.line > self.begun for failure in part.failures)):
            self.begin_again(number)
            self.parts[-1].started = self.parts[-1] is not part
        self.begun = number

    def _is_of_next_job(self, rule: DialectPattern, values: Mapping[str, float | str]) -> bool:
        """Whether a fact or an argument belongs to the next job, in a file to which several jobs append their output.

        The next job shows in a program's settings after Slurm's message that it cancelled a job, in another job id, or
        in a checkpoint that is loaded after an end by the scheduler.
        """
        part = self.parts[-1]
        if not part.failures and "job_id" not in values:
            return False
        job_id = part.fact("job_id")
        if "job_id" in values and job_id is not None and rule.pattern.literal == "JobId=":
            return scaled("job_id", str(values["job_id"])) != ("job_id", job_id.value) and bool(self.rows[-1])
        if "resumes" in rule.pattern.facts:
            last = self._last_step_line()
            ends = (failure for failure in part.failures[-_LAST_FAILURES:] if failure.place.line > last > 0)
            return any(meaning(failure.ended).by_scheduler for failure in ends)
        last = self._last_step_line()
        over = (failure for failure in part.failures[-_LAST_FAILURES:] if failure.place.line > last)
        return rule.dialect.engine is not None and any(failure.message.startswith(JOB_OVER) for failure in over)

    def _step(
        self,
        number: int,
        values: Mapping[str, float | str],
        rule: DialectPattern,
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
        rows = self.rows[-1].get(rule.dialect.name)
        if rows is not None and rank is not None and self.parts[-1].step_rank not in (None, rank):
            self.memory_of_step(values, rank, Place(self.file, number))
            self.note_rank(rank, line)
            rows = self._rows_from_rank(rank, number, row, line, rule.dialect.name)
            if rows is None:
                return self.leave_out(OTHER_RANKS)
        if rows is not None:
            last = rows.last_step
            again = self.banner > rows.open_line  # after a banner another training may print the same step
            if step is not None and last is not None and step == last and not again:
                self.note_repeated(line, self.taken_lines.get(rule.dialect.name))
                return self.leave_out(PRINTED_BEFORE)
            if (
                step is None
                and "epoch" in row
                and all(rows.open_row.get(key) == row[key] for key in row if key != "at")
                and not (self._bar_moved(rows.open_line) and (at or line == self.taken_lines.get(rule.dialect.name)))
            ):
                return self.leave_out(PRINTED_BEFORE)
            epochs = rows.open_row.get("epoch", math.nan), row.get("epoch", math.nan)
            if step is None and epochs[1] < epochs[0] and self.has_ended(rule.dialect.name):
                self.begin_again(number)
            if step is not None and last is not None and (step < last or (step == last and again)):
                self.begin_again(number, step)
        if self.full:
            return self.leave_out(TOO_MANY_PARTS)
        rows = self.rows_of(rule.dialect.name, rank)
        rows.add(row, number)
        self.taken_lines[rule.dialect.name] = line
        if rule.dialect.last_resort:
            rows.see_shape(line)
        self.bound_rows(rows, rows.count - 1)
        self._facts_of_step(values, rank, Place(self.file, number), rule)
        return None

    def _bar_moved(self, line: int) -> bool:
        """Whether the last bar shows a later step than the last one before a line."""
        progress = self.parts[-1].progress
        before = bisect.bisect_right(progress, line, key=lambda bar: bar[2])
        return bool(progress) and progress[-1][0] > (progress[before - 1][0] if before else 0)

    def _rows_from_rank(
        self, rank: int, number: int, row: dict[str, float], line: str, dialect: str
    ) -> StepRows | None:
        """The rows of a dialect, empty, if the lines of another rank than before are read from this one on; else None:
        its line is left out."""
        rows, step, part = self.rows[-1][dialect], row.get("step"), self.parts[-1]
        if "loss" not in row or step is None:
            return None
        if rows.lacks_loss and rows.would_be_loss(row["loss"]):
            # Only the last stage of a pipeline prints the loss: from this line on its lines are read.
            part.step_rank = rank
            if step == rows.last_step:
                rows.open_row["loss"] = row["loss"]
                return None
            self.leave_out(OTHER_RANKS, rows.count)
            self.kept_rows -= min(rows.count, self.most_rows)
            self.rows[-1][dialect] = StepRows()
            return self.rows[-1][dialect]
        if rows.count == 1 and step == rows.last_step and part.step_rank is not None and rank < part.step_rank:
            # Each rank prints its own loss: the lines of rank 0 are read, whichever rank printed first.
            rows.open_row, rows.open_line, part.step_rank = row, number, rank
            self.taken_lines[dialect] = line
        return None

    def _more(self, number: int, values: Mapping[str, float | str], rule: DialectPattern, rank: int | None) -> None:
        rows = self.rows[-1].get(rule.dialect.name)
        if rows is None:
            return self.leave_out("figures of a step without a line of the step before them")
        if rank is not None and rank != self.parts[-1].step_rank:
            return self.leave_out(OTHER_RANKS)
        for name, value in values.items():
            if name in STEP_FIELDS and isinstance(value, float):
                before = rows.open_row.setdefault(name, value)
                if name == "expert_load" and value > before:  # a line for each layer: the fullest expert of all counts
                    rows.open_row[name] = value
        self._facts_of_step(values, rank, Place(self.file, number), rule)
        return None

    def _facts_of_step(
        self, values: Mapping[str, float | str], rank: int | None, place: Place, rule: DialectPattern
    ) -> None:
        for name in STEP_FACTS:
            if name in values:
                self.fact(name, values[name], place, rule)
        self.memory_of_step(values, rank, place)


def _is_end(part: Part, line: int) -> bool:
    """Whether a word alone, such as "Done!", is the end of a part: few lines follow it, and no printed total was
    missed, by more than the distance of two lines of steps."""
    reached = [step for step, _, _ in part.progress[-1:]]
    for steps in part.steps.values():
        numbers = steps["step"] if "step" in steps else steps["epoch"]
        numbers = numbers[np.isfinite(numbers)]
        reached += [2 * each - before for before, each in pairwise(numbers[-2:].tolist())] or numbers[-1:].tolist()
    totals = [
        float(fact.value)
        for name in ("steps_planned", "epochs_planned", TOTAL_PRINTED)
        for fact in part.facts.get(name, ())
    ]
    is_missed = bool(totals) and max(reached, default=0.0) < min(totals)
    return part.last_line - line <= _FEW_LAST_LINES and not is_missed
