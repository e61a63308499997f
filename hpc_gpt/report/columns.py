"""The columns of a report, in seed 001's order, and how each figure reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hpc_gpt.runs.record import Record

NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """One column: its heading, the record's keys it shows (the csv has each apart), and the cell's text.

    `optional`: in the usual table only where a run has it.
    """

    heading: str
    keys: tuple[str, ...]
    show: Callable[[Record], str]
    right: bool = True
    optional: bool = False


def show_params(params: int | None) -> str:
    """Parameters as the seed prints a size: 52.0B, 124M, 845K."""
    if params is None:
        return NOTHING
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if params >= size:
            figure = params / size
            return f"{figure:.1f}{letter}" if figure < 100 else f"{figure:.0f}{letter}"
    return str(params)


def show_seconds(seconds: float | None) -> str:
    """Seconds to three digits and more: 146, 2.74, 0.0413."""
    return NOTHING if seconds is None else show_digits(seconds)


def show_digits(figure: float | None, digits: int = 3) -> str:
    """At least `digits` significant digits, never an exponent, whole numbers whole."""
    if figure is None:
        return NOTHING
    if figure == 0 or not math.isfinite(figure):
        return f"{abs(figure):.0f}" if figure == 0 else str(figure)
    before = len(str(int(abs(figure)))) if abs(figure) >= 1 else 0
    if before:
        return f"{figure:.{max(0, digits - before)}f}"
    after, small = digits, abs(figure)
    while small < 0.1 and after < 12:
        small *= 10
        after += 1
    return f"{figure:.{after}f}"


def show_whole(figure: float | None) -> str:
    """A whole number, thousands apart."""
    return NOTHING if figure is None else f"{figure:,.0f}"


def show_spread(record: Record) -> str:
    """The step time's 10th to 90th percentile."""
    if record.step_s_p10 is None:
        return NOTHING
    return f"{show_seconds(record.step_s_p10)}..{show_seconds(record.step_s_p90)}"


def peak_memory_gib(record: Record) -> tuple[float | None, str]:
    """The memory of the stage that holds most, and of which kind the figure is."""
    for figures, words in ((record.memory_allocated_gib, "allocated"), (record.memory_reserved_gib, "reserved")):
        known = [figure for figure in figures or () if figure is not None and abs(figure) < 1e15]
        if known:
            return max(known), words
    return None, ""


def share_off(predicted: float | None, measured: float | None) -> float | None:
    """How far a prediction was off, as a share of what was measured; None where either is not known.

    >>> share_off(3.0, 2.0)
    0.5
    """
    if not predicted or not measured or measured <= 0:
        return None
    error = predicted / measured - 1
    return error if math.isfinite(error) else None


def show_share(error: float | None, sign: str = "") -> str:
    """A share as percent."""
    return NOTHING if error is None else f"{error:{sign}.1%}"


def show_predicted(record: Record) -> str:
    """What the planner predicted, and how far off it was where that was measured."""
    memory = max(record.predicted_memory_gib or [0.0])
    allocated = max((figure for figure in record.memory_allocated_gib or () if figure is not None), default=None)
    parts = []
    for figure, unit, measured in (
        (record.predicted_step_s, "s a step", record.step_s),
        (memory or None, "GiB allocated", allocated),
    ):
        if figure is not None:
            off = share_off(figure, measured)
            parts.append(f"{show_digits(figure)} {unit}" + (f" ({show_share(off, '+')})" if off is not None else ""))
    return ", ".join(parts) or NOTHING


def show_name(record: Record) -> str:
    """What a run goes by: name/run, but no name twice, as a log's run is mostly called after it.

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
    Column("Step s", ("step_s",), lambda record: show_seconds(record.step_s)),
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
