"""The rows of a bench as text: a table, or one block a row if there is only one row or the terminal is narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hpc_gpt.bench.measurement import OUT_OF_MEMORY, BenchRow
from hpc_gpt.columns import FIGURES, Column, column, filled, grid, peak
from hpc_gpt.ends.failures import GOOD
from hpc_gpt.readers.runs.own_run import DIALECT
from hpc_gpt.runs.record import Record
from hpc_gpt.words import NOTHING, counted, plain, show_digits, show_share

# minGPT's FSDP table marks so a row that does not fit.
OOM = "OOM"
# The mark of a run on a CPU: the host memory of its processes is a different figure.
NO_GPU = "no GPU"
SLOWED = "slowed down by allocator retries"


def ratios_to_first(figures: Sequence[float | None]) -> list[float | None]:
    """Each figure over the first known one; None for an unknown figure.

    >>> ratios_to_first([None, 200.0, 100.0])
    [None, 1.0, 0.5]
    """
    first = next((figure for figure in figures if figure), None)
    return [figure / first if figure is not None and first else None for figure in figures]


def _allocated(record: Record) -> str:
    if record.ended in OUT_OF_MEMORY:
        return OOM
    return NO_GPU if is_on_cpu(record) else show_digits(peak(record.memory_allocated_gib))


def is_on_cpu(record: Record) -> bool:
    """Whether our run trained without a GPU, so that its allocations are not counted. Not known for a peer."""
    return record.dialect == DIALECT and record.tokens_per_s is not None and record.device is None


def _matmul(record: Record) -> str:
    before, after = record.matmul_tflops_before, record.matmul_tflops_after
    return NOTHING if before is None and after is None else f"{show_digits(before)} -> {show_digits(after)}"


def _of_row(figure: Column) -> Column:
    return replace(figure, value=lambda row: figure.value(row.record))


def _gib(heading: str, key: str, label: str, formula: str) -> Column:
    return column(heading, key, lambda stages: show_digits(peak(stages)), label=label, unit="GiB", formula=formula)


_ALLOCATED = "memory_allocated_gib"
_COLUMNS = (
    *(_of_row(FIGURES[key]) for key in ("tokens_per_s", "step_s", "tflops_seed", "tflops_hardware", "tflops_model")),
    _of_row(FIGURES["mfu"]),
    _of_row(Column("Allocated GiB", (_ALLOCATED,), _allocated, label="memory allocated", unit="GiB", formula="peak")),
    _of_row(_gib("Reserved GiB", "memory_reserved_gib", "memory reserved", "peak")),
    _of_row(_gib("Plan GiB", "predicted_memory_gib", "memory predicted", "allocated at the peak, by plan")),
    *(_of_row(FIGURES[key]) for key in ("gpu_util_mean", "compile_s")),
    column(
        "10th step s",
        "warm_tenth_step_s",
        show_digits,
        label="to the tenth step",
        unit="s",
        formula="from the start; if there are more rounds, without the first",
    ),
    *(_of_row(FIGURES[key]) for key in ("attention_used", "allocator_retries")),
    _of_row(
        Column(
            "Matmul TFLOP/s",
            ("matmul_tflops_before", "matmul_tflops_after"),
            _matmul,
            label="matmul rate",
            unit="TFLOP/s",
            formula="the device's own, before and after",
        )
    ),
    *(_of_row(FIGURES[key]) for key in ("sm_clock_mhz", "power_w", "config_hash")),
)
_NOTES = Column("Notes", (), lambda row: _notes(row.record), right=False)


def bench_text(rows: Sequence[BenchRow], width: int | None = None) -> str:
    """The rows with every figure that any of them has, then what they share: shape, device, versions. `width` None: any
    width."""
    if not rows:
        return ""
    text = _one(rows[0]) if len(rows) == 1 else _several(rows, width)
    return text + "".join(f"{plain(line)}\n" for line in shared_lines([row.record for row in rows]))


def _one(row: BenchRow) -> str:
    lines = [
        (
            column.label,
            shown + (f" {column.unit}" if column.unit and shown not in (OOM, NO_GPU) else ""),
            column.formula,
        )
        for column in _COLUMNS
        if (shown := column.show(row)) != NOTHING
    ]
    if row.record.tokens_per_s_spread is not None:
        lines.insert(1, ("spread", f"{row.record.tokens_per_s_spread:.1%}", f"of {row.record.rounds} rounds"))
    lines.insert(0, ("ended", _ended(row.record), ""))
    margin = max(len(label) for label, _, _ in lines)
    body = "".join(
        f"  {label:<{margin}}  {plain(shown)}{f'  ({formula})' if formula else ''}\n" for label, shown, formula in lines
    )
    return f"{plain(row.cell)}\n{body}"


def _several(rows: Sequence[BenchRow], width: int | None) -> str:
    ratios = dict(zip(map(id, rows), ratios_to_first([row.record.tokens_per_s for row in rows]), strict=True))
    first = (
        column("Cell", "cell", right=False),
        Column("Ratio", (), lambda row: ratios[id(row)], "{:.3f}".format),
        _of_row(column("Spread", "tokens_per_s_spread", show_share, optional=True)),
    )
    shown = filled([*first, *(replace(each, optional=True) for each in _COLUMNS), _NOTES], rows)
    return grid(shown, rows).fitted(width)


def _notes(record: Record) -> str:
    """How a run ended, if not well; and allocator retries, which slow a row down."""
    notes = [] if record.ended in (*GOOD, None) else [str(record.ended)]
    if not notes and not record.tokens_per_s:
        notes.append("no tokens/s found")
    if record.allocator_retries:
        notes.append(SLOWED)
    return ", ".join(notes) or NOTHING


def _ended(record: Record) -> str:
    return str(record.ended) + (f": {record.cause}" if record.cause else "")


def shared_lines(records: Sequence[Record]) -> list[str]:
    """Lines that are printed once: the parts of the trained shape that all rows share, the device, the versions."""
    shapes = [shape for record in records if (shape := _shape(record))]
    same = [parts[0] for parts in zip(*shapes, strict=True) if len(set(parts)) == 1 and parts[0]]
    lines = [f"trained: {', '.join(same)}"] if same else []
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
    return f"{record.params:,} parameters", f"sequence {record.seq}", batch, str(record.dtype), ranks


def _device(record: Record) -> str:
    if record.dialect != DIALECT:  # a peer's log may not name its device
        return record.device or ""
    return "CPU" if record.device is None and record.memory_allocated_gib is None else str(record.device)


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())
