"""train.profile_steps: torch's profiler on two ranks, for a few steps."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.ranks import Ranks


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
        """To be called before `step`, counted from 1. An attempt that begins among the steps records the rest."""
        if self._profile is None and self._first <= step <= self._last:
            on_device = [ProfilerActivity.CUDA] if self._device.type == "cuda" else []
            self._profile = profile(activities=[ProfilerActivity.CPU, *on_device])
            self._profile.start()

    def after(self, step: int) -> None:
        """To be called after `step`. A disk that refuses the trace costs the trace alone."""
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
