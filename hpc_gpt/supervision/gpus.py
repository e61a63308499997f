"""The GPUs of a node as NVML shows them, for the heartbeat of one of its ranks.

Only the library of the driver is needed. A driver in trouble may never answer, so these readings have a thread of their
own beside the watchdog: neither a step nor the search for a hang waits for them.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable

from hpc_gpt.formulas import GIB
from hpc_gpt.runs.heartbeats import GpuFigures

_LIBRARY = "libnvidia-ml.so.1"
_EVERY_S = 10.0
# Figures that are older are those of a driver that does not answer.
_OLD_S = 3 * _EVERY_S
_TEMPERATURE_OF_GPU = 0


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class GpuReader:
    """Reads the figures of all GPUs that this job may use every 10 s. Without a GPU or its driver there are none."""

    def __init__(self) -> None:
        self._last: tuple[float, tuple[GpuFigures, ...]] | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog-gpus", daemon=True).start()

    def latest(self) -> tuple[GpuFigures, ...] | None:
        """The last figures; None if there are none, or if the driver no longer answers."""
        last = self._last
        return last[1] if last is not None and time.monotonic() - last[0] < _OLD_S else None

    def _run(self) -> None:
        try:
            read = nvml_reader()
        except (OSError, AttributeError):  # no driver, or one of another kind
            return
        while figures := read():
            self._last = time.monotonic(), figures
            time.sleep(_EVERY_S)


def nvml_reader() -> Callable[[], tuple[GpuFigures, ...]]:
    """What reads the figures of the GPUs that this process may use. OSError without NVML or its GPUs."""
    nvml = ctypes.CDLL(_LIBRARY)
    count = ctypes.c_uint()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        raise OSError(f"{_LIBRARY} has no device")
    # If Slurm confines a job to its GPUs, NVML counts these alone, as CUDA does; elsewhere both count all of the node.
    named = [int(each) for each in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.isdecimal()]
    handles = []
    for index in [index for index in named if index < count.value] or range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            handles.append(handle)

    def read_one(handle: ctypes.c_void_p) -> GpuFigures:
        util, memory, power, heat = _Utilization(), _Memory(), ctypes.c_uint(), ctypes.c_uint()
        has_util = not nvml.nvmlDeviceGetUtilizationRates(handle, ctypes.byref(util))
        has_memory = not nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        has_power = not nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(power))
        has_heat = not nvml.nvmlDeviceGetTemperature(handle, _TEMPERATURE_OF_GPU, ctypes.byref(heat))
        return GpuFigures(
            util.gpu if has_util else None,
            round(memory.used / GIB, 1) if has_memory else None,
            round(memory.total / GIB, 1) if has_memory else None,
            round(power.value / 1000) if has_power else None,
            heat.value if has_heat else None,
        )

    return lambda: tuple(read_one(handle) for handle in handles)
