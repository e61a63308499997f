"""How fast this rank's device computes while it trains: a product of fixed size, now and then, timed by the device.

All ranks of a run take the same step time, whoever is slow; this tells them apart. It costs a third of a millisecond
each time, and nobody waits for it. HPC_GPT_PROBE_COMMAND stands in for it, as in the preflight: it prints a JSON object
whose `probe_s` is taken. On a CPU without one nothing is measured: its speed follows the load of the machine.
"""

from __future__ import annotations

import collections
import os
import statistics
import threading
import time
from typing import Any

import torch

from hpc_gpt.preflight_lines import COMMAND

_EVERY_S = 30.0
_SIZE = 2048
_TIMES = 8
# Fewer figures say nothing: other streams may be at work.
_LEAST = 3
_KEPT = 20


class DeviceProbe:
    """`probe_s` is the median of the last figures, seconds each; None as long as there are too few."""

    def __init__(self, device: torch.device) -> None:
        self.probe_s: float | None = None
        self._device = device
        self._command = os.environ.get(COMMAND)
        self._seconds: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self._began: float | None = None
        self._pending: tuple[Any, Any] | None = None
        self._factors: tuple[torch.Tensor, torch.Tensor] | None = None
        self._over = False

    def measure(self) -> None:
        """Takes in what has come of the last time, and begins anew; at most twice a minute."""
        now = time.monotonic()
        if self._over or (self._began is not None and now < self._began + _EVERY_S):
            return
        self._began = now
        if self._command:
            threading.Thread(target=self._ask, name="probe", daemon=True).start()
        elif self._device.type == "cuda":
            try:
                self._time_product()
            except RuntimeError:  # no room for it, or a kernel that is not there
                self._over, self._factors = True, None

    def _ask(self) -> None:
        from hpc_gpt.train.preflight_probes import ProbeFailed, figures_of_command

        try:
            self.probe_s = float(figures_of_command(self._command)["probe_s"])
        except (ProbeFailed, OSError, KeyError, TypeError, ValueError):
            self._over = True

    def _time_product(self) -> None:
        if self._pending is not None:
            began, ended = self._pending
            if not ended.query():
                return
            self._seconds.append(began.elapsed_time(ended) / 1000 / _TIMES)
            if len(self._seconds) >= _LEAST:
                self.probe_s = statistics.median(self._seconds)
        if self._factors is None:
            dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
            factor = torch.ones(_SIZE, _SIZE, device=self._device, dtype=dtype)
            self._factors = factor, torch.empty_like(factor)
            torch.mm(factor, factor, out=self._factors[1])
        factor, product = self._factors
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for _ in range(_TIMES):
            torch.mm(factor, factor, out=product)
        events[1].record()
        self._pending = events[0], events[1]
