"""The row of a cell: one record from those of its rounds."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.bench.measuring import OUT_OF_MEMORY, Measured
from hpc_gpt.bench.rounds import spread_of
from hpc_gpt.formulas import hfu, mfu
from hpc_gpt.readers.runs.run_read import add_figures
from hpc_gpt.runs.record import Record

# The device's own rate may move by so much between a run's begin and its end; above, the figures are of a device that
# was throttled, or not alone.
DRIFT = 0.03
_BLANK = ("step_s", "step_s_p10", "step_s_p90", "step_s_mean", "tokens_per_s", "tflops_seed", "tflops_hardware",
          "tflops_model", "mfu", "hfu", "steps_used", "warmup_steps")  # fmt: skip
_MEANS = ("gpu_util_mean", "gpu_util_spread", "sm_clock_mhz", "power_w")
_MEDIANS = ("step_s_p10", "step_s_p90", "step_s_mean", "matmul_tflops_before", "matmul_tflops_after")
# What a run is told of that says nothing where tokens are random.
_MEANINGLESS = ("the loss did not fall",)
_PEAKS = ("memory_allocated_gib", "memory_reserved_gib")


@dataclass(frozen=True)
class Row:
    """A cell's record over all its rounds, tokens/s of those that ended well, and where each round lies.

    `tenth_step_s`: seconds from the start of each of those to the end of its tenth step, where that is known.
    """

    cell: str
    record: Record
    tokens_per_s: tuple[float, ...] = ()
    places: tuple[Path, ...] = ()
    tenth_step_s: tuple[float, ...] = ()

    @property
    def warm_tenth_step_s(self) -> float | None:
        """The median of all rounds but the first, which finds the compiler's cache as it was; of one round its own."""
        return statistics.median(self.tenth_step_s[1:] or self.tenth_step_s) if self.tenth_step_s else None

    @property
    def is_measured(self) -> bool:
        """Whether it has a speed."""
        return bool(self.tokens_per_s)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it has none because it is too large for the machine."""
        return not self.tokens_per_s and self.record.ended in OUT_OF_MEMORY


def row_of(cell: str, name: str, measured: Sequence[Measured], peaks: Mapping[str, float] | None = None) -> Row:
    """The row of a cell from its rounds, in order; its record goes by `name` as run. `peaks`: dense TFLOP/s by dtype of
    a device that is not in our table.

    Of the rounds that ended well: the median of tokens/s and of what follows from it, the highest peaks of memory,
    means of clocks, power and utilisation; the compiler's seconds of the first, as later ones find its cache. A cell
    whose rounds all failed has the first one's record, without a speed.
    """
    good = [each for each in measured if each.is_good]
    places = tuple(each.place for each in measured)
    if not good:
        blank: dict[str, Any] = dict.fromkeys(_BLANK)
        record = replace(measured[0].record, **blank, run=name, rounds=0)
        return Row(cell, record, (), places)
    records = [each.record for each in good]
    speeds = tuple(record.tokens_per_s for record in records if record.tokens_per_s)
    record = replace(_merged(records, statistics.median(speeds)), run=name, flags=_flags(measured))
    if record.allocator_retries:
        record.flags.append(
            f"the allocator gave its cache back and tried again {record.allocator_retries} times: a smaller "
            "micro-batch may be faster"
        )
    firsts = (attempt.get("tenth_step_s") for each in records for attempt in (each.attempts or [])[:1])
    known = tuple(seconds for seconds in firsts if seconds is not None)
    return Row(cell, _with_peak(record, peaks or {}), speeds, places, known)


def _flags(measured: Sequence[Measured]) -> list[str]:
    """What looks wrong in any round, with the rounds where that is not said of all."""
    rounds: dict[str, list[int]] = {}
    for number, each in enumerate(measured, 1):
        record = each.record
        why = f": {record.cause}" if record.cause else ""
        own = [flag for flag in record.flags if flag not in _MEANINGLESS]
        own += [words] if (words := drift_words(record)) else []
        for flag in dict.fromkeys(own if each.is_good else [f"ended as {record.ended}{why}"]):
            rounds.setdefault(flag, []).append(number)
    return [
        flag if len(numbers) == len(measured) else f"round {', '.join(map(str, numbers))}: {flag}"
        for flag, numbers in rounds.items()
    ]


def _with_peak(record: Record, peaks: Mapping[str, float]) -> Record:
    """With mfu and hfu of a peak that the user's profile gives, where our table of devices has none."""
    peak = peaks.get(record.dtype or "")
    if not peak or record.mfu is not None or record.device is None:
        return record
    figures: dict[str, float] = {}
    if record.tflops_model is not None:
        figures["mfu"] = mfu(record.tflops_model, peak)
    if record.tflops_hardware is not None:
        figures["hfu"] = hfu(record.tflops_hardware, peak)
    words = f"over {peak:g} dense {record.dtype} TFLOP/s, peak_tflops of the profile's [machine]"
    flags = [flag for flag in record.flags if not flag.endswith("mfu and hfu are null")]
    found: dict[str, Any] = dict(figures)
    return replace(record, **found, flags=flags, sources={**record.sources, **dict.fromkeys(figures, words)})


def peak_gib(stages: Sequence[float | None] | None) -> float | None:
    """The stage that holds most; None where nothing was measured."""
    return max((figure for figure in stages or () if figure is not None), default=None)


def drift_words(record: Record) -> str | None:
    """What is said of a device whose own rate moved by more than 3 % while it was measured; None where it did not.

    >>> drift_words(Record(matmul_tflops_before=100.0, matmul_tflops_after=95.0))
    "the device's own matmul rate moved by -5.0 %, from 100 to 95 TFLOP/s"
    """
    before, after = record.matmul_tflops_before, record.matmul_tflops_after
    if not before or not after or abs(after / before - 1) <= DRIFT:
        return None
    move = 100 * (after / before - 1)
    return f"the device's own matmul rate moved by {move:+.1f} %, from {before:.4g} to {after:.4g} TFLOP/s"


def _merged(records: Sequence[Record], tokens_per_s: float) -> Record:
    """The figures of rounds that ended well, `tokens_per_s` being the median of theirs; what is no figure is the
    middle round's."""
    by_speed = sorted(records, key=lambda record: record.tokens_per_s or 0.0)
    middle = by_speed[(len(records) - 1) // 2]
    if len(records) == 1:
        return replace(middle, rounds=1, tokens_per_s_spread=None)
    sources = dict(middle.sources)
    over = f"over {len(records)} rounds"
    shown = ", ".join(f"{record.tokens_per_s:.5g}" for record in records)
    merged: dict[str, Any] = {}
    for keys, words, reduce in ((_MEANS, "mean", statistics.fmean), (_MEDIANS, "median", statistics.median)):
        for key in keys:
            figures = [figure for record in records if (figure := getattr(record, key)) is not None]
            if figures:
                merged[key] = reduce(figures)
                sources[key] = f"{words} {over}"
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
    sources["compile_s"] = "of the first round: later ones find the compiler's cache"
    return replace(middle, tokens_per_s=tokens_per_s, sources=sources)
