"""The runs of a sweep that measured its rows in rounds, as tables: one record a row, and which row is fastest.

    {"bench": id of the sweep, "records": [...], "rows": [...], "race": {...}}

`rows` has, in the order of the records, each row's name as `cell` and its tokens/s by round, None for a round that it
lacks. This is also the form of the bench.json that races of 0.4 have written.
"""

import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.columns import peak
from hpc_gpt.core.ends.failures import GOOD, LIVE
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.rounds import RowInRounds, read_rows, rows_file
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.settings.sized import runs_program
from hpc_gpt.reader.runs.own_run import DIALECT
from hpc_gpt.reader.runs.run_read import RunRead
from hpc_gpt.report.measured_rows import MeasuredRow, Measurement, measurement_row
from hpc_gpt.report.rounds import Round, differing_losses, leader_of, ratio, winner


def tables_of_sweep(reads: Sequence[RunRead]) -> tuple[Path, dict[str, Any]] | None:
    """Returns (the path of the sweep's rows.json, the tables) of our own runs with their steps; None unless they belong
    to one sweep that measured rows in rounds."""
    runs = [RunFolder(read.folder) for read in reads if read.folder is not None]
    rows = read_rows(runs) if runs and len(runs) == len(reads) else None
    if rows is None:
        return None
    names = [row.name for row in rows]
    visits: dict[int, dict[int, RunRead]] = {number: {} for number in range(len(rows))}
    for run, read in zip(runs, reads, strict=True):
        note = run.sweep_note()
        if (name := str(note.get("row"))) in names:
            of_row = visits[names.index(name)]
            of_row[note.get("round", len(of_row))] = read
    first, file = runs[0].resolved(), rows_file(runs[0])
    sweep_id, rounds = str(runs[0].sweep_id), 1 + max(max(of_row, default=0) for of_row in visits.values())
    table = [_row(f"{sweep_id}#{number + 1}", row, visits[number]) for number, row in enumerate(rows)]
    measured = {number: found for number in visits if (found := _measured(visits[number]))}
    dtype = "fp8" if first.train.matmul != "none" else first.train.dtype
    unchecked = runs_program(first)
    differ = {} if unchecked else differing_losses(measured, dtype)
    result = _result(rows, table, measured, differ) | {"unchecked": unchecked}
    result["is_over"] = not any(read.record.ended in LIVE for read in reads)
    result["calibrate"] = None
    if not unchecked and any(row.record.device is not None for row in table):
        words = ("hpc-gpt", "plan", "--calibrate", str(file.parent), "--cluster", first.cluster.name)
        result["calibrate"] = shlex.join(words)
    speeds = [[_speed(visits[number].get(at)) for at in range(rounds)] for number in visits]
    listed = [
        {"run": row.record.run, "cell": row.name, "tokens_per_s": speed}
        for row, speed in zip(table, speeds, strict=True)
    ]
    records = [row.record.to_tables() for row in table]
    return file, {"schema": 1, "bench": sweep_id, "records": records, "rows": listed, "race": result}


def _speed(visit: RunRead | None) -> float | None:
    """The tokens/s of a visit that ended well."""
    return visit.record.tokens_per_s if visit is not None and visit.record.ended in GOOD else None


def _row(name: str, row: RowInRounds, visits: Mapping[int, RunRead]) -> MeasuredRow:
    """The row over the visits that have ended; without one, as it waits, or cannot run. `name`: the `run` of its
    record."""
    reads = [visits[at] for at in sorted(visits)]
    ended = [Measurement(read.record, read.folder or Path()) for read in reads if read.record.ended not in LIVE]
    step_s = [one.record.step_s for one in ended if one.record.ended in GOOD and one.record.step_s]
    if step_s and not any(one.is_good for one in ended):  # a program whose tokens per step are not known
        record = replace(ended[0].record, run=name, step_s=statistics.median(step_s), rounds=len(step_s))
        return MeasuredRow(row.name, record)
    if ended:
        return measurement_row(row.name, name, ended)
    if reads:
        return MeasuredRow(row.name, replace(reads[0].record, run=name, ended="pending", cause=None))
    return MeasuredRow(row.name, Record(run=name, name=row.name, dialect=DIALECT, ended="refused", cause=row.cause))


def _measured(visits: Mapping[int, RunRead]) -> dict[int, Round]:
    """{round: its measurements} of a row; empty for a row of which a visit failed."""
    ended = {at: visit for at, visit in visits.items() if visit.record.ended not in LIVE}
    if any(visit.record.ended not in GOOD or not visit.record.step_s for visit in ended.values()):
        return {}
    rounds = {}
    for at, visit in ended.items():
        counted = visit.steps.take(visit.steps.counts)
        losses = dict(zip(map(int, counted["step"]), map(float, counted["loss"]), strict=True))
        rounds[at] = Round(counted["step_s"][counted.steady].tolist(), losses)
    return rounds


def _result(
    rows: Sequence[RowInRounds],
    table: Sequence[MeasuredRow],
    measured: Mapping[int, Mapping[int, Round]],
    differ: Mapping[int, str],
) -> dict[str, Any]:
    """The `winner`, by its `run`, None if no row wins; `why`; its `place` in the plan; the command that trains with it
    (`submit`); and the `rows`."""
    used = {number: peak(row.record.memory_allocated_gib) for number, row in enumerate(table)}
    best, why = winner(measured, differ, used, [row.name for row in rows])
    able = {number: rounds for number, rounds in measured.items() if number not in differ}
    leader = best if best is not None else leader_of(able or measured)
    listed = [
        {
            "name": row.name,
            "place": row.place,
            "predicted_step_s": row.predicted_step_s,
            "ratio": ratio(measured, number, leader) if leader is not None and number in measured else None,
            "note": differ.get(number) or (None if number in measured else table[number].record.cause),
            "losses_differ": number in differ,
        }
        for number, row in enumerate(rows)
    ]
    of_winner = rows[best] if best is not None else RowInRounds("")
    run = table[best].record.run if best is not None else None
    return {"winner": run, "why": why, "place": of_winner.place, "submit": of_winner.submit, "rows": listed}
