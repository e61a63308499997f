"""Measures an attempt apart from its steps: GPU utilisation, compile time, a trace of some steps.

Each rank measures its own GPU, and rank 0 writes the figures of all into `measured.json` at the attempt's end. Nothing
here waits for the device during the training. The figures of the GPUs are the readings of the heartbeats.
"""

import contextlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from hpc_gpt.core.files import write_once
from hpc_gpt.core.processes.slow_ranks import LEAST_PROBES, Probe, ProbeWindow, window_s
from hpc_gpt.core.runs.full_disk import when_there_is_space
from hpc_gpt.core.runs.run_folder import Attempt
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.kernels import compile_seconds
from hpc_gpt.trainer.preflight.measurements import ProbeFailed, figures_of_command
from hpc_gpt.trainer.preflight.verdict import COMMAND
from hpc_gpt.trainer.ranks import Ranks
from hpc_gpt.trainer.supervision.gpus import GpuSums, read_clock, summarise

# A probe is this many products of square matrices of this size.
_PROBE_SIZE, _PROBE_TIMES = 2048, 8


class DeviceProbe:
    """Times a product of fixed size now and then during the training, to find a slow device.

    All ranks of a run have the same step time, whichever of them is slow. A probe takes a third of a millisecond, timed
    by the device, and nothing waits for it. HPC_GPT_PROBE_COMMAND replaces it, as in the preflight: it prints a JSON
    object with `probe_s`. Without that command nothing is measured on a CPU, whose speed depends on the load of the
    machine.

    `result` has the medians of the probes in the last window and in the first hour; None while there are too few.
    """

    def __init__(self, device: torch.device) -> None:
        self.result = Probe()
        self._device = device
        self._command = os.environ.get(COMMAND)
        self._window = ProbeWindow(window_s(), 1 if self._command else LEAST_PROBES)
        self._began: float | None = None
        self._pending: tuple[Any, Any] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._over = False

    def measure(self) -> None:
        """Reads the last probe and begins the next one, at most twice a minute."""
        now = time.monotonic()
        if self._over or (self._began is not None and now < self._began + self._window.every_s):
            return
        self._began = now
        if self._device.type == "cuda":  # a driver in trouble may never answer
            threading.Thread(target=self._read_clock, name="clock", daemon=True).start()
        if self._command:
            threading.Thread(target=self._ask, name="probe", daemon=True).start()
        elif self._device.type == "cuda":
            try:
                self._time_product()
            except RuntimeError:  # no memory, or no such kernel
                self._over, self._factors = True, None

    def _ask(self) -> None:
        try:
            self._add(float(figures_of_command(self._command)["probe_s"]))
        except (ProbeFailed, OSError, KeyError, TypeError, ValueError):
            self._over = True

    def _read_clock(self) -> None:
        clock_mhz, throttle = read_clock(self._device.index or 0)
        device = torch.cuda.get_device_name(self._device)
        self.result = self.result._replace(clock_mhz=clock_mhz, throttle=throttle, device=device)

    def _add(self, probe_s: float) -> None:
        median_s, first_s = self._window.add(time.monotonic(), probe_s)
        self.result = self.result._replace(probe_s=median_s, probe_first_s=first_s)

    def _time_product(self) -> None:
        if self._pending is not None:
            began, ended = self._pending
            if not ended.query():
                return
            self._add(began.elapsed_time(ended) / 1000 / _PROBE_TIMES)
        if self._factors is None:
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
            factor = torch.ones(_PROBE_SIZE, _PROBE_SIZE, device=self._device, dtype=dtype)
            self._factors = factor, torch.empty_like(factor)
            torch.mm(factor, factor, out=self._factors[1])
        factor, product = self._factors
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for _ in range(_PROBE_TIMES):
            torch.mm(factor, factor, out=product)
        events[1].record()
        self._pending = events[0], events[1]


class Profiling:
    """Records the steps from the first to the last of train.profile_steps, on the first and the last rank.

    The trace, `trace-rank<N>.json.gz` in the attempt's folder, opens in Perfetto or chrome://tracing. The first and the
    last rank are in the first and the last pipeline stage.
    """

    def __init__(self, resolved: Resolved, ranks: Ranks, folder: Path, device: torch.device) -> None:
        steps = resolved.train.profile_steps
        self._first, self._last = steps if steps and ranks.rank in (0, ranks.size - 1) else (0, 0)
        self._path = folder / f"trace-rank{ranks.rank}.json.gz"
        self._device = device
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """To be called before `step`, counted from 1. An attempt that begins between the two steps records the later
        ones."""
        if self._profile is None and self._first <= step <= self._last:
            on_device = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called after `step`. If the disk refuses the trace, only the trace is lost."""
        if self._profile is None or step < self._last:
            return
        self._profile.stop()
        try:
            self._profile.export_chrome_trace(str(self._path))
            print(f"profiled steps {self._first} to {self._last}: {self._path}", flush=True)
        except (OSError, RuntimeError) as fault:
            with contextlib.suppress(OSError):
                self._path.unlink()
            print(f"no trace of steps {self._first} to {self._last}: {fault}", flush=True)
        self._profile = None


def write_measured(
    attempt: Attempt,
    ranks: Ranks,
    gpus: GpuSums,
    device: torch.device,
    skipped_shards: dict[int, int],
    tenth_step: float | None,
) -> None:
    """Writes all ranks' figures into the attempt's measured.json. Collective.

    `gpus` has this rank's readings. `skipped_shards` are numbers by dp rank. `tenth_step` is the end of the tenth step
    in epoch seconds. It is written as seconds since the attempt's start, which is known to a second.
    """
    retries: int | None = None
    if device.type == "cuda":
        retries = int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))
    gathered = ranks.gather((gpus, compile_seconds(), retries, skipped_shards))
    if not ranks.is_first:
        return
    sums, compiled, retried, skipped = zip(*gathered, strict=True)
    measured: dict[str, Any] = {
        **summarise(sums),
        # Ranks compile at the same time, so the run waits for the slowest.
        "compile_s": max((seconds for seconds in compiled if seconds is not None), default=None),
        "allocator_retries": sum(retried) if None not in retried else None,
        "skipped_shards": sum(count for by_dp_rank in skipped for count in by_dp_rank.values()),
        "tenth_step_s": _since_start(attempt, tenth_step),
    }
    path = attempt.measured
    when_there_is_space(lambda: write_once(path, json.dumps(measured) + "\n"), path.name)


def _since_start(attempt: Attempt, tenth_step: float | None) -> float | None:
    started = attempt.started().get("started")
    if tenth_step is None or not isinstance(started, int | float):
        return None
    return round(tenth_step - started, 3)
