"""The columns of a report: the usual ones in seed 001's order, those of a user's choice, and what each key means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.tables import close_matches
from hpc_gpt.words import NOTHING, show_digits, show_params, show_value, show_whole

_HINT = "keys are those of a record, as hpc-gpt help record lists them; settings.engine.optimizer reaches inside one"


@dataclass(frozen=True)
class Column:
    """One column: its heading, the record's keys it shows (the csv has each in a column of its own), and its cells.

    `optional`: the usual table has it only if a run fills it.
    """

    heading: str
    keys: tuple[str, ...]
    show: Callable[[Record], str]
    right: bool = True
    optional: bool = False


def show_spread(record: Record) -> str:
    """The step time's 10th to 90th percentile."""
    if record.step_s_p10 is None:
        return NOTHING
    return f"{show_digits(record.step_s_p10)}..{show_digits(record.step_s_p90)}"


def peak_memory_gib(record: Record) -> tuple[float | None, str]:
    """The memory of the stage that holds most, and which kind of figure it is: allocated or reserved."""
    for figures, words in ((record.memory_allocated_gib, "allocated"), (record.memory_reserved_gib, "reserved")):
        known = [figure for figure in figures or () if figure is not None and abs(figure) < 1e15]
        if known:
            return max(known), words
    return None, ""


def share_off(predicted: float | None, measured: float | None) -> float | None:
    """How far a prediction was off, as a share of what was measured; None if either is not known.

    >>> share_off(3.0, 2.0)
    0.5
    """
    if not predicted or not measured or measured <= 0:
        return None
    error = predicted / measured - 1
    return error if math.isfinite(error) else None


def show_name(record: Record) -> str:
    """The name of a run: name/run, or the run alone if it begins with the name, as a log's run mostly does.

    >>> show_name(Record(name="demo", run="20261120-1")), show_name(Record(name="train", run="train-4711"))
    ('demo/20261120-1', 'train-4711')
    """
    if record.name and record.run and record.run.startswith(record.name):
        return record.run
    return "/".join(part for part in (record.name, record.run) if part) or NOTHING


def show_losses(record: Record) -> str:
    """Loss at the first step -> at the last."""
    if record.loss_first is None or record.loss_last is None:
        return NOTHING
    return f"{record.loss_first:.3f} -> {record.loss_last:.3f}"


def choose_columns(keys: Sequence[str]) -> tuple[Column, ...]:
    """A column for each key, as the usual table shows it if that has it alone; ConfigError for an unknown key."""
    _check(keys)
    usual = {column.keys[0]: column for column in COLUMNS if len(column.keys) == 1}
    return tuple(usual.get(key) or Column(key, (key,), _value(key), _is_figure(key)) for key in keys)


def sort_records(records: Sequence[Record], keys: Sequence[str]) -> list[int]:
    """The order of the records' indexes by the keys, the first one leading; `-key` is from high to low.

    Records that have no value come last either way; equal ones keep their order. ConfigError for an unknown key.
    """
    _check([key.removeprefix("-") for key in keys])
    order = list(range(len(records)))
    for key in reversed(keys):
        value = {index: look_up(records[index], key.removeprefix("-")) for index in order}
        known = [index for index in order if value[index] is not None]
        known.sort(key=lambda index: _comparable(value[index]), reverse=key.startswith("-"))
        order = known + [index for index in order if value[index] is None]
    return order


def look_up(record: Record, key: str) -> Any:
    """The value under a key of the record, a dot reaching inside; None if there is none."""
    name, *inner = key.split(".")
    value = getattr(record, name)
    for step in inner:
        value = value.get(step) if isinstance(value, dict) else None
    return value


def _check(keys: Sequence[str]) -> None:
    for key in keys:
        name = key.partition(".")[0]
        if name not in RECORD_KEYS:
            raise ConfigError(f"a record has no key {name!r}", close_matches(name, RECORD_KEYS) or _HINT)


def _comparable(value: Any) -> tuple[int, Any]:
    """Numbers sort before texts and lists: two records may hold either under one key."""
    if isinstance(value, int | float):
        return 0, value
    if isinstance(value, list) and all(isinstance(each, int | float) for each in value):
        return 0, max(value, default=0)
    return 1, str(value)


def _is_figure(key: str) -> bool:
    kinds = Record.__annotations__[key.partition(".")[0]]
    return any(kind in kinds for kind in ("int", "float")) and "dict" not in kinds


def _value(key: str) -> Callable[[Record], str]:
    return lambda record: show_value(look_up(record, key))


def _plain(key: str) -> Callable[[Record], str]:
    def show(record: Record) -> str:
        value = getattr(record, key)
        return NOTHING if value is None else str(value)

    return show


def _digits(key: str) -> Callable[[Record], str]:
    return lambda record: show_digits(getattr(record, key))


COLUMNS = (
    Column("GPUs", ("gpus",), _plain("gpus")),
    Column("Size", ("params",), lambda record: show_params(record.params)),
    Column("TP", ("tp",), _plain("tp")),
    Column("PP", ("pp",), _plain("pp")),
    Column("DP", ("dp",), _plain("dp")),
    Column("Micro-batches", ("micro_batches",), _plain("micro_batches")),
    Column("Mic-BS", ("micro_batch",), _plain("micro_batch")),
    Column("Glob-BS", ("global_batch",), _plain("global_batch")),
    Column("Step s", ("step_s",), lambda record: show_digits(record.step_s)),
    Column("p10..p90", ("step_s_p10", "step_s_p90", "steps_used", "warmup_steps"), show_spread),
    Column("TFLOPs seed", ("tflops_seed",), _digits("tflops_seed")),
    Column("TFLOPs hardware", ("tflops_hardware",), _digits("tflops_hardware")),
    Column("TFLOPs model", ("tflops_model",), _digits("tflops_model")),
    Column("TFLOPs printed", ("tflops_printed",), _digits("tflops_printed"), optional=True),
    Column("Tokens/s", ("tokens_per_s",), lambda record: show_whole(record.tokens_per_s)),
    Column(
        "Memory GiB",
        ("memory_allocated_gib", "memory_reserved_gib"),
        lambda record: show_digits(peak_memory_gib(record)[0]),
        optional=True,
    ),
    Column("Loss", ("loss_first", "loss_last", "loss_eval"), show_losses),
    Column("Ended", ("ended",), _plain("ended"), right=False),
    Column("Run", ("name", "run", "job_id"), show_name, False),
)

# What each key of a record says, for `hpc-gpt help record`.
MEANING = {
    "schema": "version of this set of keys",
    "run": "the run's id: its folder's name, or that of a log",
    "name": "the experiment, or what the log calls it",
    "dialect": "whose lines the figures are from",
    "engine": "what trained",
    "job_id": "the scheduler's number, 4711_3 in an array",
    "gpus": "GPUs, or ranks on a CPU",
    "nodes": "nodes",
    "device": "the GPU's model",
    "tp": "tensor parallel size",
    "pp": "pipeline parallel size",
    "dp": "data parallel size",
    "zero_stage": "ZeRO stage",
    "micro_batch": "samples in one pass of one rank",
    "micro_batches": "passes in a step of one rank",
    "global_batch": "samples in a step: micro_batch x micro_batches x dp",
    "seq": "tokens in a sample",
    "hidden": "width of the model",
    "layers": "layers",
    "heads": "attention heads",
    "vocab": "vocabulary with its padding",
    "params": "parameters, the tied embedding once",
    "recompute": "activations recomputed: none, selective, full",
    "dtype": "of the matrix products",
    "settings": "every other switch; settings.engine.compile reaches inside",
    "started": "first start, UTC",
    "ended_at": "end, UTC",
    "step_s": "seconds a step: the median of the steps after warm-up",
    "step_s_p10": "10th percentile of the same steps",
    "step_s_p90": "90th percentile",
    "steps_used": "how many those are",
    "warmup_steps": "steps left out as warm-up",
    "tokens_per_s": "tokens a second, of all GPUs",
    "step_s_mean": "seconds a step: the mean of the same steps",
    "tokens_total": "tokens trained",
    "tflops_seed": "TFLOP/s a GPU: 8 P s B (6 without recomputation), seed 001",
    "tflops_hardware": "TFLOP/s a GPU: Narayanan et al. 2021, eq. 3",
    "tflops_model": "TFLOP/s a GPU: 6 P + 12 L h s a token, PaLM",
    "tflops_printed": "TFLOP/s a GPU as the program printed it, by its own formula",
    "mfu": "tflops_model over the device's dense peak",
    "hfu": "tflops_hardware over the device's dense peak",
    "memory_allocated_gib": "peak a GPU, one figure a pipeline stage",
    "memory_reserved_gib": "the same, as the allocator reserved it",
    "predicted_memory_gib": "peak a GPU as the planner predicted it, allocated, one figure a pipeline stage",
    "memory_seed003_gib": "by seed 003's formula",
    "predicted_step_s": "seconds a step as the planner predicted it",
    "gpu_util_mean": "GPU utilisation, percent",
    "gpu_util_spread": "its standard deviation",
    "allocator_retries": "times the allocator had to free and try again",
    "attention_used": "attention kernel",
    "compile_s": "seconds of compilation",
    "matmul_tflops_before": "the device's own rate before",
    "matmul_tflops_after": "and after",
    "sm_clock_mhz": "clock of the GPU",
    "power_w": "power of a GPU",
    "rounds": "rounds of a benchmark",
    "tokens_per_s_spread": "spread over the rounds",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "loss_eval": "last evaluation's loss",
    "skipped_steps": "steps skipped by an overflow",
    "nan_steps": "steps with a loss that is no number",
    "save_s": "seconds a checkpoint took, median",
    "gpu_hours": "GPUs x hours, all attempts",
    "node_list": "nodes of the last attempt",
    "failed_node": "the node whose fault it was",
    "attempts": "each start: steps, times, how it ended",
    "ended": "how the run ended, or where it stands",
    "cause": "why, in the log's words",
    "config_hash": "equal for runs that may be compared as repeats",
    "versions": "of the software",
    "flags": "what looks wrong, in words",
    "sources": "for each key the file and line, or how it was inferred",
}
