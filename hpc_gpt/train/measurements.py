"""What an attempt measures beside its steps: the GPUs at work, the compiler's time, the allocator's retries.

Each rank looks at its own GPU, and rank 0 writes what all saw into `measured.json` at the attempt's end. Nothing here
waits for the device. GPU figures need NVML (`pip install 'hpc-gpt[nvml]'`); without it they are null.
"""

from __future__ import annotations

import json
import statistics
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpc_gpt.runs.run_folder import Attempt
from hpc_gpt.small_files import write_once
from hpc_gpt.train.engines.compilation import compile_seconds
from hpc_gpt.train.full_disk import when_there_is_room
from hpc_gpt.train.matmul_rate import MatmulRate
from hpc_gpt.train.ranks import Ranks

_EVERY_S = 1.0


@dataclass
class GpuSamples:
    """Readings of one GPU, one a second: utilisation in percent, SM clock in MHz, power in W."""

    util: list[float] = field(default_factory=list)
    sm_clock_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)


class GpuWatch:
    """Reads this rank's GPU from a thread of its own, from `begin` to `end`. On a CPU, or without NVML, it sees
    nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples = GpuSamples()
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Begins to read; once the first steps, which warm up, are done."""
        if self._device.type == "cuda" and self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="gpu-watch", daemon=True)
            self._thread.start()

    def end(self) -> GpuSamples:
        """Stops reading; what was read."""
        self._over.set()
        if self._thread is not None:
            self._thread.join(timeout=5 * _EVERY_S)
        return self._samples

    def _watch(self) -> None:
        while not self._over.wait(_EVERY_S):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    util = torch.cuda.utilization(self._device)
                    clock = torch.cuda.clock_rate(self._device)
                    power = torch.cuda.power_draw(self._device)
            except Exception:  # no NVML package, no driver that answers, or a figure the card does not give
                return
            self._samples.util.append(float(util))
            self._samples.sm_clock_mhz.append(float(clock))
            self._samples.power_w.append(power / 1000)


def summarise(samples: Sequence[GpuSamples]) -> dict[str, float | None]:
    """`gpu_util_mean, gpu_util_spread, sm_clock_mhz, power_w` over all readings of all GPUs; null where there are none.

    The spread is the standard deviation over the readings, seed 000's `71.9 +/- 22.0`.

    >>> summarise([GpuSamples([90.0], [1700.0], [600.0]), GpuSamples([70.0], [1500.0], [500.0])])["gpu_util_spread"]
    10.0
    """
    pooled = {
        key: [reading for one in samples for reading in getattr(one, key)]
        for key in ("util", "sm_clock_mhz", "power_w")
    }
    mean = {key: round(statistics.fmean(values), 2) if values else None for key, values in pooled.items()}
    return {
        "gpu_util_mean": mean["util"],
        "gpu_util_spread": round(statistics.pstdev(pooled["util"]), 2) if pooled["util"] else None,
        "sm_clock_mhz": mean["sm_clock_mhz"],
        "power_w": mean["power_w"],
    }


def write_measured(
    attempt: Attempt,
    ranks: Ranks,
    watch: GpuWatch,
    device: torch.device,
    skipped_shards: dict[int, int],
    rate: MatmulRate,
    tenth_step: float | None,
) -> None:
    """Collective: every rank's figures into the attempt's measured.json; skipped shards by data-parallel rank.

    Of the devices' own rates the slowest rank's is written: the others wait for it in every step. `tenth_step`: when
    it ended, in epoch seconds; without what measuring the rate took it is told from the attempt's start, which the
    script knows to a second.
    """
    retries: int | None = None
    if device.type == "cuda":
        retries = int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
    gathered = ranks.gather((watch.end(), compile_seconds(), retries, skipped_shards, rate.before, rate.after))
    if not ranks.is_first:
        return
    samples, compiled, retried, skipped, before, after = zip(*gathered, strict=True)
    measured: dict[str, Any] = {
        **summarise(samples),
        # Ranks compile side by side: the slowest is what the run has waited for.
        "compile_s": max((seconds for seconds in compiled if seconds is not None), default=None),
        "allocator_retries": sum(retried) if None not in retried else None,
        "skipped_shards": sum(count for own in skipped for count in own.values()),
        "matmul_tflops_before": min(before) if None not in before else None,
        "matmul_tflops_after": min(after) if None not in after else None,
        "matmul": rate.product,
        "tenth_step_s": _since_start(attempt, tenth_step, rate.before_s),
    }
    path = attempt.folder / "measured.json"
    when_there_is_room(lambda: write_once(path, json.dumps(measured) + "\n"), path.name)


def _since_start(attempt: Attempt, tenth_step: float | None, apart_s: float) -> float | None:
    started = attempt.started().get("started")
    if tenth_step is None or not isinstance(started, int | float):
        return None
    return round(tenth_step - apart_s - started, 3)
