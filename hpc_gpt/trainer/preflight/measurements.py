"""The measurements of a preflight: a rank's own device and node, in about a second, and the rates between ranks.

Every figure of a device can be replaced. A shell on each rank runs HPC_GPT_PROBE_COMMAND, with SLURMD_NODENAME, RANK
and the rest of the job's environment, and the command prints a JSON object. Its figures replace measurements. If the
command fails, or prints an `error`, the node has failed.
"""

import functools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.runs.provenance import versions_of
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.preflight.transfers import Transfer
from hpc_gpt.trainer.preflight.verdict import NODE_FILE, SEEN_BY_ALL, SHARED

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_MIB = 2**20

# Long enough for the GPU's clock to rise.
_MEASURED_S = 0.2
_WRITTEN_MIB = 8
_TIMES = 3
# A collective that takes longer will not end. NCCL's first one among hundreds of ranks takes many seconds.
PATIENCE_S = 45


class ProbeFailed(Exception):
    """This node cannot be measured; the text is the reason."""


def probe_device(
    resolved: Resolved, device: torch.device, attempt: Path, node: str | None, replaced: Mapping[str, Any]
) -> dict[str, Any]:
    """Measures the figures of this rank, with units in their names; figures in `replaced` are taken instead.

    Only the first rank of a node measures the shared disk: it has the `node`'s name, the others None. The figure
    `judged` says whether the rates can be compared with those of other nodes. A CPU's rates depend on the machine's
    load, so they are reported but not judged, unless they are replaced.
    """
    cuda = device.type == "cuda"
    probes: dict[str, Callable[[], Any]] = {
        "device": lambda: torch.cuda.get_device_name(device) if cuda else "cpu",
        "devices": torch.cuda.device_count,
        "memory_free_gib": lambda: round(_memory_free(device) / GIB, 2),
        # In half precision a CPU may compute in a plain loop.
        "matmul_tflops": lambda: matmul_tflops(device, *((resolved.train.dtype, 8192) if cuda else ("fp32", 384))),
        "host_to_device_gb_s": lambda: host_to_device_gb_s(device),
    }
    if node is not None:
        probes |= {
            "sees_run_folder": lambda: (attempt / SHARED / SEEN_BY_ALL).is_file(),
            "write_mb_s": lambda: write_mb_s(attempt / SHARED / f"{NODE_FILE}{node}"),
            "free_gib": lambda: round(shutil.disk_usage(attempt).free / GIB, 3),
        }
    figures = {name: replaced[name] if name in replaced else probe() for name, probe in probes.items()}
    named = replaced.get("versions")
    figures["versions"] = versions() | (named if isinstance(named, dict) else {})
    return dict(replaced) | figures | {"judged": cuda or "matmul_tflops" in replaced}


def figures_of_command(command: str | None) -> dict[str, Any]:
    """The JSON object that HPC_GPT_PROBE_COMMAND prints; empty without a command.

    Raises ProbeFailed if it fails or prints anything else.
    """
    if not command:
        return {}
    done = subprocess.run(
        ["bash", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise ProbeFailed(f"the probe command failed: {last}")
    try:
        figures = json.loads(done.stdout or "{}")
    except ValueError:
        figures = None
    if not isinstance(figures, dict):
        raise ProbeFailed(f"the probe command does not print a JSON object: {done.stdout[:80]!r}")
    if figures.get("error"):
        raise ProbeFailed(str(figures["error"]))
    return figures


def matmul_tflops(device: torch.device, dtype: str, size: int) -> float:
    """The rate of a product of square matrices with `size` rows in TFLOP/s; a product has 2 size^3 operations."""
    # A generator of its own: the default one is part of the run's state.
    generator = torch.Generator(device).manual_seed(1)
    a = torch.randn(size, size, device=device, dtype=_DTYPES[dtype], generator=generator)
    out = torch.empty_like(a)
    seconds = seconds_each(device, lambda: torch.mm(a, a, out=out))
    return four_digits(2 * size**3 / seconds / 1e12)


def host_to_device_gb_s(device: torch.device) -> float:
    """The rate of a copy from the host's memory (pinned for a GPU) to the device's, in GB/s of 1e9 bytes."""
    cuda = device.type == "cuda"
    size = (256 if cuda else 8) * _MIB
    source = torch.empty(size, dtype=torch.uint8, pin_memory=cuda)
    target = torch.empty(size, dtype=torch.uint8, device=device)
    seconds = seconds_each(device, lambda: target.copy_(source, non_blocking=cuda))
    return four_digits(size / seconds / 1e9)


def write_mb_s(path: Path) -> float:
    """The rate of a synced write of 8 MiB to the run folder's file system, in MB/s. Other nodes look for the file."""
    block = bytes(_MIB)
    began = time.perf_counter()
    with open(path, "wb") as file:
        for _ in range(_WRITTEN_MIB):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    return four_digits(_WRITTEN_MIB * _MIB / (time.perf_counter() - began) / 1e6)


def four_digits(rate: float) -> float:
    return float(f"{rate:.4g}")


def versions() -> dict[str, str]:
    """The versions that must be equal on all nodes: Python, torch, deepspeed, numpy, CUDA or HIP, and NCCL."""
    versions_here = versions_of(("torch", "deepspeed", "numpy"))
    for name in ("cuda", "hip"):
        if (version := getattr(torch.version, name)) is not None:
            versions_here[name] = version
    if torch.cuda.is_available():
        versions_here["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    return versions_here


def seconds_each(device: torch.device, work: Callable[[], Any]) -> float:
    """The mean seconds of one call of `work`, over as many calls as fit in 0.2 s, after two for warm-up."""
    for _ in range(2):
        work()
    once = _mean_seconds(device, work, 1)
    return _mean_seconds(device, work, max(1, min(100, int(_MEASURED_S / once))))


def _mean_seconds(device: torch.device, work: Callable[[], Any], times: int) -> float:
    _wait_for(device)
    began = time.perf_counter()
    for _ in range(times):
        work()
    _wait_for(device)
    return max(time.perf_counter() - began, 1e-9) / times


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memory_free(device: torch.device) -> int:
    """Free bytes of the device's memory, or of the host's on a node without a GPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def run_transfers(
    transfers: Sequence[Transfer],
    rank: int,
    device: torch.device,
    replaced: Mapping[str, Any],
    begun: Callable[[], None],
    ended: Callable[[float], None],
) -> None:
    """Runs the rank's own transfers in their order; `ended` gets the rate of each in GB/s of 1e9 bytes.

    The rate of a pair is what each rank sends per second while it receives as much. The rate of a ring is the bus
    bandwidth of an all-reduce, 2 (n - 1) / n of the buffer per second, and that of an all-to-all half of that
    (nccl-tests, doc/PERFORMANCE.md). `pair_gb_s`, `all_reduce_gb_s` and `all_to_all_gb_s` in `replaced` are taken
    instead of measured rates.
    """
    buffer = torch.ones((64 if device.type == "cuda" else 1) * _MIB // 4, device=device)
    other = torch.empty_like(buffer)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for transfer in transfers:
        begun()
        if transfer.kind == "pair":
            peer = transfer.ranks[0] if transfer.ranks[1] == rank else transfer.ranks[1]
            swap = [dist.P2POp(dist.isend, buffer, peer), dist.P2POp(dist.irecv, other, peer)]
            work = functools.partial(_swap, swap)
            name, moved = "pair_gb_s", 1.0
        else:
            count = len(transfer.ranks)
            if transfer.ranks not in groups:
                groups[transfer.ranks] = dist.new_group(
                    list(transfer.ranks), timeout=timedelta(seconds=PATIENCE_S), use_local_synchronization=True
                )
            work = functools.partial(dist.all_reduce, buffer, group=groups[transfer.ranks])
            name, moved = "all_reduce_gb_s", 2 * (count - 1) / count
            if transfer.kind == "all-to-all":
                even = buffer.numel() // count * count
                work = functools.partial(
                    dist.all_to_all_single, other[:even], buffer[:even], group=groups[transfer.ranks]
                )
                name, moved = "all_to_all_gb_s", (count - 1) / count
        rate = four_digits(moved * buffer.nbytes / _timed(device, work) / 1e9)
        buffer.fill_(1.0)
        ended(float(replaced.get(name, rate)))


def _swap(swap: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(swap):
        work.wait()


def _timed(device: torch.device, work: Callable[[], Any]) -> float:
    """The mean seconds of one call of `work` over three calls, after one that opens the connection."""
    work()
    return _mean_seconds(device, work, _TIMES)
