"""`python -m hpc_gpt.trainer.machine NODES RANKS_PER_NODE`: a rank of `bench --machine` (launcher/bench/machine.py).

Measures its device, then with the other ranks the links between them, as the preflight does. Environment:
SLURM_NODEID, SLURM_LOCALID, MASTER_ADDR and MASTER_PORT; HPC_GPT_PROBE_COMMAND replaces figures, as in a preflight.
Rank 0 prints the figures of all ranks as one line of JSON. A rank ends after MACHINE_LIMIT_S at the latest.
"""

import json
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from hpc_gpt.core.errors import UserError
from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.network import LAZY_GLOO, choose_interface
from hpc_gpt.trainer.model import fp8
from hpc_gpt.trainer.preflight import measurements
from hpc_gpt.trainer.preflight.measurements import PATIENCE_S, four_digits, seconds_each
from hpc_gpt.trainer.preflight.transfers import Transfer
from hpc_gpt.trainer.preflight.verdict import COMMAND, MACHINE_LIMIT_S, MACHINE_MARK
from hpc_gpt.trainer.ranks import leave

# Rows of the square products; samples, heads and tokens of attention; MiB of a copy in memory, and of a transfer.
_ON_GPU = (8192, (2, 16, 8192), 1024, 256)
_ON_CPU = (384, (1, 2, 256), 64, 1)
_HEAD = 128


def main(nodes: int, ranks_per_node: int) -> None:
    last = threading.Timer(MACHINE_LIMIT_S, lambda: os._exit(1))  # a collective cannot be interrupted
    last.daemon = True
    last.start()
    local, size = int(os.environ["SLURM_LOCALID"]), nodes * ranks_per_node
    rank, device = int(os.environ["SLURM_NODEID"]) * ranks_per_node + local, torch.device("cpu")
    if count := torch.cuda.device_count():
        device = torch.device("cuda", local % count)
        torch.cuda.set_device(device)
    replaced = measurements.figures_of_command(os.environ.get(COMMAND))
    figures, gathered = measure_device(device, replaced), [dict[str, Any]()] * size
    os.environ.update(choose_interface(os.environ["MASTER_ADDR"], nodes) | {"RANK": str(rank), "WORLD_SIZE": str(size)})
    os.environ.setdefault(*LAZY_GLOO)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=timedelta(seconds=PATIENCE_S))
    dist.all_reduce(torch.ones(1, device=device))  # NCCL's first call must be one of all ranks

    transfers = [transfer for transfer in _transfers(nodes, ranks_per_node) if rank in transfer.ranks]
    rates: list[float] = []
    mib = (_ON_CPU if device.type == "cpu" else _ON_GPU)[3]
    measurements.run_transfers(transfers, rank, device, replaced, lambda: None, rates.append, mib)
    measured = zip(transfers, rates, strict=True)
    figures |= {f"{transfer.axis}_{transfer.kind}_gb_s": rate for transfer, rate in measured}
    dist.all_gather_object(gathered, figures)
    if rank == 0:
        print(MACHINE_MARK + json.dumps(gathered), flush=True)
    dist.barrier()


def _transfers(nodes: int, ranks_per_node: int) -> Iterator[Transfer]:
    """The transfers within every node, then between all: sends, to which every rank belongs, an all-gather, an
    all-reduce."""
    ranks_of = [tuple(range(ranks_per_node * node, ranks_per_node * (node + 1))) for node in range(nodes)]
    if ranks_per_node > 1:
        yield from (
            Transfer("pair", "node", ranks[at : at + 2]) for ranks in ranks_of for at in range(len(ranks) - 1)[::2]
        )
        yield from (Transfer(kind, "node", ranks) for kind in ("gather", "ring") for ranks in ranks_of)
    if nodes > 1:
        two = zip(ranks_of[::2], ranks_of[1::2], strict=False)
        yield from (Transfer("pair", "nodes", pair) for a, b in two for pair in zip(a, b, strict=True))
        yield from (Transfer(kind, "nodes", sum(ranks_of, ())) for kind in ("gather", "ring"))


def measure_device(device: torch.device, replaced: Mapping[str, Any]) -> dict[str, Any]:
    """Measures a rank's device; figures in `replaced` are taken from there instead."""
    cuda = device.type == "cuda"
    rows, sizes, mib, _ = _ON_GPU if cuda else _ON_CPU
    probes: dict[str, Callable[[], Any]] = {
        "device": lambda: torch.cuda.get_device_name(device) if cuda else "cpu",
        "memory_gib": lambda: (
            (torch.cuda.mem_get_info(device)[1] if cuda else os.sysconf("SC_PHYS_PAGES") * 4096) / GIB
        ),
        "rows": lambda: rows,
        "tflops": lambda: _products(device, rows),
        "attention": lambda: sizes,
        "attention_s": lambda: _attention_s(device, *sizes),
        "memory_gb_s": lambda: _memory_gb_s(device, mib * 2**20),
        "host_to_device_gb_s": lambda: measurements.host_to_device_gb_s(device),
    }
    return {name: replaced[name] if name in replaced else probe() for name, probe in probes.items()}


def _products(device: torch.device, rows: int) -> dict[str, float]:
    """{format: TFLOP/s of a matrix product} for the formats that the device supports; fp8 with one scale per tensor.

    AMD's GPUs report a capability, too, but have no TF32, and no FP8 or one of another format.
    """
    is_cuda = device.type == "cuda" and torch.version.hip is None
    ability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    formats = ["fp32", "bf16"] if device.type == "cpu" else ["fp32", "fp16", "bf16"][: 3 if ability >= (8, 0) else 2]
    rates = {name: measurements.matmul_tflops(device, name, rows) for name in formats}
    if is_cuda and ability >= (8, 0):
        torch.backends.cuda.matmul.allow_tf32 = True
        rates["tf32"] = measurements.matmul_tflops(device, "fp32", rows)
    if is_cuda and ability >= (8, 9):
        small, one = torch.randn(rows, rows, device=device).to(fp8.FORWARD), torch.ones((), device=device)
        seconds = seconds_each(device, lambda: fp8.product(small, small, one, one, torch.bfloat16))
        rates["fp8"] = four_digits(2 * rows**3 / seconds / 1e12)
    return rates


def _attention_s(device: torch.device, samples: int, heads: int, tokens: int) -> float:
    """Seconds of causal attention with heads of 128 in 16 bits, forward and backward."""
    old = device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0)
    dtype, size = torch.float16 if old else torch.bfloat16, (samples, heads, tokens, _HEAD)
    query, key, value = (torch.randn(size, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    ahead = torch.randn(size, device=device, dtype=dtype)

    def both() -> None:
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.autograd.grad(mixed, (query, key, value), ahead)

    return seconds_each(device, both)


def _memory_gb_s(device: torch.device, size: int) -> float:
    """Rate of a copy within the device's memory, bytes read plus written, in GB/s of 1e9 bytes."""
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return four_digits(2 * size / seconds_each(device, lambda: target.copy_(source)) / 1e9)


if __name__ == "__main__":
    try:
        main(*map(int, sys.argv[1:]))
    except (UserError, measurements.ProbeFailed) as fault:
        leave(1, f"Error: {fault}" + (f"; {fault.hint}" if isinstance(fault, UserError) else ""))
    leave(0)
