"""A race: one run measures rows in rounds, one visit after the other. This module decides what comes next, and writes
bench.json; the job's script, or the supervisor on this machine, starts each visit's ranks and says how they ended.

In a job the script asks: `python -m hpc_gpt.launcher.race.next_visit RUN ATTEMPT VISIT CODE SHOWN`. VISIT is the visit
that has ended, `-` for none, CODE srun's exit code, and SHOWN the output of `scontrol show job`, empty if it was not
asked. The answer is one of

    hpc-gpt-next visit SECONDS FOLDER   start the visit's ranks; they may take SECONDS, 0 for any time
    hpc-gpt-next end CODE               the race's attempt has ended: the script continues as after the ranks of a run
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hpc_gpt.core.columns import peak
from hpc_gpt.core.ends.end_policy import End, asks_to_requeue, end_by_script, exit_code, first_failure, is_put_back
from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY, meaning
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.files import replace_whole, write_once
from hpc_gpt.core.processes.requests import answer, open_requests
from hpc_gpt.core.runs.race import RaceRow, Visit, make_visit, measured, note_visit, read_rows, read_visits
from hpc_gpt.core.runs.record import Record, finite
from hpc_gpt.core.runs.run_folder import PREDICTED, Attempt, RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.core.settings.sized import Sized, runs_program
from hpc_gpt.launcher.attempts.decisions import NEXT_MARK, classify
from hpc_gpt.launcher.race.measurement import MeasuredRow, Measurement, measurement_row, tables_of
from hpc_gpt.launcher.race.rounds import Round, differing_losses, leader_of, leaving_after, next_turn, ratio, winner
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.training import training_of
from hpc_gpt.reader.runs.own_run import DIALECT, figures_asked
from hpc_gpt.reader.runs.run_read import BENCH_FILE, RunRead
from hpc_gpt.report.bench_table import file_text
from hpc_gpt.report.gather import gather_records

# A visit after the first round may take this many times as long as the leader's.
_PATIENCE = 3
# Ends that say nothing about a row: they come from the job, a node or the user.
_OF_THE_JOB = ("stopped", "budget", "node_failure", "port_taken")


class Race:
    """A race, in its attempt that now runs."""

    def __init__(self, run: RunFolder, attempt: Attempt) -> None:
        self.run, self.attempt = run, attempt
        self.rows, self.rounds = read_rows(run)
        self.file = run.path / BENCH_FILE
        self._read: dict[str, RunRead] = {}

    # --- what is next

    def advance(self) -> Visit | End:
        """Begins the next visit and returns it, or returns how the race's attempt ends. Raises RunFolderError if the
        disk refuses."""
        nodes = str(self.attempt.started().get("node_list") or "")
        for lost in self.visits:
            if not lost.ended and not lost.dropped:
                self.drop(lost, "its job ended before it")
        if wish := self.asked():
            return wish
        turn = self._turn()
        if turn is not None:
            for visit in [visit for visit in self.counted_visits if visit.round == turn[0] and visit.nodes != nodes]:
                self.drop(visit, f"measured on {visit.nodes}: the round begins again on {nodes}")
            turn = self._turn()
        self.write()
        if fault := self._fault():
            return End("user_error", fault)
        if turn is None:
            return self._over()
        limit_s = None
        if turn[0]:
            able = {row: rounds for row, rounds in self.measured.items() if row not in self.differ} or self.measured
            times = [round_.seconds for round_ in self.measured[leader_of(able) or 0].values()]
            limit_s = round(_PATIENCE * max(times), 1) if times else None
        folder = make_visit(self.run, self.rows[turn[1]])
        attempt = folder.new_attempt()
        (attempt.folder / "flight").mkdir()  # for torch's flight recorder
        started = {**self.attempt.started(), "attempt": attempt.number, "in_job": 0, "started": time.time()}
        write_once(attempt.folder / "attempt.json", json.dumps(started) + "\n")
        place = os.path.relpath(folder.path, self.run.path)
        keys = {"round": turn[0], "row": turn[1], "attempt": self.attempt.number, "nodes": nodes}
        note_visit(self.run, place, **keys, limit_s=limit_s)
        self._forget()
        print(f"round {turn[0] + 1}/{self.rounds}  {self.rows[turn[1]].name}: {place}", file=sys.stderr, flush=True)
        return self.visits[-1]

    def conclude(self, visit: Visit, end: End) -> End | None:
        """Notes how a visit has ended. Returns how the race's attempt ends, if it ends with the visit: when the end has
        another cause than the row."""
        late = visit.limit_s is not None and time.time() - visit.began >= visit.limit_s
        if late and end.ended not in GOOD:
            end = End("hang", f"not over within {visit.limit_s:g} s, {_PATIENCE} times the leader's visit")
        of_job = not late and (meaning(end.ended).by_scheduler or end.ended in _OF_THE_JOB)
        note_visit(self.run, visit.place, ended=end.ended, cause=end.cause, node=end.node, dropped=of_job)
        self._forget()
        why = f": {end.cause}" if end.cause and end.ended not in GOOD else ""
        print(f"{self.rows[visit.row].name}: {end.ended}{why}", file=sys.stderr, flush=True)
        return (
            replace(end, cause=f"{end.cause or end.ended}, in a visit of {self.rows[visit.row].name}")
            if of_job
            else None
        )

    def end(self, end: End) -> int:
        """Writes how the race's attempt has ended, and returns the exit code for the job's ranks."""
        done = measured(self.visits)
        for request in open_requests(self.attempt):
            is_done = {"stop": "stopped", "requeue": "requeued"}.get(request.verb) == end.ended
            answer(self.attempt, request, done, is_done, "" if is_done else "a race saves nothing")
        again = asks_to_requeue(self.run, self.attempt, end)
        self.attempt.write_ended(end.ended, end.cause, done, requeue=again, node=end.node)
        self.write()
        print(file_text(self.file), end="", file=sys.stderr, flush=True)
        return 0 if end.ended in GOOD or again else 1

    def asked(self) -> End | None:
        """The end that a user or the budget demands between two visits; None if nobody does."""
        if wish := self.run.asked_to_end(self.attempt.job):
            return End(wish, f"hpc-gpt {'stop' if wish == 'stopped' else 'cancel'}")
        verbs = {request.verb for request in open_requests(self.attempt)}
        if "stop" in verbs:
            return End("stopped", "hpc-gpt stop")
        if "requeue" in verbs:
            return End("requeued", "hpc-gpt requeue")
        stop_at = os.environ.get("HPC_GPT_STOP_AT", "")
        spent = stop_at.isdecimal() and time.time() >= int(stop_at)
        return End("budget", "job.max_gpu_hours is used up") if spent else None

    def _turn(self) -> tuple[int, int] | None:
        visited = [(visit.round, visit.row) for visit in self.counted_visits]
        out = {*self.failed, *(number for number, row in enumerate(self.rows) if row.folder is None)}
        return next_turn(len(self.rows), self.rounds, visited, out, self._leaving)

    def _leaving(self, number: int) -> dict[int, str]:
        return leaving_after(self.measured, number, self.differ)

    def _fault(self) -> str:
        """The reason to end a race without a measured row: two successive visits failed, and not from lack of
        memory."""
        if not self.rows:
            return "the folder has no rows: hpc-gpt submit --race makes them, and plain sbatch does not"
        not_out_of_memory = [visit for visit in self.counted_visits if visit.ended not in OUT_OF_MEMORY]
        last = not_out_of_memory[-2:]
        if self.measured or len(last) < 2 or self.counted_visits[-2:] != last:
            return ""
        ends = "; ".join(f"{self.rows[visit.row].name} ended as {visit.ended}: {visit.cause}" for visit in last)
        return f"two rows in turn failed, and none was measured: {ends}"

    def _over(self) -> End:
        if not self.measured:
            return End("user_error", "no row was measured: " + "; ".join(row.record.cause or "" for row in self.table))
        return End("done", str(self.result["why"]))

    def drop(self, visit: Visit, why: str) -> None:
        """Notes that a visit does not count, and prints why."""
        note_visit(self.run, visit.place, dropped=True, cause=why)
        self._forget()
        print(f"{self.rows[visit.row].name}: {why}", file=sys.stderr, flush=True)

    # --- what was measured

    def _forget(self) -> None:
        for name in ("visits", "measured", "differ", "table", "result"):
            self.__dict__.pop(name, None)

    @cached_property
    def visits(self) -> list[Visit]:
        return read_visits(self.run)

    @property
    def counted_visits(self) -> list[Visit]:
        """The visits that have ended and count."""
        return [visit for visit in self.visits if visit.ended and not visit.dropped]

    @property
    def failed(self) -> dict[int, Visit]:
        """{row: the visit in which it failed}. A row that failed is not visited again."""
        return {visit.row: visit for visit in self.counted_visits if not self._is_good(visit)}

    @cached_property
    def measured(self) -> dict[int, dict[int, Round]]:
        rounds: dict[int, dict[int, Round]] = {}
        for visit in self.counted_visits:
            if self._is_good(visit) and visit.row not in self.failed:
                steps = self._of(visit).steps
                counted = steps.take(steps.counts)
                losses = dict(zip(map(int, counted["step"]), map(float, counted["loss"]), strict=True))
                times = Round(counted["step_s"][counted.steady].tolist(), losses, visit.seconds)
                rounds.setdefault(visit.row, {})[visit.round] = times
        return rounds

    @cached_property
    def differ(self) -> dict[int, str]:
        """{row: how its losses differ from those of the other rows}; empty for a program."""
        train = self.run.resolved().train
        dtype = "fp8" if train.matmul != "none" else train.dtype
        return {} if runs_program(self.run.resolved()) else differing_losses(self.measured, dtype)

    def _is_good(self, visit: Visit) -> bool:
        """Whether the visit ended well and has step times; a program's tokens per step need not be known."""
        record = self._measurement(visit).record
        return record.ended in GOOD and bool(record.step_s)

    def _of(self, visit: Visit) -> RunRead:
        if visit.place not in self._read:
            run = RunFolder(self.run.path / visit.place)
            self._read[visit.place] = gather_records([run]).runs[0]
        return self._read[visit.place]

    def _measurement(self, visit: Visit) -> Measurement:
        record = _with_predicted_memory(self._of(visit).record, self._resolved(visit.row))
        record = replace(record, ended=visit.ended, cause=visit.cause or record.cause)
        return Measurement(record, self.run.path / visit.place)

    def _resolved(self, row: int) -> Any:
        return RunFolder(self.run.path / str(self.rows[row].folder)).resolved()

    def _name_of(self, row: int) -> str:
        """The `run` key of a row's record: the race's id and the row's number (from 1)."""
        return f"{self.run.run_id}#{row + 1}"

    @cached_property
    def table(self) -> list[MeasuredRow]:
        """The table: one entry per row of the race, measured or not."""
        return [self._row(number, row) for number, row in enumerate(self.rows)]

    def _row(self, number: int, row: RaceRow) -> MeasuredRow:
        name = self._name_of(number)
        measurements = [self._measurement(visit) for visit in self.counted_visits if visit.row == number]
        good = [
            measurement.record.step_s
            for measurement in measurements
            if measurement.record.ended in GOOD and measurement.record.step_s
        ]
        if measurements and good and not any(measurement.is_good for measurement in measurements):
            record = replace(measurements[0].record, run=name, step_s=statistics.median(good), rounds=len(good))
            return MeasuredRow(row.name, record, (), tuple(measurement.place for measurement in measurements))
        if measurements:
            return measurement_row(row.name, name, measurements)
        requested = figures_asked(self._resolved(number)) if row.folder is not None else {}
        ended = "refused" if row.folder is None else "pending"
        return MeasuredRow(
            row.name, Record(run=name, name=row.name, dialect=DIALECT, ended=ended, cause=row.cause, **requested)
        )

    @cached_property
    def result(self) -> dict[str, Any]:
        """The key `race` of bench.json: the `winner`, by its `run`, None if no row wins; `why`; the winner's `place` in
        the plan, and the command that trains with it (`submit`); `is_over`, whether the race was measured to its end;
        `rows` in the table's order."""
        unchecked, differ = runs_program(self.run.resolved()), self.differ
        used = {number: peak(row.record.memory_allocated_gib) for number, row in enumerate(self.table)}
        best, why = winner(self.measured, differ, used, [row.name for row in self.rows])
        able = {number: rounds for number, rounds in self.measured.items() if number not in differ}
        leader = best if best is not None else leader_of(able or self.measured)
        left = dict[int, str]()
        for number in range(self.rounds):
            left = self._leaving(number) | left
        rows = []
        for number, row in enumerate(self.rows):
            predicted = read_stored(self.run.path / str(row.folder) / PREDICTED).get("step") or {}
            is_in = leader is not None and number in self.measured
            rows.append(
                {
                    "name": row.name,
                    "keys": row.keys,
                    "place": row.place,
                    "predicted_step_s": predicted.get("step_s"),
                    "ratio": ratio(self.measured, number, leader) if is_in and leader is not None else None,
                    "note": differ.get(number) or left.get(number) or (None if is_in else self._why_out(number)),
                    "losses_differ": number in differ,
                }
            )
        run = None if best is None else self._name_of(best)
        place, submit = (None, None) if best is None else (self.rows[best].place, self.rows[best].submit)
        return {
            "winner": run, "why": why, "place": place, "submit": submit, "is_over": self._turn() is None,
            "unchecked": unchecked, "rows": rows,
        }  # fmt: skip

    def _why_out(self, row: int) -> str | None:
        """The reason why a row is not compared: the cause of its failed visit, even if an earlier round went well; or
        what the row lacks."""
        visit = self.failed.get(row)
        return visit.cause if visit is not None and visit.cause else self.table[row].record.cause

    def write(self) -> None:
        """Replaces bench.json. Raises RunFolderError."""
        tables = {**tables_of(self.table, self.run.path), "race": finite(self.result)}
        replace_whole(self.file, json.dumps(tables, indent=1, allow_nan=False) + "\n")


def _with_predicted_memory(record: Record, resolved: Sized) -> Record:
    """The record with the planner's predicted_memory_gib, if it has none and plan can predict it. Allocated memory does
    not depend on the device, so the device need not be known."""
    if record.predicted_memory_gib:
        return record
    try:
        memory = predict_memory(training_of(resolved))
    except UserError:
        return record
    sources = {**record.sources, "predicted_memory_gib": "plan, allocated at the peak, on any GPU: none is named here"}
    return replace(record, predicted_memory_gib=[stage.allocated for stage in memory.stages], sources=sources)


# --- in a job


def end_of_visit(race: Race, attempt: Attempt, code: int, shown: str) -> End:
    """Classifies how a visit's ranks ended, by the facts that the script states, as for any run; writes it and returns
    it."""
    message = first_failure(attempt)
    put_back = is_put_back(race.attempt, shown)
    classified = end_by_script(race.run, attempt, exit_code(message, code), message, shown, put_back)
    end = classify(attempt, *classified, cancelled=race.run.is_cancelled(race.attempt.job))
    attempt.write_ended(end.ended, end.cause, int(attempt.last_metrics().get("step") or 0), node=end.node)
    return end


def main(arguments: Sequence[str]) -> int:
    folder, number, last, code, shown = arguments
    run = RunFolder(Path(folder))
    race = Race(run, run.attempt(int(number)))
    try:
        print(f"{NEXT_MARK} {_answer(race, last, int(code), shown)}", flush=True)
    except UserError as fault:
        print(f"the next visit is not decided: {fault}", file=sys.stderr)
        return 1
    return 0


def _answer(race: Race, last: str, code: int, shown: str) -> str:
    """The answer to the script, which asks again if an answer was lost."""
    newest = race.visits[-1] if race.visits else None
    end = None
    if ended := race.attempt.ended():
        return f"end {0 if ended.get('ended') in GOOD or ended.get('requeue') else 1}"
    if newest is not None and newest.attempt == race.attempt.number and not newest.ended:
        place = race.run.path / newest.place
        if str(place) != last:
            return _visit_line(race, newest)
        end = race.conclude(newest, end_of_visit(race, RunFolder(place).attempts()[-1], code, shown))
    outcome = end or race.advance()
    return _visit_line(race, outcome) if isinstance(outcome, Visit) else f"end {race.end(outcome)}"


def _visit_line(race: Race, visit: Visit) -> str:
    return f"visit {round(visit.limit_s or 0)} {race.run.path / visit.place}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
