"""The table of rows that were measured in rounds, and which one is fastest: of a sweep, or of the bench.json of a
race of 0.4."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from shlex import quote
from typing import Any

from hpc_gpt.core.columns import Column, column, filled, grid, look_up, peak
from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.format import counted, plain, show_digits, show_share
from hpc_gpt.core.runs.record import FIGURES, Record
from hpc_gpt.core.runs.rounds import is_bench
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.runs.own_run import DIALECT
from hpc_gpt.reader.runs.run_read import records_in
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.gather import runs_of_tables

# The key of a record's settings that has its row of the ranking.
_ROW = "ranked_row"


def tables_of(file: Path) -> dict[str, Any]:
    """The tables of a bench.json, with the command by which `plan` learns from its rows; empty if it is not one."""
    if not is_bench(file):
        return {}
    tables = read_stored(file)
    if (ranking := ranking_of(tables)) is not None and not ranking.get("unchecked") and "calibrate" not in ranking:
        cluster = RunFolder(file.parent).resolved().cluster.name
        if any(record.device is not None for record in records_in(tables, file) or ()):
            ranking["calibrate"] = f"hpc-gpt plan --calibrate {quote(str(file.parent))} --cluster {quote(cluster)}"
    return tables


def measured_rows(tables: dict[str, Any], file: Path) -> list[Record]:
    """The rows of the tables as records by name; empty if they are damaged. `file`: where they are from."""
    records, rows = records_in(tables, file) or [], (ranking_of(tables) or tables).get("rows")
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
    """The notes on a row: why it is not compared; else how it ended, if not well, and allocator retries, which slow it
    down."""
    if note := look_up(record, f"settings.{_ROW}.note"):
        return plain(str(note))
    notes = [] if record.ended in (*GOOD, None) else [str(record.ended)]
    return ", ".join(notes + ["slowed down by allocator retries"] * bool(record.allocator_retries)) or None


def _columns(is_ranked: bool) -> list[Column]:
    """The figures that decide which row is fastest, beside plan's predictions."""
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
        column("x leader" if is_ranked else "Ratio", f"settings.{_ROW}.ratio", "{:.3f}".format),
        column("Rounds", "rounds", optional=True),
        replace(FIGURES["compile_s"], optional=True),
        Column("Notes", ("note",), _notes, right=False),
    ]


def file_text(file: Path, width: int | None = None) -> str:
    """The table of a bench.json, with the fastest row below; empty if it is not one. `width` None: any width."""
    return tables_text(tables_of(file), file, width)


def tables_text(tables: dict[str, Any], file: Path, width: int | None = None) -> str:
    """The table of rows that were measured in rounds, with the fastest one below; `file` and `width` as above."""
    if not tables:
        return ""
    text = rows_text(measured_rows(tables, file), width, is_ranked=ranking_of(tables) is not None)
    return text + "".join(f"{plain(line)}\n" for line in ranking_lines(tables, file)) if text else ""


def rows_text(rows: Sequence[Record], width: int | None = None, is_ranked: bool = False) -> str:
    """The rows with the figures that one of them has, then the shape, device and versions that they share."""
    if not rows:
        return ""
    text = grid(filled(_columns(is_ranked), rows), rows).fitted(width)
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


# --- the fastest row


def ranking_of(tables: dict[str, Any]) -> dict[str, Any] | None:
    """The key `race` of the tables, which says which row is fastest; None if they have none."""
    ranking = tables.get("race")
    return ranking if isinstance(ranking, dict) and isinstance(ranking.get("rows"), list) else None


def ranking_lines(tables: dict[str, Any], file: Path) -> list[str]:
    """The lines on the fastest row: the winner and the reason, whether the difference is shown, the planner's place for
    the winner, the command that trains with it, and the one by which plan learns from the measured rows."""
    ranking = ranking_of(tables)
    if ranking is None:
        return []
    runs = {str(row_run.record.run): row_run for row_run in runs_of_tables(tables, file)}
    names = dict(zip(runs, (str(row.get("name")) for row in ranking["rows"]), strict=False))
    run = ranking.get("winner")
    if not ranking.get("is_over"):
        return ["not all rounds are over", *([f"ahead so far: {names.get(run)}"] if run else [])]
    if run not in runs:
        return [str(ranking.get("why"))]
    lines = [f"winner: {names[run]} ({run}), {ranking.get('why')}"]
    able = [
        name
        for name, row in zip(runs, ranking["rows"], strict=False)
        if row.get("ratio") and not row.get("losses_differ")
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
    if ranking.get("unchecked"):
        lines.append("nobody checked that a step is the same work in all rows")
    if ranking.get("place"):
        lines.append(f"plan had put it in place {ranking['place']}")
    if ranking.get("submit"):
        lines.append(f"next: {ranking['submit']}")
    if ranking.get("calibrate"):
        lines.append(f"next: {ranking['calibrate']}")
    return lines
