"""The GPUs of a node as NVML shows them, for the heartbeat of one of its ranks; and, between the visits of a race,
whether their memory is free:

    python -m hpc_gpt.trainer.supervision.gpus

Only the library of the driver is needed. A driver in trouble may never answer, so these readings have a thread of their
own beside the watchdog: neither a step nor the search for a hang waits for them.
"""

import ctypes
import os
import sys
import threading
import time

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.heartbeats import GpuFigures

_EVERY_S = 10.0
# Figures that are older are those of a driver that does not answer.
_OLD_S = 3 * _EVERY_S
# Of a GPU that nobody uses the driver holds at most so much of its memory.
_DRIVERS = 0.05
_FREE_S, _POLL_S = 60.0, 0.2


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
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
            handles = _handles(nvml)
            while handles:
                self._last = time.monotonic(), tuple(_read(nvml, handle) for handle in handles)
                time.sleep(_EVERY_S)
        except (OSError, AttributeError):  # no driver, or one of another kind
            return


def wait_until_free(limit_s: float = _FREE_S) -> str:
    """Waits until the memory of all GPUs that this process may use, or of its own if it is one of several ranks of the
    node, is free of what ran there before. Empty, or after `limit_s` a line on what is not. Without a GPU it returns at
    once."""
    said = [f"the GPUs' driver has not answered within {limit_s:g} s"]
    thread = threading.Thread(target=_wait_until_free, args=(said, limit_s), daemon=True)
    thread.start()
    thread.join(limit_s + 1)
    return said[0]


def _wait_until_free(said: list[str], limit_s: float) -> None:
    until = time.monotonic() + limit_s
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        found = dict(enumerate(_handles(nvml)))
    except (OSError, AttributeError):
        found = {}
    own = os.environ.get("LOCAL_RANK", "")
    if own.isdecimal() and int(own) in found and os.environ.get("LOCAL_WORLD_SIZE") != "1":
        found = {int(own): found[int(own)]}  # another rank may use another GPU already
    while True:
        read = {number: _read(nvml, gpu) for number, gpu in found.items()}
        held = {number: gpu for number, gpu in read.items() if (gpu.memory_gib or 0) > _DRIVERS * (gpu.total_gib or 0)}
        if not held or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    which = ", ".join(f"{gpu.memory_gib:g} of {gpu.total_gib:g} GiB of GPU {number}" for number, gpu in held.items())
    said[0] = f"{which} are in use, {limit_s:g} s after the last visit: something else runs there" if held else ""


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count, found = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    # If Slurm confines a job to its GPUs, NVML counts these alone, as CUDA does; elsewhere both count all of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1", "NoDevFiles"):
        return []
    named = [int(each) for each in visible.split(",") if each.isdecimal()]
    for index in [index for index in named if index < count.value] or range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            found.append(handle)
    return found


def _read(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> GpuFigures:
    # NVML's structures: percent of time of the GPU and of its memory; bytes in all, free, in use.
    util, memory, power, heat = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)(), ctypes.c_uint(), ctypes.c_uint()
    no_util, no_memory = nvml.nvmlDeviceGetUtilizationRates(gpu, util), nvml.nvmlDeviceGetMemoryInfo(gpu, memory)
    no_power = nvml.nvmlDeviceGetPowerUsage(gpu, ctypes.byref(power))
    no_heat = nvml.nvmlDeviceGetTemperature(gpu, 0, ctypes.byref(heat))
    in_use, in_all = (None, None) if no_memory else (round(memory[2] / GIB, 1), round(memory[0] / GIB, 1))
    watts = None if no_power else round(power.value / 1000)
    return GpuFigures(None if no_util else util[0], in_use, in_all, watts, None if no_heat else heat.value)


if __name__ == "__main__":
    if line := wait_until_free():
        print(f"note: {line}", file=sys.stderr, flush=True)
    os._exit(0)  # also if the driver never answers
