"""Measures a cell by an ordinary run on this machine in each round, and makes one row from all rounds."""

import signal
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.ends.failures import GOOD, OUT_OF_MEMORY
from hpc_gpt.core.ends.run_state import newest_submission
from hpc_gpt.core.formulas import hfu, mfu
from hpc_gpt.core.process import lives, send_to
from hpc_gpt.core.runs.heartbeats import read_heartbeats
from hpc_gpt.core.runs.record import Flag, Record
from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.core.terminal import width
from hpc_gpt.launcher.bench.peer import peer_record
from hpc_gpt.launcher.bench_rows import BenchCell
from hpc_gpt.launcher.submission import start_run, write_run
from hpc_gpt.launcher.this_machine import with_predicted_memory
from hpc_gpt.launcher.watch.control import follow
from hpc_gpt.launcher.watch.status import RunStatus
from hpc_gpt.reader.records import add_figures
from hpc_gpt.report.gather import refresh_record

_GONE_S = 45.0  # longer than the ranks' time between SIGTERM and SIGKILL
_POLL_S = 0.05
_BLANK = ("step_s", "step_s_p10", "step_s_p90", "step_s_mean", "tokens_per_s", "tokens_per_s_gpu", "tflops_seed",
          "tflops_hardware", "tflops_model", "mfu", "hfu", "steps_used", "warmup_steps")  # fmt: skip
_MEANS = ("gpu_util_mean", "gpu_util_spread", "sm_clock_mhz", "power_w")
_MEDIANS = ("step_s_p10", "step_s_p90", "step_s_mean")
# Flags of this kind mean nothing if tokens are random.
_MEANINGLESS = "loss"
_PEAKS = ("memory_allocated_gib", "memory_reserved_gib")


@dataclass(frozen=True)
class Measurement:
    """The record and the run folder of a cell in one round."""

    record: Record
    place: Path

    @property
    def is_good(self) -> bool:
        """Whether the run ended well and has a speed."""
        return self.record.ended in GOOD and bool(self.record.tokens_per_s)


def measure(cell: BenchCell, folder: Path, provenance: Mapping[str, Any], label: str) -> Measurement:
    """Measures the cell once in the bench's `folder`, with progress on stderr after `label`.

    Returns a record however the run ends. Ctrl-C ends the run and raises KeyboardInterrupt. Raises RunFolderError if
    the folder cannot be written.
    """
    if cell.record is not None:
        return Measurement(cell.record, folder)
    assert cell.prepared is not None
    run, resolved = write_run(cell.prepared, folder, provenance), cell.prepared.resolved
    interrupts = 0
    try:
        start_run(run, resolved)
    except KeyboardInterrupt:  # it may have been started
        interrupts = 1
    try:
        follow([run], lambda statuses: f"{label}  {_state(run, statuses)}", interrupts)
    finally:
        _wait_until_gone(run)
    record = with_predicted_memory(refresh_record(run), resolved)
    if cell.is_peer and (attempts := run.attempts()):
        record = peer_record(record, attempts[-1].log, cell.pattern)
    return Measurement(record, run.path)


def _wait_until_gone(run: RunFolder) -> None:
    """Waits until the last process of an ended run is gone, as it would share the machine with the next run.

    After 45 s the process that started the ranks gets SIGTERM, and then kills them.
    """
    line = newest_submission(run)
    for what in (signal.SIGTERM, None):
        until = time.monotonic() + _GONE_S
        while lives(line) and time.monotonic() < until:
            time.sleep(_POLL_S)
        if what is not None:
            send_to(line, what)


def _state(run: RunFolder, statuses: Sequence[RunStatus]) -> str:
    """A run's state for the progress line. The step is shown on a terminal only: a file would get a line per step.

    Metrics are written only at the end of the run, so the step comes from its ranks' heartbeats.
    """
    state = statuses[0].state
    if state != "running" or width(stderr=True) is None:
        return state
    attempts = run.attempts()
    heartbeats = read_heartbeats(attempts[-1].heartbeats) if attempts else {}
    step = max((heartbeat.step for heartbeat in heartbeats.values()), default=0)
    return f"{state}  step {step}/{statuses[0].steps}" if step else state


# --- the row of all rounds --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BenchRow:
    """A cell's record over all its rounds, tokens/s of the rounds that ended well, and the run folder of each round.

    `tenth_step_s`: seconds from the start to the end of the tenth step, in rounds that ended well, if known.
    """

    cell: str
    record: Record
    tokens_per_s: tuple[float, ...] = ()
    places: tuple[Path, ...] = ()
    tenth_step_s: tuple[float, ...] = ()

    @property
    def is_measured(self) -> bool:
        return bool(self.tokens_per_s)

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it has no speed because it is too large for the machine."""
        return not self.tokens_per_s and self.record.ended in OUT_OF_MEMORY


def measurement_row(
    cell: str, name: str, measured: Sequence[Measurement], peaks: Mapping[str, float] | None = None
) -> BenchRow:
    """Makes the row of a cell from its rounds, in order. `name`: the record's `run`. `peaks`: dense TFLOP/s by dtype of
    a device that our table lacks.

    Over the rounds that ended well it has the median of tokens/s and what follows from it, the highest peaks of memory,
    and means of clocks, power and utilisation. The compile time is the first round's, as later rounds find the compiler
    cache. If all rounds failed, the row has the first round's record without a speed.
    """
    good = [measurement for measurement in measured if measurement.is_good]
    places = tuple(measurement.place for measurement in measured)
    if not good:
        blank: dict[str, Any] = dict.fromkeys(_BLANK)
        return BenchRow(cell, replace(measured[0].record, **blank, run=name, rounds=0), (), places)
    records = [measurement.record for measurement in good]
    speeds = tuple(record.tokens_per_s for record in records if record.tokens_per_s)
    record, flags = replace(_merged(records, statistics.median(speeds)), run=name), _flags(measured)
    if record.allocator_retries:
        retried = f"the allocator gave its cache back and tried again {record.allocator_retries} times"
        flags.append(f"{retried}: a smaller micro-batch may be faster")
    record = replace(record, flags=flags)
    firsts = (attempt.get("tenth_step_s") for record in records for attempt in (record.attempts or [])[:1])
    tenth_step_s = tuple(seconds for seconds in firsts if seconds is not None)
    return BenchRow(cell, _with_peak(record, peaks or {}), speeds, places, tenth_step_s)


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


def _with_peak(record: Record, peaks: Mapping[str, float]) -> Record:
    """Adds mfu and hfu by the peak in the user's profile, if our table of devices has no peak."""
    peak = peaks.get(record.units or "")
    if not peak or record.mfu is not None or record.device is None:
        return record
    shares = (("mfu", mfu, record.tflops_model), ("hfu", hfu, record.tflops_hardware))
    figures: dict[str, Any] = {name: share(rate, peak) for name, share, rate in shares if rate is not None}
    source = f"over {peak:g} dense {record.units} TFLOP/s, peak_tflops of the profile's [machine]"
    flags: list[str] = [Flag(flag, kind) for flag, kind in record.all_flags if kind != "no_peak"]
    return replace(record, **figures, flags=flags, sources={**record.sources, **dict.fromkeys(figures, source)})


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
