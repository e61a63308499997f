"""Reads the GPUs of a node by NVML, AMD's by the kernel, for the heartbeat of one of its ranks and for the record.
Before a start in the same job it waits until their memory is free.

It needs only the driver, and of NVIDIA's the library. A driver in trouble may never answer, so the readings have a
thread of their own beside the watchdog: neither a step nor the search for a hang waits for them.
"""

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.machine.amd_gpus import ClockedFigures, read_device, shown_devices
from hpc_gpt.core.machine.gpu_figures import GpuFigures

_EVERY_S = 10.0
# If the figures are older, the driver does not answer.
_OLD_S = 3 * _EVERY_S
# The driver holds at most this share of an unused GPU's memory.
_DRIVERS = 0.05
_FREE_S, _POLL_S = 60.0, 0.2


class GpuSums(NamedTuple):
    """Sums of `readings` of GPUs: utilisation in percent and its square, SM clock in MHz, power in W. A day has
    8,640 readings of each GPU, so rank 0 gets only their sums. `powerless`: the readings without a power, as of a die
    whose module has one sensor."""

    readings: int = 0
    util: float = 0.0
    util_squared: float = 0.0
    sm_clock_mhz: float = 0.0
    power_w: float = 0.0
    powerless: int = 0

    @staticmethod
    def of(read: ClockedFigures) -> "GpuSums":
        """One reading; no reading if the driver does not show the utilisation or the clock."""
        (util, _, _, power, _), clock = read
        if util is None or clock is None:
            return GpuSums()
        return GpuSums(1, util, util**2, clock, power or 0.0, int(power is None))

    @staticmethod
    def total(sums: Iterable["GpuSums"]) -> "GpuSums":
        return GpuSums(*map(sum, zip(GpuSums(), *sums, strict=True)))


def summarise(sums: Iterable[GpuSums]) -> dict[str, float | None]:
    """`gpu_util_mean, gpu_util_spread, sm_clock_mhz, power_w` over all readings of all GPUs; null without readings.

    The spread is the standard deviation over the readings, such as `71.9 +/- 22.0`.

    >>> summarise([GpuSums(1, 90.0, 8100.0, 1700.0, 600.0), GpuSums(1, 70.0, 4900.0, 1500.0, 500.0)])
    {'gpu_util_mean': 80.0, 'gpu_util_spread': 10.0, 'sm_clock_mhz': 1600.0, 'power_w': 550.0}
    """
    total = GpuSums.total(sums)
    if not total.readings:
        return dict.fromkeys(("gpu_util_mean", "gpu_util_spread", "sm_clock_mhz", "power_w"))
    mean = total.util / total.readings
    return {
        "gpu_util_mean": round(mean, 2),
        "gpu_util_spread": round(max(0.0, total.util_squared / total.readings - mean**2) ** 0.5, 2),
        "sm_clock_mhz": round(total.sm_clock_mhz / total.readings, 2),
        "power_w": round(total.power_w / powered, 2) if (powered := total.readings - total.powerless) else None,
    }


class GpuReader:
    """Reads the figures of all GPUs that this job may use every 10 s; none without a GPU or its driver. `sums` are
    those of the readings since `begin`."""

    def __init__(self) -> None:
        self.sums = GpuSums()
        self._last: tuple[float, tuple[GpuFigures, ...]] | None = None
        self._counted = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="watchdog-gpus", daemon=True).start()

    def begin(self, count: int) -> None:
        """Adds the readings of the first `count` GPUs from now on, which are those of the run's ranks on this node."""
        self._counted = count

    def latest(self) -> tuple[GpuFigures, ...] | None:
        """The last figures; None if there are none, or if the driver no longer answers."""
        last = self._last
        return last[1] if last is not None and time.monotonic() - last[0] < _OLD_S else None

    def _run(self) -> None:
        gpus = _gpus()
        while gpus:
            read = [gpu() for gpu in gpus]
            self._last = time.monotonic(), tuple(figures for figures, _ in read)
            self.sums = GpuSums.total([self.sums, *map(GpuSums.of, read[: self._counted])])
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
        read = {number: gpu().figures for number, gpu in gpus.items()}
        held = {number: gpu for number, gpu in read.items() if (gpu.memory_gib or 0) > _DRIVERS * (gpu.total_gib or 0)}
        if not held or time.monotonic() > until:
            break
        time.sleep(_POLL_S)
    in_use = ", ".join(f"{gpu.memory_gib:g} of {gpu.total_gib:g} GiB of GPU {number}" for number, gpu in held.items())
    answer[0] = f"{in_use} are in use, {limit_s:g} s after the last ranks: something else runs there" if held else ""


def _gpus() -> list[Callable[[], ClockedFigures]]:
    """A function for each GPU that this job may use, which reads its figures: NVIDIA's, or AMD's if it has none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handles = _handles(nvml)
    except (OSError, AttributeError):  # no driver, or one of another kind
        handles = []
    if handles:
        return [partial(_read, nvml, handle) for handle in handles]
    return [partial(read_device, device) for device in shown_devices()]


def _handles(nvml: ctypes.CDLL) -> list[ctypes.c_void_p]:
    count, handles = ctypes.c_uint(), []
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    # If Slurm confines a job to its GPUs, NVML counts these alone, as CUDA does; elsewhere both count all of the node.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "all")
    if visible in ("", "-1", "NoDevFiles"):
        return []
    for index in range(count.value):
        handle = ctypes.c_void_p()
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(handle)):
            handles.append(handle)
    named = [handle for name in visible.split(",") for handle in _named(nvml, name.strip(), handles)]
    return named or handles


def _named(nvml: ctypes.CDLL, name: str, handles: Sequence[ctypes.c_void_p]) -> Sequence[ctypes.c_void_p]:
    """The GPU, or the MIG instance, of a name in CUDA_VISIBLE_DEVICES: a number, or the first letters of one UUID."""
    if name.isdecimal():
        return handles[int(name) : int(name) + 1]
    if name.startswith("MIG-"):
        instance = ctypes.c_void_p()
        return [] if nvml.nvmlDeviceGetHandleByUUID(name.encode(), ctypes.byref(instance)) else [instance]
    found, uuid = [], ctypes.create_string_buffer(96)
    for handle in handles if name.startswith("GPU-") else ():
        if not nvml.nvmlDeviceGetUUID(handle, uuid, 96) and uuid.value.decode().startswith(name):
            found.append(handle)
    return found if len(found) == 1 else []


def _read(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> ClockedFigures:
    # NVML's structures: percent of time of the GPU and of its memory; bytes in all, free, in use.
    util, memory, power, heat = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)(), ctypes.c_uint(), ctypes.c_uint()
    no_util, no_memory = nvml.nvmlDeviceGetUtilizationRates(gpu, util), nvml.nvmlDeviceGetMemoryInfo(gpu, memory)
    no_power = nvml.nvmlDeviceGetPowerUsage(gpu, ctypes.byref(power))
    no_heat = nvml.nvmlDeviceGetTemperature(gpu, 0, ctypes.byref(heat))
    in_use, in_all = (None, None) if no_memory else (round(memory[2] / GIB, 1), round(memory[0] / GIB, 1))
    watts = None if no_power else round(power.value / 1000)
    figures = GpuFigures(None if no_util else util[0], in_use, in_all, watts, None if no_heat else heat.value)
    return ClockedFigures(figures, _clock(nvml, gpu))


def _clock(nvml: ctypes.CDLL, gpu: ctypes.c_void_p) -> float | None:
    clock = ctypes.c_uint()
    return None if nvml.nvmlDeviceGetClockInfo(gpu, _SM, ctypes.byref(clock)) else float(clock.value)


# NVML's reasons for a clock below the highest that slow a program: nvmlClocksThrottleReason… in nvml.h.
_THROTTLES = {0x4: "power cap", 0x8: "slowed by the hardware", 0x10: "in step with another GPU", 0x20: "heat",
              0x40: "heat, by the hardware", 0x80: "power brake"}  # fmt: skip
_SM = 1


def read_clock(index: int) -> tuple[float | None, str]:
    """Returns (clock in MHz of the GPU that is number `index` of this process's, the driver's reasons if it holds that
    down); (None, "") without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        handle = dict(enumerate(_handles(nvml))).get(index)
        if handle is not None:
            reasons = ctypes.c_ulonglong()
            no_reasons = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle, ctypes.byref(reasons))
            named = "" if no_reasons else ", ".join(text for bit, text in _THROTTLES.items() if reasons.value & bit)
            return _clock(nvml, handle), named
    except (OSError, AttributeError):  # no driver, or one of another kind
        pass
    devices = shown_devices()
    return (read_device(devices[index]).clock_mhz if index < len(devices) else None), ""
