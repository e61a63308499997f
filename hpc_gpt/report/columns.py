"""The columns of a report: the usual ones in seed 001's order, those that a user names, and what each key means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpc_gpt.errors import ConfigError
from hpc_gpt.runs.record import RECORD_KEYS, Record
from hpc_gpt.tables import close_matches
from hpc_gpt.words import NOTHING, show_digits, show_params, show_value, show_whole

_HINT = "hpc-gpt help record lists the keys of a record; a dot reaches into one, as in settings.engine.optimizer"


@dataclass(frozen=True)
class Column:
    """One column: its heading, the record's keys it shows (csv has one column for each), and its text for a record.

    `optional`: the usual table has it only if a run has a value.
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
    """The highest memory of any stage, and which kind of figure it is: allocated or reserved."""
    for figures, kind in ((record.memory_allocated_gib, "allocated"), (record.memory_reserved_gib, "reserved")):
        known = [figure for figure in figures or () if figure is not None and abs(figure) < 1e15]
        if known:
            return max(known), kind
    return None, ""


def share_off(predicted: float | None, measured: float | None) -> float | None:
    """A prediction's error as a share of the measured value; None if either is not known.

    >>> share_off(3.0, 2.0)
    0.5
    """
    if not predicted or not measured or measured <= 0:
        return None
    error = predicted / measured - 1
    return error if math.isfinite(error) else None


def show_name(record: Record) -> str:
    """A run's name/run, or the run alone if it begins with the name, as for most logs.

    >>> show_name(Record(name="demo", run="20261120-1")), show_name(Record(name="train", run="train-4711"))
    ('demo/20261120-1', 'train-4711')
    """
    if record.name and record.run and record.run.startswith(record.name):
        return record.run
    return "/".join(part for part in (record.name, record.run) if part) or NOTHING


def show_losses(record: Record) -> str:
    """The loss of the first step -> of the last."""
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

    Records without a value come last in both directions; equal ones keep their order. ConfigError for an unknown key.
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
    """The value of a key, such as settings.engine.optimizer; None if there is none."""
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
    """Numbers sort before texts, as two records may have either under one key."""
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

# What each key of a record means, for `hpc-gpt help record`.
MEANING = {
    "schema": "version of this set of keys",
    "run": "the run's id: the name of its folder or log",
    "name": "the experiment, or what the log calls it",
    "dialect": "the program whose log lines the figures are from",
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
    "dtype": "data type of the matrix products",
    "settings": "every other switch; settings.engine.compile reaches inside",
    "started": "first start, UTC",
    "ended_at": "end, UTC",
    "step_s": "seconds of a step: the median of the steps after warm-up",
    "step_s_p10": "10th percentile of the same steps",
    "step_s_p90": "90th percentile",
    "steps_used": "how many steps these are from",
    "warmup_steps": "steps left out as warm-up",
    "tokens_per_s": "tokens per second, of all GPUs",
    "step_s_mean": "seconds of a step: the mean of the same steps",
    "tokens_total": "tokens trained",
    "tflops_seed": "TFLOP/s per GPU: 8 P s B (6 without recomputation), seed 001",
    "tflops_hardware": "TFLOP/s per GPU: Narayanan et al. 2021, eq. 3",
    "tflops_model": "TFLOP/s per GPU: 6 P + 12 L h s a token, PaLM",
    "tflops_printed": "TFLOP/s per GPU as the program printed it, by its own formula",
    "mfu": "tflops_model over the device's dense peak",
    "hfu": "tflops_hardware over the device's dense peak",
    "memory_allocated_gib": "peak of a GPU that PyTorch allocated, one figure per pipeline stage",
    "memory_reserved_gib": "peak of a GPU that PyTorch reserved, one figure per pipeline stage",
    "predicted_memory_gib": "allocated peak of a GPU as predicted, one figure per pipeline stage",
    "memory_seed003_gib": "memory of a GPU by seed 003's formula",
    "predicted_step_s": "seconds of a step as predicted",
    "gpu_util_mean": "GPU utilisation, percent",
    "gpu_util_spread": "standard deviation of gpu_util_mean",
    "allocator_retries": "times the allocator had to free memory and retry",
    "attention_used": "attention kernel",
    "compile_s": "seconds of compilation",
    "matmul_tflops_before": "the device's measured matrix product rate before the steps",
    "matmul_tflops_after": "the same after the steps",
    "sm_clock_mhz": "clock of the GPU",
    "power_w": "power of a GPU",
    "rounds": "rounds of a benchmark",
    "tokens_per_s_spread": "spread of tokens_per_s over the rounds",
    "loss_first": "loss of the first step",
    "loss_last": "loss of the last step",
    "loss_eval": "loss of the last evaluation",
    "skipped_steps": "steps skipped by an overflow",
    "nan_steps": "steps whose loss is not a number",
    "save_s": "median seconds of a checkpoint",
    "gpu_hours": "GPUs x hours, all attempts",
    "node_list": "nodes of the last attempt",
    "failed_node": "the node that failed",
    "attempts": "each start of the run: steps, times, how it ended",
    "ended": "how the run ended, or its state",
    "cause": "why it ended, as the log says it",
    "config_hash": "equal for repeats of one run",
    "versions": "versions of the software",
    "flags": "what looks wrong, in words",
    "sources": "for each key the file and line, or how it was inferred",
}
