"""The table of the rows that a race measured, from bench.json, and its winner."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from hpc_gpt.core.columns import Column, column, filled, grid, look_up, peak
from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.format import counted, plain, show_digits, show_share
from hpc_gpt.core.runs.record import FIGURES, Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.runs.own_run import DIALECT
from hpc_gpt.reader.runs.run_read import is_bench, read_records
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.gather import read_bench

# The key of a record's settings that has its entry under `race.rows` of bench.json.
_ROW = "row_of_race"


def measured_rows(file: Path) -> list[Record]:
    """The rows of a bench.json as records by name; empty if the file is not one, or is damaged."""
    if not is_bench(file):
        return []
    records, rows = read_records(file) or [], (read_race(file) or read_stored(file)).get("rows")
    if not isinstance(rows, list) or len(rows) != len(records) or not all(isinstance(row, dict) for row in rows):
        return []
    return [
        replace(record, name=row.get("name") or row.get("cell"), settings={**record.settings, _ROW: row})
        for record, row in zip(records, rows, strict=True)
    ]


# --- the text


def _allocated(record: Record) -> str:
    if record.ended in OUT_OF_MEMORY:
        return "OOM"  # as in minGPT's table of FSDP
    # Left out for ranks on a CPU: the host memory of the processes is another figure.
    on_cpu = record.dialect == DIALECT and record.tokens_per_s is not None and record.device is None
    return "no GPU" if on_cpu else show_digits(peak(record.memory_allocated_gib))


def _notes(record: Record) -> str | None:
    """The notes on a row: why it left its race; else how it ended, if not well, and allocator retries, which slow it
    down."""
    if note := look_up(record, f"settings.{_ROW}.note"):
        return plain(str(note))
    notes = [] if record.ended in (*GOOD, None) else [str(record.ended)]
    return ", ".join(notes + ["slowed down by allocator retries"] * bool(record.allocator_retries)) or None


def _columns(is_race: bool) -> list[Column]:
    """The figures that decide a race, beside plan's predictions."""
    return [
        column("Row", "name", right=False),
        Column("Layout", ("layout",), lambda record: record.shown_layout or None, right=False),
        column("Plan step s", f"settings.{_ROW}.predicted_step_s", show_digits, optional=True),
        replace(FIGURES["step_s"], optional=True),
        column("Spread", "tokens_per_s_spread", show_share, optional=True),
        column("Plan GiB", "predicted_memory_gib", lambda stages: show_digits(peak(stages)), optional=True),
        Column("Allocated GiB", ("memory_allocated_gib",), _allocated, optional=True),
        replace(FIGURES["tokens_per_s"], optional=True),
        replace(FIGURES["mfu"], optional=True),
        column("x leader" if is_race else "Ratio", f"settings.{_ROW}.ratio", "{:.3f}".format),
        column("Rounds", "rounds", optional=True),
        replace(FIGURES["compile_s"], optional=True),
        Column("Notes", ("note",), _notes, right=False),
    ]


def file_text(file: Path, width: int | None = None) -> str:
    """The table of a bench.json, for a race with the winner below; empty if it is not one. `width` None: any width."""
    text = rows_text(measured_rows(file), width, is_race=read_race(file) is not None)
    return text + "".join(f"{plain(line)}\n" for line in race_lines(file)) if text else ""


def rows_text(rows: Sequence[Record], width: int | None = None, is_race: bool = False) -> str:
    """The rows with the figures that one of them has, then the shape, device and versions that they share."""
    if not rows:
        return ""
    text = grid(filled(_columns(is_race), rows), rows).fitted(width)
    return text + "".join(f"{plain(line)}\n" for line in shared_lines(rows))


def shared_lines(records: Sequence[Record]) -> list[str]:
    """The lines on what all rows share: the parts of the trained shape, the device, the versions."""
    shapes = [shape for record in records if (shape := _shape(record))]
    shared = [parts[0] for parts in zip(*shapes, strict=True) if len(set(parts)) == 1 and parts[0]]
    lines = [f"trained: {', '.join(shared)}"] if shared else []
    for name, show in (("device", _device), ("versions", _versions)):
        texts = list(dict.fromkeys(text for record in records if (text := show(record))))
        if len(texts) == 1:
            lines.append(f"{name}: {texts[0]}")
    return lines


def _shape(record: Record) -> tuple[str, ...]:
    if not record.params or not record.seq:
        return ()
    batch = f"global batch {record.global_batch}" if record.global_batch else ""
    ranks = counted(record.gpus, "rank") if record.gpus else ""
    return f"{record.params:,} parameters", f"sequence {record.seq}", batch, record.dtype or "", ranks


def _device(record: Record) -> str:
    if record.dialect != DIALECT:  # a peer's log may not name its device
        return record.device or ""
    return "CPU" if record.device is None and record.memory_allocated_gib is None else str(record.device)


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())


# --- a race


def read_race(file: Path) -> dict[str, Any] | None:
    """The key `race` of a bench.json; None if the bench is not a race."""
    race = read_stored(file).get("race") if is_bench(file) else None
    return race if isinstance(race, dict) and isinstance(race.get("rows"), list) else None


def race_lines(file: Path) -> list[str]:
    """The lines on a race: the winner and the reason, whether the difference is shown, the planner's place for the
    winner, the command that trains with it, and the one by which plan learns from the measured rows."""
    race = read_race(file)
    if race is None:
        return []
    runs = {str(row_run.record.run): row_run for row_run in read_bench(file)}
    names = dict(zip(runs, (str(row.get("name")) for row in race["rows"]), strict=False))
    run = race.get("winner")
    if not race.get("is_over"):
        return ["the race is not over", *([f"ahead so far: {names.get(run)}"] if run else [])]
    if run not in runs:
        return [str(race.get("why"))]
    lines = [f"winner: {names[run]} ({run}), {race.get('why')}"]
    able = [
        name for name, row in zip(runs, race["rows"], strict=False) if row.get("ratio") and not row.get("losses_differ")
    ]
    others = [name for name in able if name != run]
    second = max(others, key=lambda other: runs[other].record.tokens_per_s or 0.0, default=None)
    if second is not None:
        verdict = compare_runs(runs[second], runs[run])
        shown = {"faster": "is shown", "slower": "is shown: it is slower", "no_interval": "needs 3 rounds of both"}
        outcome = shown.get(verdict.verdict, "is not shown")
        interval = verdict.speeds[0].interval
        range_ = f", {interval.low:+.1f} to {interval.high:+.1f} %" if interval is not None else ""
        lines.append(f"its difference from {names[second]}{range_}: {outcome}")
    if race.get("unchecked"):
        lines.append("nobody checked that a step is the same work in all rows")
    if race.get("place"):
        lines.append(f"plan had put it in place {race['place']}")
    if race.get("submit"):
        lines.append(f"next: {race['submit']}")
    if not race.get("unchecked") and runs[run].record.device is not None:
        cluster = RunFolder(file.parent).resolved().cluster.name
        lines.append(f"next: hpc-gpt plan --calibrate {quote(str(file.parent))} --cluster {quote(cluster)}")
    return lines
