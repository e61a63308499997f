"""This machine for the planner of a bench: its profile, the memory of its ranks, and what is predicted to fit."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hpc_gpt.engines.base.training import Training
from hpc_gpt.errors import UserError
from hpc_gpt.plan.machine import Machine, machine_of
from hpc_gpt.plan.memory import predict_memory
from hpc_gpt.plan.training import training_of
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.cluster import ClusterProfile, MachineFigures, device_named, load_profile
from hpc_gpt.settings.resolved import Resolved

LOCAL = "local"
# The keys of a profile about the machine itself. All others are for the scheduler.
_OF_THE_MACHINE = ("device", "fabric", "machine", "calibration", "python", "venv", "modules", "environment")
# GiB of memory and of address space that a rank takes before it has a model, for libraries and threads. A rank that
# trains 120,000 parameters had VmHWM 0.33 and VmPeak 1.32 on a machine with 2 cores.
_BARE_GIB, _BARE_ADDRESSES_GIB = 0.4, 1.5

_SMALLER = "try a smaller --model, or --seq"


def profile_here(chosen: ClusterProfile | None, gpus: Sequence[Mapping[str, Any]]) -> ClusterProfile:
    """The profile of this machine with its `gpus`, as provenance lists them, and the user's `chosen` profile.

    A bench always runs here, so only device, software and calibration of a Slurm site's profile count.
    """
    profile = load_profile(LOCAL)
    if chosen is not None and chosen.name != LOCAL:
        own = {key: getattr(chosen, key) for key in _OF_THE_MACHINE}
        profile = chosen if chosen.scheduler == LOCAL else replace(profile, **own)
    if not gpus:
        return profile
    device = profile.device or device_named(str(gpus[0]["name"]))
    figures = profile.machine or MachineFigures()
    if profile.fabric is None and figures.network_gb_s is None:
        figures = replace(figures, network_gb_s=0.0)  # no network to another machine
    return replace(profile, device=device, machine=figures, gpus_per_node=len(gpus))


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))


def with_predicted_memory(record: Record, resolved: Resolved) -> Record:
    """The record with the planner's predicted_memory_gib, if it has none and plan can predict it. Allocated memory does
    not depend on the device, so none need be known."""
    if record.predicted_memory_gib:
        return record
    try:
        memory = predict_memory(training_of(resolved))
    except UserError:
        return record
    sources = {**record.sources, "predicted_memory_gib": "plan, allocated at the peak, on any GPU: none is named here"}
    return replace(record, predicted_memory_gib=[stage.allocated for stage in memory.stages], sources=sources)


@dataclass(frozen=True)
class Capacity:
    """The memory of one rank: GiB, and a text that names it. `machine`: the GPU's, None on the host. `bare_gib`: on the
    host, what the rank takes before it has a model."""

    gib: float
    where: str
    machine: Machine | None = None
    bare_gib: float = 0.0

    def need_gib(self, asked: Training, micro_batch: int) -> float:
        """The predicted need of a rank, in GiB."""
        memory = predict_memory(replace(asked, micro_batch=micro_batch), self.machine)
        stage = memory.stages[memory.deciding]
        return stage.nvidia_smi if self.machine else stage.allocated + stage.host + self.bare_gib


def advice_on_memory(resolved: Resolved, profile: ClusterProfile, ended: str) -> str:
    """Advice for the user: what may fit instead of a run that ended as `ended` (gpu_memory or host_memory)."""
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
        return f"{half}; plan predicts that {need:.3g} GiB are enough, and {capacity.where} hold that"
    fits = nearest_micro_batch(asked, capacity)
    if fits == 0:
        least = capacity.need_gib(asked, 1)
        text = f"plan predicts that no micro-batch fits in {capacity.where}: --mbs 1 needs {least:.3g} GiB already"
        return f"{text}; {_SMALLER}"
    need = capacity.need_gib(asked, fits)
    return f"the nearest micro-batch predicted to fit in {capacity.where} is --mbs {fits}, with {need:.3g} GiB"


def nearest_micro_batch(asked: Training, capacity: Capacity) -> int:
    """The largest micro-batch below the one asked for that is predicted to fit; 0 if none is."""
    low, high = 0, asked.micro_batch  # fits, does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if capacity.need_gib(asked, middle) <= capacity.gib:
            low = middle
        else:
            high = middle
    return low


def _capacity(profile: ClusterProfile, ended: str, ranks: int) -> Capacity | None:
    """The memory that the run exceeded; None if it is not known."""
    if ended == "gpu_memory":
        machine = machine_of(profile)
        return Capacity(machine.memory_gib, f"the {machine.memory_gib:.1f} GiB of a {machine.device}", machine)
    total = _host_memory_gib()
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and (total is None or limit / 2**30 < total / ranks):
        name = f"the {limit / 2**30:.1f} GiB that ulimit -v leaves a process"
        return Capacity(limit / 2**30, name, bare_gib=_BARE_ADDRESSES_GIB)
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
