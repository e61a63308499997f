"""What to do where a cell finds no memory: the nearest micro-batch that the planner thinks fits."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_gpt.errors import UserError
from hpc_gpt.plan.machine import Machine, machine_of
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.training import Training, training_of
from hpc_gpt.settings.cluster import ClusterProfile
from hpc_gpt.settings.resolve import Resolved

# What a rank takes before it has a model, of memory and of address space, with its libraries and threads: VmHWM and
# VmPeak of one that trains 120,000 parameters, 0.33 and 1.32 on a machine with 2 cores.
_BARE_GIB, _BARE_ADDRESSES_GIB = 0.4, 1.5

_SMALLER = "try a smaller --model, or --seq"


@dataclass(frozen=True)
class Capacity:
    """What one rank has: GiB, in words which memory that is, and the machine where it is a GPU's, or on the host what
    the rank takes of it whatever it trains."""

    gib: float
    where: str
    machine: Machine | None = None
    bare_gib: float = 0.0

    def need_gib(self, asked: Training, micro_batch: int) -> float:
        """What a run is predicted to need of it."""
        memory = predict_memory(replace(asked, micro_batch=micro_batch), self.machine)
        stage = memory.stages[memory.deciding]
        return stage.nvidia_smi if self.machine else stage.allocated + stage.host + self.bare_gib


def advice_on_memory(resolved: Resolved, profile: ClusterProfile, ended: str) -> str:
    """What may fit instead of a run that ended as `ended`, gpu_memory or host_memory, in words."""
    asked = training_of(resolved)
    half = f"try --mbs {asked.micro_batch // 2}" if asked.micro_batch > 1 else _SMALLER
    try:
        capacity = _capacity(profile, ended, resolved.gpus)
    except UserError as fault:
        return f"{half}; plan cannot say what fits: {fault}"
    if capacity is None:
        return half
    need = capacity.need_gib(asked, asked.micro_batch)
    if need <= capacity.gib:
        return f"{half}; plan thinks that {need:.3g} GiB are enough, and {capacity.where} hold that"
    fits = nearest_micro_batch(asked, capacity)
    if fits == 0:
        least = capacity.need_gib(asked, 1)
        words = f"plan thinks that no micro-batch fits in {capacity.where}: --mbs 1 needs {least:.3g} GiB already"
        return f"{words}; {_SMALLER}"
    need = capacity.need_gib(asked, fits)
    return f"the nearest micro-batch that plan thinks fits in {capacity.where} is --mbs {fits}, with {need:.3g} GiB"


def nearest_micro_batch(asked: Training, capacity: Capacity) -> int:
    """The largest below the one asked for that is predicted to fit; 0 where none does."""
    low, high = 0, asked.micro_batch  # what fits, what does not
    while high - low > 1:
        middle = (low + high) // 2
        if capacity.need_gib(asked, middle) <= capacity.gib:
            low = middle
        else:
            high = middle
    return low


def _capacity(profile: ClusterProfile, ended: str, ranks: int) -> Capacity | None:
    """None where it cannot be told."""
    if ended == "gpu_memory":
        machine = machine_of(profile)
        return Capacity(machine.memory_gib, f"the {machine.memory_gib:.1f} GiB of a {machine.device}", machine)
    total = _host_memory_gib()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (total is None or limit / 2**30 < total / ranks):
        words = f"the {limit / 2**30:.1f} GiB that ulimit -v leaves a process"
        return Capacity(limit / 2**30, words, bare_gib=_BARE_ADDRESSES_GIB)
    if total is None:
        return None
    share = f" for {ranks} ranks" if ranks > 1 else ""
    return Capacity(total / ranks, f"the {total:.1f} GiB of this machine{share}", bare_gib=_BARE_GIB)


def _host_memory_gib() -> float | None:
    try:
        found = re.search(r"^MemTotal:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        return None
    return int(found[1]) / 2**20 if found else None
