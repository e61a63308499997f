"""The device's own rate, measured in the process that trains: what its figures are to be held against.

With `train.matmul_rate` every rank multiplies before its first step and after its last: a card that has become slower
meanwhile, by heat or by its power limit, is told from a slow program.
"""

from __future__ import annotations

import contextlib
import time

import torch

from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.preflight_probes import matmul_tflops

# A CPU multiplies bf16 a thousand times slower than a GPU: a larger product would take longer than a small run.
_GPU_SIZE, _CPU_SIZE = 8192, 256


class MatmulRate:
    """`before` and `after` are TFLOP/s of this rank's device; None where it was not asked for, or had no room.

    `product` says what was multiplied; None where nothing is. `before_s`: seconds that measuring before has taken.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        self._wanted = resolved.train.matmul_rate
        cuda = device.type == "cuda"
        # A CPU's product in fp16 is that of a loop, and takes a minute.
        self._device, self._dtype = device, resolved.train.dtype if cuda or resolved.train.dtype != "fp16" else "fp32"
        self._size = _GPU_SIZE if cuda else _CPU_SIZE
        self.product = f"{self._size}^3 in {self._dtype}" if self._wanted else None
        self.before: float | None = None
        self.after: float | None = None
        self.before_s = 0.0

    def measure_before(self) -> None:
        """Before the first step. The peaks of memory stay as they are, or are forgotten where this raised them."""
        cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if cuda else 0
        began = time.perf_counter()
        self.before = self._measure()
        if cuda and self._wanted:
            torch.cuda.empty_cache()
            if torch.cuda.max_memory_allocated(self._device) > peak:
                torch.cuda.reset_peak_memory_stats(self._device)
        self.before_s = time.perf_counter() - began

    def measure_after(self) -> None:
        """After the last step, whose peaks are written by then."""
        self.after = self._measure()

    def _measure(self) -> float | None:
        if not self._wanted:
            return None
        with contextlib.suppress(torch.OutOfMemoryError):
            return matmul_tflops(self._device, self._dtype, self._size)
        return None
