"""What one rank finds of its own device and node, in about a second.

Every figure can be replaced: HPC_GPT_PROBE_COMMAND is run by a shell on each rank, with SLURMD_NODENAME, RANK and
the rest of the job's environment, and prints a JSON object. What it gives is not measured; where it fails, or
gives an `error`, the node has failed.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from hpc_gpt import __version__
from hpc_gpt.preflight_lines import NODE_FILE, SEEN_BY_ALL, SHARED
from hpc_gpt.settings.resolve import Resolved

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_GIB = 2**30
_MIB = 2**20
_PACKAGES = ("torch", "deepspeed", "numpy")
# Long enough for a clock that has to rise, short enough that nobody waits.
_MEASURED_S = 0.2
_WRITTEN_MIB = 8


class ProbeFailed(Exception):
    """A probe that cannot be made on this node, with the reason."""


def probe_device(
    resolved: Resolved, device: torch.device, attempt: Path, node: str, given: Mapping[str, Any]
) -> dict[str, Any]:
    """The figures of this rank, units in their names; those of `given` stand in place of measured ones.

    `judged`: the rates can be compared with those of other nodes. A CPU's follow the load of the machine, so that
    they are told and nobody is blamed for them, unless they are given.
    """
    cuda = device.type == "cuda"
    probes: dict[str, Callable[[], Any]] = {
        "device": lambda: torch.cuda.get_device_name(device) if cuda else "cpu",
        "devices": torch.cuda.device_count,
        "memory_free_gib": lambda: round(_memory_free(device) / _GIB, 2),
        # A CPU's own rate in half precision may be that of a loop.
        "matmul_tflops": lambda: matmul_tflops(device, *((resolved.train.dtype, 8192) if cuda else ("fp32", 384))),
        "host_to_device_gb_s": lambda: host_to_device_gb_s(device),
        "sees_run_folder": lambda: (attempt / SHARED / SEEN_BY_ALL).is_file(),
        "write_mb_s": lambda: write_mb_s(attempt / SHARED / f"{NODE_FILE}{node}"),
        "free_gib": lambda: round(_free_bytes(attempt) / _GIB, 3),
        "versions": versions,
    }
    figures = {name: given[name] if name in given else probe() for name, probe in probes.items()}
    if isinstance(given.get("versions"), dict):
        figures["versions"] = versions() | given["versions"]
    return dict(given) | figures | {"judged": cuda or "matmul_tflops" in given}


def figures_of_command(command: str | None) -> dict[str, Any]:
    """What HPC_GPT_PROBE_COMMAND prints; empty without one. ProbeFailed where it fails or prints no object."""
    if not command:
        return {}
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise ProbeFailed(f"the probe command failed: {last}")
    try:
        found = json.loads(done.stdout or "{}")
    except ValueError:
        raise ProbeFailed(f"the probe command prints no JSON: {done.stdout[:80]!r}") from None
    if not isinstance(found, dict):
        raise ProbeFailed(f"the probe command prints no object: {done.stdout[:80]!r}")
    if found.get("error"):
        raise ProbeFailed(str(found["error"]))
    return found


def matmul_tflops(device: torch.device, dtype: str, size: int) -> float:
    """Rate of a product of square matrices of `size` rows in TFLOP/s, 2 size^3 operations each."""
    # A generator of its own: the run's is part of its state.
    generator = torch.Generator(device).manual_seed(1)
    a = torch.randn(size, size, device=device, dtype=_DTYPES[dtype], generator=generator)
    out = torch.empty_like(a)
    seconds = _seconds_each(device, lambda: torch.mm(a, a, out=out))
    return four_digits(2 * size**3 / seconds / 1e12)


def host_to_device_gb_s(device: torch.device) -> float:
    """Rate of a copy from the host's memory (pinned, for a GPU) to the device's, in GB/s of 1e9 bytes."""
    cuda = device.type == "cuda"
    size = (256 if cuda else 8) * _MIB
    source = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = _seconds_each(device, lambda: target.copy_(source, non_blocking=cuda))
    return four_digits(size / seconds / 1e9)


def write_mb_s(path: Path) -> float:
    """Rate at which the run folder's file system takes 8 MiB, to its disk, in MB/s. The file stays, to be seen."""
    block = bytes(_MIB)
    began = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(_WRITTEN_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return four_digits(_WRITTEN_MIB * _MIB / (time.perf_counter() - began) / 1e6)


def four_digits(rate: float) -> float:
    """A rate as exact as it was measured.

    >>> four_digits(0.000123456), four_digits(742.6789)
    (0.0001235, 742.7)
    """
    return float(f"{rate:.4g}")


def versions() -> dict[str, str]:
    """What must be equal on all nodes: Python, the packages that train, CUDA and NCCL."""
    found = {"hpc-gpt": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return found


def _seconds_each(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds of one `work`: the mean over as many as fit in the time, after two that warm up."""
    for _ in range(2):
        work()
    _wait_for(device)
    began = time.perf_counter()
    work()
    _wait_for(device)
    once = max(time.perf_counter() - began, 1e-9)
    times = max(1, min(100, int(_MEASURED_S / once)))
    began = time.perf_counter()
    for _ in range(times):
        work()
    _wait_for(device)
    return max(time.perf_counter() - began, 1e-9) / times


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_free(device: torch.device) -> int:
    """Bytes of the device's memory that nobody uses; of a node without a GPU, the host's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize
