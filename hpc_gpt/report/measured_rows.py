"""One row of a sweep from its runs, which measured it in rounds. Ratios are ratios of medians over the rounds."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import GOOD
from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.reader.runs.figures import add_figures

_BLANK = ("step_s", "step_s_p10", "step_s_p90", "step_s_mean", "tokens_per_s", "tokens_per_s_gpu", "tflops_seed",
          "tflops_hardware", "tflops_model", "mfu", "hfu", "steps_used", "warmup_steps")  # fmt: skip
_MEANS = ("gpu_util_mean", "gpu_util_spread", "sm_clock_mhz", "power_w")
_MEDIANS = ("step_s_p10", "step_s_p90", "step_s_mean")
_PEAKS = ("memory_allocated_gib", "memory_reserved_gib")
# Flags of this kind mean nothing: a visit has few steps.
_MEANINGLESS = "loss"


@dataclass(frozen=True)
class Measurement:
    """The record and the run folder of a row in one round."""

    record: Record
    place: Path

    @property
    def is_good(self) -> bool:
        """Whether the run ended well and has a speed."""
        return self.record.ended in GOOD and bool(self.record.tokens_per_s)


@dataclass(frozen=True)
class MeasuredRow:
    """A row's record over all its rounds, tokens/s of the rounds that ended well, and the run folder of each round.

    `tenth_step_s`: seconds from the start to the end of the tenth step, in rounds that ended well, if known.
    """

    name: str
    record: Record
    tokens_per_s: tuple[float, ...] = ()
    places: tuple[Path, ...] = ()
    tenth_step_s: tuple[float, ...] = ()


def measurement_row(name: str, run: str, measured: Sequence[Measurement]) -> MeasuredRow:
    """Makes a row from its rounds, in order. `run`: that key of its record.

    Over the rounds that ended well it has the median of tokens/s and what follows from it, the highest peaks of memory,
    and means of clocks, power and utilisation. The compile time is the first round's, as later rounds find the compiler
    cache. If all rounds failed, the row has the first round's record without a speed.
    """
    good = [measurement for measurement in measured if measurement.is_good]
    places = tuple(measurement.place for measurement in measured)
    if not good:
        blank: dict[str, Any] = dict.fromkeys(_BLANK)
        return MeasuredRow(name, replace(measured[0].record, **blank, run=run, rounds=0), (), places)
    records = [measurement.record for measurement in good]
    speeds = tuple(record.tokens_per_s for record in records if record.tokens_per_s)
    record, flags = replace(_merged(records, statistics.median(speeds)), run=run), _flags(measured)
    if record.allocator_retries:
        retried = f"the allocator gave its cache back and tried again {record.allocator_retries} times"
        flags.append(f"{retried}: a smaller micro-batch may be faster")
    record = replace(record, flags=flags)
    firsts = (attempt.get("tenth_step_s") for record in records for attempt in (record.attempts or [])[:1])
    tenth_step_s = tuple(seconds for seconds in firsts if seconds is not None)
    return MeasuredRow(name, record, speeds, places, tenth_step_s)


def _flags(measured: Sequence[Measurement]) -> list[str]:
    """Collects the flags of all rounds; a flag that some rounds lack names its rounds."""
    rounds: dict[Flag, list[int]] = {}
    for number, measurement in enumerate(measured, 1):
        record = measurement.record
        why = f": {record.cause}" if record.cause else ""
        round_flags = [Flag(flag, kind) for flag, kind in record.all_flags if kind != _MEANINGLESS]
        for flag in dict.fromkeys(round_flags if measurement.is_good else [Flag(f"ended as {record.ended}{why}")]):
            rounds.setdefault(flag, []).append(number)
    return [
        flag if len(numbers) == len(measured) else Flag(f"round {', '.join(map(str, numbers))}: {flag}", flag.kind)
        for flag, numbers in rounds.items()
    ]


def spread_of(figures: Sequence[float]) -> float | None:
    """(largest - smallest) / median, as a share; None for fewer than two figures.

    >>> spread_of([98.0, 100.0, 104.0])
    0.06
    """
    if len(figures) < 2:
        return None
    middle = statistics.median(figures)
    return (max(figures) - min(figures)) / middle if middle else None


def _merged(records: Sequence[Record], tokens_per_s: float) -> Record:
    """Merges the records of rounds that ended well, with the median `tokens_per_s`; other figures are the middle
    round's."""
    by_speed = sorted(records, key=lambda record: record.tokens_per_s or 0.0)
    middle = by_speed[(len(records) - 1) // 2]
    if len(records) == 1:
        return replace(middle, rounds=1, tokens_per_s_spread=None)
    sources = dict(middle.sources)
    over = f"over {len(records)} rounds"
    shown = ", ".join(f"{record.tokens_per_s:.5g}" for record in records)
    merged: dict[str, Any] = {}
    for keys, what, reduce in ((_MEANS, "mean", statistics.fmean), (_MEDIANS, "median", statistics.median)):
        for key in keys:
            figures = [figure for record in records if (figure := getattr(record, key)) is not None]
            if figures:
                merged[key] = reduce(figures)
                sources[key] = f"{what} {over}"
    for key in _PEAKS:
        peaks = [peak for record in records if (peak := getattr(record, key))]
        if peaks:
            merged[key] = [max(stage) for stage in zip(*peaks, strict=False)]
            sources[key] = f"the highest {over}"
    retries = [record.allocator_retries for record in records if record.allocator_retries is not None]
    middle = replace(
        middle,
        **merged,
        compile_s=records[0].compile_s,
        allocator_retries=max(retries, default=None),
        rounds=len(records),
        tokens_per_s_spread=spread_of([record.tokens_per_s or 0.0 for record in records]),
    )
    if middle.step_s and middle.global_batch and middle.seq:
        middle = add_figures(replace(middle, step_s=middle.global_batch * middle.seq / tokens_per_s))
        sources = {**middle.sources, **sources, "step_s": f"global_batch x seq / tokens_per_s, the median {over}"}
    sources["tokens_per_s"] = f"median {over}: {shown}"
    sources["tokens_per_s_spread"] = "(largest - smallest) / median of the rounds"
    sources["compile_s"] = "from the first round: later ones find the compiler's cache"
    return replace(middle, tokens_per_s=tokens_per_s, sources=sources)
