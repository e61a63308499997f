"""The rows of a bench as text: a table, or one block a row if there is only one row or the terminal is narrow."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpc_gpt.bench.measurement import OUT_OF_MEMORY, Row, peak_gib
from hpc_gpt.launch.control import GOOD_ENDS
from hpc_gpt.readers.runs.own_run import DIALECT
from hpc_gpt.runs.record import Record
from hpc_gpt.words import NOTHING, Grid, plain, show_digits, show_share, show_whole

# Seed 000's mark of a row that does not fit.
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


@dataclass(frozen=True)
class _Column:
    """One figure. `label` and `formula` are for a block, which has room to explain the figure."""

    heading: str
    label: str
    show: Callable[[Row], str]
    formula: str = ""
    unit: str = ""


def _digits(key: str) -> Callable[[Row], str]:
    return lambda row: show_digits(getattr(row.record, key))


def _percent(key: str) -> Callable[[Row], str]:
    return lambda row: show_share(getattr(row.record, key))


def _gib(key: str) -> Callable[[Row], str]:
    return lambda row: show_digits(peak_gib(getattr(row.record, key)))


def _allocated(row: Row) -> str:
    if row.record.ended in OUT_OF_MEMORY:
        return OOM
    return NO_GPU if is_on_cpu(row.record) else _gib("memory_allocated_gib")(row)


def is_on_cpu(record: Record) -> bool:
    """Whether our run trained without a GPU, so that its allocations are not counted. Not known for a peer."""
    return record.dialect == DIALECT and record.tokens_per_s is not None and record.device is None


def _utilisation(row: Row) -> str:
    """As in seed 000: `71.9 +/- 22.0`."""
    record = row.record
    if record.gpu_util_mean is None:
        return NOTHING
    return f"{record.gpu_util_mean:.1f} +/- {record.gpu_util_spread or 0.0:.1f}"


def _matmul(row: Row) -> str:
    before, after = row.record.matmul_tflops_before, row.record.matmul_tflops_after
    return NOTHING if before is None and after is None else f"{show_digits(before)} -> {show_digits(after)}"


def _plain(key: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = getattr(row.record, key)
        return NOTHING if value is None else str(value)

    return show


def _tflops(key: str, formula: str) -> _Column:
    return _Column(f"TFLOPs {key.partition('_')[2]}", key, _digits(key), formula, "TFLOP/s per rank")


_COLUMNS = (
    _Column("Tokens/s", "tokens/s", lambda row: show_whole(row.record.tokens_per_s)),
    _Column("Step s", "step time", lambda row: show_digits(row.record.step_s), unit="s"),
    _tflops("tflops_seed", "6 P s B, 8 with full recomputation, seed 001"),
    _tflops("tflops_hardware", "Narayanan et al. 2021, eq. 3"),
    _tflops("tflops_model", "6 P + 12 L h s a token, PaLM"),
    _Column("MFU", "mfu", _percent("mfu"), "tflops_model over the device's dense peak"),
    _Column("Allocated GiB", "memory allocated", _allocated, "peak", "GiB"),
    _Column("Reserved GiB", "memory reserved", _gib("memory_reserved_gib"), "peak", "GiB"),
    _Column("Plan GiB", "memory predicted", _gib("predicted_memory_gib"), "allocated at the peak, by plan", "GiB"),
    _Column("GPU %", "GPU utilisation", _utilisation, unit="%"),
    _Column("Compile s", "compile", _digits("compile_s"), "of the first round", "s"),
    _Column(
        "10th step s",
        "to the tenth step",
        lambda row: show_digits(row.warm_tenth_step_s),
        "from the start; if there are more rounds, without the first",
        "s",
    ),
    _Column("Attention", "attention", _plain("attention_used")),
    _Column("Retries", "allocator retries", _plain("allocator_retries")),
    _Column("Matmul TFLOP/s", "matmul rate", _matmul, "the device's own, before and after", "TFLOP/s"),
    _Column("MHz", "SM clock", _digits("sm_clock_mhz"), unit="MHz"),
    _Column("W", "power", _digits("power_w"), unit="W"),
    _Column("Config", "config hash", _plain("config_hash")),
)


def as_text(rows: Sequence[Row], width: int | None = None) -> str:
    """The rows with every figure that any of them has, then what they share: shape, device, versions. `width` None: any
    width."""
    if not rows:
        return ""
    text = _one(rows[0]) if len(rows) == 1 else _several(rows, width)
    return text + "".join(f"{plain(line)}\n" for line in shared_lines([row.record for row in rows]))


def _one(row: Row) -> str:
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


def _several(rows: Sequence[Row], width: int | None) -> str:
    ratios = ratios_to_first([row.record.tokens_per_s for row in rows])
    columns = [column for column in _COLUMNS if any(column.show(row) != NOTHING for row in rows)]
    has_spread = any(row.record.tokens_per_s_spread is not None for row in rows)
    headings = ["Cell", "Ratio", *(["Spread"] if has_spread else []), *(column.heading for column in columns), "Notes"]
    lines = []
    for row, ratio in zip(rows, ratios, strict=True):
        lines.append(
            [
                row.cell,
                NOTHING if ratio is None else f"{ratio:.3f}",
                *([_percent("tokens_per_s_spread")(row)] if has_spread else []),
                *(column.show(row) for column in columns),
                _notes(row.record),
            ]
        )
    left = {"Cell", "Attention", "Config", "Notes"}
    grid = Grid(headings, [heading not in left for heading in headings], lines)
    if width is None or grid.width <= width:
        return grid.aligned()
    return "".join(grid.block(cells) for cells in grid.lines)


def _notes(record: Record) -> str:
    """How a run ended, if not well; and allocator retries, which slow a row down, as seed 000 says of its batch 8."""
    notes = [] if record.ended in (*GOOD_ENDS, None) else [str(record.ended)]
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
    ranks = f"{record.gpus} rank{'s' if record.gpus != 1 else ''}"
    return f"{record.params:,} parameters", f"sequence {record.seq}", batch, str(record.dtype), ranks


def _device(record: Record) -> str:
    if record.dialect != DIALECT:  # a peer's log may not name its device
        return record.device or ""
    return "CPU" if record.device is None and record.memory_allocated_gib is None else str(record.device)


def _versions(record: Record) -> str:
    return ", ".join(f"{name} {version}" for name, version in record.versions.items())
