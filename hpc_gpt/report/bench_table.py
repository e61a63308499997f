"""The table of the rows that a bench or a race measured, from bench.json, and the winner of a race."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from statistics import median
from typing import Any

from hpc_gpt.core.columns import FIGURES, Column, column, filled, grid, peak
from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.format import NOTHING, counted, plain, show_digits, show_share
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.runs.stored import read_stored
from hpc_gpt.reader.records import is_bench, read_records
from hpc_gpt.reader.records.own_run import DIALECT
from hpc_gpt.report.compare import compare_runs
from hpc_gpt.report.gather import read_bench

# The mark of minGPT's FSDP table for a row that does not fit.
OOM = "OOM"
# The mark of a run on a CPU: the host memory of its processes is another figure.
NO_GPU = "no GPU"
SLOWED = "slowed down by allocator retries"


@dataclass(frozen=True)
class MeasuredRow:
    """A measured row: its record, and its entry under `rows` in bench.json, for a race under `race.rows`."""

    record: Record
    row: Mapping[str, Any]

    @property
    def layout(self) -> str | None:
        return self.record.shown_layout or None

    @property
    def tenth_step_s(self) -> float | None:
        """The median over the rounds, without the first one, which may find no compiler cache, if there are others."""
        rounds = self.row.get("tenth_step_s") or []
        return median(rounds[1:] or rounds) if rounds else None


def measured_rows(file: Path) -> list[MeasuredRow]:
    """The rows of a bench.json; empty if the file is not one, or is damaged."""
    if not is_bench(file):
        return []
    records, rows = read_records(file) or [], (read_race(file) or read_stored(file)).get("rows")
    if not isinstance(rows, list) or len(rows) != len(records) or not all(isinstance(row, dict) for row in rows):
        return []
    return [MeasuredRow(record, row) for record, row in zip(records, rows, strict=True)]


# --- the columns


def _allocated(record: Record) -> str:
    if record.ended in OUT_OF_MEMORY:
        return OOM
    return NO_GPU if is_on_cpu(record) else show_digits(peak(record.memory_allocated_gib))


def is_on_cpu(record: Record) -> bool:
    """Whether our run trained without a GPU, so that its allocations are not counted; False for a peer's run."""
    return record.dialect == DIALECT and record.tokens_per_s is not None and record.device is None


def _matmul(record: Record) -> str:
    before, after = record.matmul_tflops_before, record.matmul_tflops_after
    return NOTHING if before is None and after is None else f"{show_digits(before)} -> {show_digits(after)}"


def _notes(line: MeasuredRow) -> str | None:
    """The notes on a row: why it left its race; else how it ended, if not well, and allocator retries, which slow it
    down."""
    record, note = line.record, line.row.get("note")
    if note:
        return plain(str(note))
    notes = [] if record.ended in (*GOOD, None) else [str(record.ended)]
    if not notes and not record.tokens_per_s and "cell" in line.row:
        notes.append("no tokens/s found")
    if record.allocator_retries:
        notes.append(SLOWED)
    return ", ".join(notes) or None


def _of_record(figure: Column) -> Column:
    return replace(figure, value=lambda line: figure.value(line.record), optional=True)


def _of_row(heading: str, key: str, digits: Any, **options: Any) -> Column:
    return Column(heading, (key,), lambda line: line.row.get(key), digits, **options)


def _gib(heading: str, key: str, label: str, formula: str) -> Column:
    return column(heading, key, lambda stages: show_digits(peak(stages)), label=label, unit="GiB", formula=formula)


_TOKENS, _STEP, _MFU, _COMPILE = (_of_record(FIGURES[key]) for key in ("tokens_per_s", "step_s", "mfu", "compile_s"))
_SPREAD = _of_record(column("Spread", "tokens_per_s_spread", show_share))
_PLAN = _of_record(_gib("Plan GiB", "predicted_memory_gib", "memory predicted", "allocated at the peak, by plan"))
_PEAK = _of_record(
    Column("Allocated GiB", ("memory_allocated_gib",), _allocated, label="memory allocated", unit="GiB", formula="peak")
)
_TENTH = Column(
    "10th step s",
    ("warm_tenth_step_s",),
    lambda line: line.tenth_step_s,
    show_digits,
    optional=True,
    label="to the tenth step",
    unit="s",
    formula="from the start; if there are more rounds, without the first",
)
_RATE = Column(
    "Matmul TFLOP/s",
    ("matmul_tflops_before", "matmul_tflops_after"),
    _matmul,
    label="matmul rate",
    unit="TFLOP/s",
    formula="the device's own, before and after",
)
_NOTES = Column("Notes", ("note",), _notes, right=False)
# A bench shows every figure.
_FIGURES = (
    _TOKENS,
    _STEP,
    *(_of_record(FIGURES[key]) for key in ("tflops_seed", "tflops_hardware", "tflops_model")),
    _MFU,
    _PEAK,
    _of_record(_gib("Reserved GiB", "memory_reserved_gib", "memory reserved", "peak")),
    _PLAN,
    _of_record(FIGURES["gpu_util_mean"]),
    _COMPILE,
    _TENTH,
    *(_of_record(FIGURES[key]) for key in ("attention_used", "allocator_retries")),
    _of_record(_RATE),
    *(_of_record(FIGURES[key]) for key in ("sm_clock_mhz", "power_w", "config_hash")),
)
_BENCH = (
    _of_row("Cell", "cell", str, right=False),
    _of_row("Ratio", "ratio", "{:.3f}".format),
    _SPREAD,
    *_FIGURES,
    _NOTES,
)
# A race shows the figures that decide it, beside plan's predictions.
_RACE = (
    _of_row("Row", "name", str, right=False),
    Column("Layout", ("layout",), lambda line: line.layout, right=False),
    _of_row("Plan step s", "predicted_step_s", show_digits, optional=True),
    _STEP,
    _SPREAD,
    _PLAN,
    _PEAK,
    _TOKENS,
    _MFU,
    _of_row("x leader", "ratio", "{:.3f}".format),
    _of_record(Column("Rounds", ("rounds",), lambda record: record.rounds)),
    _COMPILE,
    _NOTES,
)


# --- the text


def file_text(file: Path, width: int | None = None) -> str:
    """The table of a bench.json, for a race with the winner below; empty if it is not one. `width` None: any width."""
    text = rows_text(measured_rows(file), width, is_race=read_race(file) is not None)
    return text + "".join(f"{plain(line)}\n" for line in race_lines(file)) if text else ""


def rows_text(rows: Sequence[MeasuredRow], width: int | None = None, is_race: bool = False) -> str:
    """The rows with every figure that one of them has, then the shape, device and versions that they share."""
    if not rows:
        return ""
    if len(rows) == 1 and not is_race:
        text = _one(rows[0])
    else:
        text = grid(filled(_RACE if is_race else _BENCH, rows), rows).fitted(width)
    return text + "".join(f"{plain(line)}\n" for line in shared_lines([row.record for row in rows]))


def _one(row: MeasuredRow) -> str:
    lines = [
        (
            figure.label,
            shown + (f" {figure.unit}" if figure.unit and shown not in (OOM, NO_GPU) else ""),
            figure.formula,
        )
        for figure in _FIGURES
        if (shown := figure.show(row)) != NOTHING
    ]
    if row.record.tokens_per_s_spread is not None:
        lines.insert(1, ("spread", f"{row.record.tokens_per_s_spread:.1%}", f"of {row.record.rounds} rounds"))
    lines.insert(0, ("ended", _ended(row.record), ""))
    margin = max(len(label) for label, _, _ in lines)
    body = "".join(
        f"  {label:<{margin}}  {plain(shown)}{f'  ({formula})' if formula else ''}\n" for label, shown, formula in lines
    )
    return f"{plain(row.row['cell'])}\n{body}"


def _ended(record: Record) -> str:
    return str(record.ended) + (f": {record.cause}" if record.cause else "")


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
    winner, and the command by which plan learns from the measured rows."""
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
    if not race.get("unchecked") and runs[run].record.device is not None:
        cluster = RunFolder(file.parent).resolved().cluster.name
        lines.append(f"next: hpc-gpt plan --calibrate {quote(str(file.parent))} --cluster {quote(cluster)}")
    return lines
