"""Reads the GPUs of a node by NVML, AMD's by the kernel, for the heartbeat of one of its ranks. Between the visits of a
race it waits until their memory is free:

    python -m hpc_gpt.trainer.supervision.gpus

It needs only the driver, and of NVIDIA's the library. A driver in trouble may never answer, so the readings have a
thread of their own beside the watchdog: neither a step nor the search for a hang waits for them.
"""

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.amd_gpus import read_device, shown_devices
from hpc_gpt.core.runs.heartbeats import GpuFigures

_EVERY_S = 10.0
# If the figures are older, the driver does not answer.
_OLD_S = 3 * _EVERY_S
# The driver holds at most this share of an unused GPU's memory.
_DRIVERS = 0.05
_FREE_S, _POLL_S = 60.0, 0.2


class GpuReader:
    """Reads the figures of all GPUs that this job may use every 10 s; none without a GPU or its driver."""

    def __init__(self) -> None:
        self._last: tuple[float, tuple[GpuFigures, ...]] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog-gpus", daemon=True).start()

    def latest(self) -> tuple[GpuFigures, ...] | None:
        """The last figures; None if there are none, or if the driver no longer answers."""
        last = self._last
        return last[1] if last is not None and time.monotonic() - last[0] < _OLD_S else None

    def _run(self) -> None:
        gpus = _gpus()
        while gpus:
            self._last = time.monotonic(), tuple(read() for read in gpus)
            time.sleep(_EVERY_S)


def wait_until_free(limit_s: float = _FREE_S) -> str:
    """Waits until earlier programs have freed the memory of all GPUs that this process may use, or of its own GPU if it
    is one of several ranks on the node.

    Returns an empty text, or after `limit_s` a line that names the memory in use. Returns at once without a GPU.
    """
    answer = [f"the GPUs' driver has not answered within {limit_s:g} s"]
    thread = threading.Thread(target=_wait_until_free, args=(answer, limit_s), daemon=True)
    thread.start()
    thread.join(limit_s + 1)
    return answer[0]


def _wait_until_free(answer: list[str], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    gpus = dict(enumerate(_gpus()))
    local_rank = os.environ.get("LOCAL_RANK", "")
    if local_rank.isdecimal() and int(local_rank) in gpus and os.environ.get("LOCAL_WORLD_SIZE") != "1":
        gpus = {int(local_rank): gpus[int(local_rank)]}  # another rank may use another GPU already
    while True:
        read = {number: figures() for number, figures in gpus.items()}
        held = {number: gpu for number, gpu in read.items() if (gpu.memory_gib or 0) > _DRIVERS * (gpu.total_gib or 0)}
        if not held or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    in_use = ", ".join(f"{gpu.memory_gib:g} of {gpu.total_gib:g} GiB of GPU {number}" for number, gpu in held.items())
    answer[0] = f"{in_use} are in use, {limit_s:g} s after the last ranks: something else runs there" if held else ""


def _gpus() -> list[Callable[[], GpuFigures]]:
    """A function for each GPU that this job may use, which reads its figures: NVIDIA's, or AMD's if it has none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handles = _handles(nvml)
    except (OSError, AttributeError):  # no driver, or one of another kind
        handles = []
    if handles:
        return [partial(_read, nvml, handle) for handle in handles]
    return [partial(lambda device: read_device(device).figures, device) for device in shown_devices()]


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count, handles = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    # If Slurm confines a job to its GPUs, NVML counts these alone, as CUDA does; elsewhere both count all of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1", "NoDevFiles"):
        return []
    named = [int(name) for name in visible.split(",") if name.isdecimal()]
    for index in [index for index in named if index < count.value] or range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            handles.append(handle)
    return handles


def _read(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> GpuFigures:
    # NVML's structures: percent of time of the GPU and of its memory; bytes in all, free, in use.
    util, memory, power, heat = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)(), ctypes.c_uint(), ctypes.c_uint()
    no_util, no_memory = nvml.nvmlDeviceGetUtilizationRates(gpu, util), nvml.nvmlDeviceGetMemoryInfo(gpu, memory)
    no_power = nvml.nvmlDeviceGetPowerUsage(gpu, ctypes.byref(power))
    no_heat = nvml.nvmlDeviceGetTemperature(gpu, 0, ctypes.byref(heat))
    in_use, in_all = (None, None) if no_memory else (round(memory[2] / GIB, 1), round(memory[0] / GIB, 1))
    watts = None if no_power else round(power.value / 1000)
    return GpuFigures(None if no_util else util[0], in_use, in_all, watts, None if no_heat else heat.value)


# NVML's reasons for a clock below the highest that slow a program: nvmlClocksThrottleReason… in nvml.h.
_THROTTLES = {0x4: "power cap", 0x8: "slowed by the hardware", 0x10: "in step with another GPU", 0x20: "heat",
              0x40: "heat, by the hardware", 0x80: "power brake"}  # fmt: skip
_SM = 1


def read_clock(index: int) -> tuple[float | None, str]:
    """(clock in MHz of the GPU that is number `index` of this process's, the driver's reasons if it holds that down);
    (None, "") without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = dict(enumerate(_handles(nvml))).get(index)
        if handle is not None:
            clock, reasons = ctypes.c_uint(), ctypes.c_ulonglong()
            no_clock = nvml.nvmlDeviceGetClockInfo(handle, _SM, ctypes.byref(clock))
            no_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
            named = "" if no_reasons else ", ".join(text for bit, text in _THROTTLES.items() if reasons.value & bit)
            return None if no_clock else float(clock.value), named
    except (OSError, AttributeError):  # no driver, or one of another kind
        pass
    devices = shown_devices()
    return (read_device(devices[index]).clock_mhz if index < len(devices) else None), ""


if __name__ == "__main__":
    if line := wait_until_free():
        print(f"note: {line}", file=sys.stderr, flush=True)
    os._exit(0)  # even if the driver never answers
