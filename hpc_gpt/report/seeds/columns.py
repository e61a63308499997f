"""The columns of each seed's tables, in its own order and words, and where our figure for each comes from.

A seed's figure stands in the column behind ours, as the sweep's file has it, under the key `seed.<seed>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.report.columns import COLUMNS, NOTHING, Column, show_digits, show_params, show_whole
from hpc_gpt.runs.record import Record

# One line's figures under a record's keys: a run's, or what the sweep's file asks for in a row that has none.
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class SeedColumn:
    """One column of a seed's table: its heading, the record's keys behind it, our cell, and the seed's key if any."""

    heading: str
    keys: tuple[str, ...]
    show: Callable[[Figures], str]
    seed: str | None = None


@dataclass(frozen=True)
class SeedTable:
    """What a seed calls a row, and its columns."""

    row: str
    columns: Sequence[SeedColumn]


def _plain(heading: str, key: str, seed: str | None = None) -> SeedColumn:
    return SeedColumn(heading, (key,), lambda figures: _text(figures.get(key)), seed)


def _digits(heading: str, key: str, seed: str | None = None, factor: float = 1.0) -> SeedColumn:
    def show(figures: Figures) -> str:
        figure = figures.get(key)
        return show_digits(None if figure is None else figure * factor)

    return SeedColumn(heading, (key,), show, seed)


def _memory(heading: str, key: str, seed: str, bytes_each: float) -> SeedColumn:
    """The highest of the stages' peaks, in units of so many bytes."""

    def show(figures: Figures) -> str:
        peaks = figures.get(key)
        return show_digits(max(peaks) * 2**30 / bytes_each) if peaks else NOTHING

    return SeedColumn(heading, (key,), show, seed)


def _whole(heading: str, key: str, seed: str) -> SeedColumn:
    return SeedColumn(heading, (key,), lambda figures: show_whole(figures.get(key)), seed)


def _text(value: Any) -> str:
    return NOTHING if value is None else str(value)


def _utilisation(figures: Figures) -> str:
    mean, spread = figures.get("gpu_util_mean"), figures.get("gpu_util_spread")
    return NOTHING if mean is None else f"{mean:.1f} +/- {spread or 0.0:.1f}"


def _latency(figures: Figures) -> str:
    """Seconds for seed 004's 10,240 samples."""
    step_s, batch = figures.get("step_s"), figures.get("global_batch")
    return show_digits(step_s * 10_240 / batch) if step_s and batch else NOTHING


_GPUS = _plain("GPUs", "gpus")
_SIZE = SeedColumn("Size", ("params",), lambda figures: show_params(figures.get("params")), "size")
_TP, _DP, _PP = _plain("TP", "tp"), _plain("DP", "dp"), _plain("PP", "pp")
_CHUNKS = _plain("PP Chunks", "micro_batches")
_BATCH = (_plain("Mic-BS", "micro_batch"), _plain("Glob-BS", "global_batch", "global_batch"))
_SPEED = (_digits("Throughput s", "step_s", "step_s"), _digits("TFLOPs seed formula", "tflops_seed", "tflops_seed"))
_PIPELINE = SeedTable("Row", (_GPUS, _SIZE, _DP, _PP, _CHUNKS, *_BATCH, *_SPEED))
# Its MB and GB are what nvidia-smi and torch print: 2^20 and 2^30 bytes.
_RESERVED, _MIB, _GIB = "memory_reserved_gib", 2**20, 2**30

SEED_TABLES: dict[str, SeedTable] = {
    "gpt2-meg": _PIPELINE,
    "gpt2-meg-ds-3d": _PIPELINE,
    "gpt2-meg-ds-zero": SeedTable("Row", (_GPUS, _SIZE, _TP, _DP, *_BATCH, *_SPEED)),
    "gpt2-hf-ds": SeedTable("Row", (_GPUS, _SIZE, *_BATCH, *_SPEED)),
    "mingpt-fsdp": SeedTable(
        "Row",
        (
            _plain("Batch Size", "micro_batch"),
            _memory("Memory (MB)", _RESERVED, "memory_mb", _MIB),
            SeedColumn("GPU Usage %", ("gpu_util_mean", "gpu_util_spread"), _utilisation, "gpu_util"),
            _digits("TFLOP/s hardware", "tflops_hardware", "tflops_hardware"),
            _digits("Iteration Time (ms)", "step_s", "step_ms", factor=1000),
        ),
    ),
    "colab-ladder": SeedTable(
        "Rung",
        (
            _plain("batch size", "micro_batch"),
            _memory("GPU (GB)", _RESERVED, "memory_gb", _GIB),
            _whole("tok/sec", "tokens_per_s", "tokens_per_s"),
        ),
    ),
    "training-parallelism": SeedTable(
        "Row",
        (
            _GPUS,
            _plain("params", "params", "params"),
            # Tokens: the sweep's file says why.
            _whole("samples_per_second", "tokens_per_s", "samples_per_s"),
            _memory("max_mem (MB)", "memory_allocated_gib", "memory_mb", _MIB),
            _digits("formula (GiB)", "memory_seed003_gib"),
        ),
    ),
    "memory-ladder": SeedTable(
        "Experiments Setting",
        (
            _plain("batch size", "global_batch"),
            _memory("GPU Memory Peak (MB)", _RESERVED, "memory_mb", _MIB),
            SeedColumn("Training Latency (s)", ("step_s",), _latency, "latency_s"),
        ),
    ),
}


def seed_table(sweep: str, seed_keys: Sequence[str]) -> SeedTable:
    """The columns of a sweep: a seed's own by its name, else the usual ones, with the keys that its rows have."""
    if sweep in SEED_TABLES:
        return SEED_TABLES[sweep]
    usual = [_usual(column, seed_keys) for column in COLUMNS if "run" not in column.keys and "ended" not in column.keys]
    shown = {column.seed for column in usual}
    # A figure that no column of ours has.
    alone = [SeedColumn(key, (), lambda _: NOTHING, key) for key in seed_keys if key not in shown | {"notes"}]
    return SeedTable("Row", (*usual, *alone))


def _usual(column: Column, seed_keys: Sequence[str]) -> SeedColumn:
    seed = next((key for key in column.keys if key in seed_keys), None)
    return SeedColumn(column.heading, column.keys, lambda figures: column.show(Record.from_tables(figures)), seed)
