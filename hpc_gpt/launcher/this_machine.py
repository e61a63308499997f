"""The machine of a bench, for the planner: its profile, and advice if a run was too large for it."""

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import ClusterProfile, MachineFigures, load_profile
from hpc_gpt.core.settings.devices import device_named
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.sized import Sized
from hpc_gpt.planner.machine import Machine, machine_of
from hpc_gpt.planner.memory import predict_memory
from hpc_gpt.planner.training import training_of

LOCAL = "local"
# The keys of a profile about the machine itself. All others are for the scheduler.
_MACHINE_KEYS = ("device", "fabric", "machine", "calibration", "python", "venv", "modules", "environment")
_SMALLER = "try a smaller --model, or --seq"


def profile_here(chosen: ClusterProfile | None, gpus: Sequence[Mapping[str, Any]]) -> ClusterProfile:
    """The profile of this machine, from its `gpus`, as provenance lists them, and the user's `chosen` profile.

    A bench always runs on this machine, so only device, software and calibration of a Slurm site's profile count.
    """
    profile = load_profile(LOCAL)
    if chosen is not None and chosen.name != LOCAL:
        of_machine = {key: getattr(chosen, key) for key in _MACHINE_KEYS}
        profile = replace(chosen, stage=None) if chosen.scheduler == LOCAL else replace(profile, **of_machine)
    if not gpus:
        return profile
    device = profile.device or device_named(str(gpus[0]["name"]))
    figures = profile.machine or MachineFigures()
    if profile.fabric is None and figures.network_gb_s is None:
        figures = replace(figures, network_gb_s=0.0)  # no network to another machine
    return replace(profile, device=device, machine=figures, gpus_per_node=len(gpus))


def with_predicted_memory(record: Record, resolved: Sized) -> Record:
    """The record with the planner's predicted_memory_gib, if it has none and plan can predict it. Allocated memory does
    not depend on the device, so the device need not be known."""
    if record.predicted_memory_gib:
        return record
    try:
        memory = predict_memory(training_of(resolved))
    except UserError:
        return record
    sources = {**record.sources, "predicted_memory_gib": "plan, allocated at the peak, on any GPU: none is named here"}
    return replace(record, predicted_memory_gib=[stage.allocated for stage in memory.stages], sources=sources)


def advice_on_memory(resolved: Resolved, profile: ClusterProfile, ended: str) -> str:
    """Advice for the user: a run that may fit instead of one that ended as `ended` (gpu_memory or host_memory).

    The share of the host's memory that a process may have, by RAM, cgroup and ulimit, is not predicted.
    """
    training = training_of(resolved)
    half = f"try --mbs {training.micro_batch // 2}" if training.micro_batch > 1 else _SMALLER
    if ended != "gpu_memory":
        return half
    try:
        machine = machine_of(profile)
    except UserError as fault:
        return f"{half}; plan cannot predict what fits: {fault}"
    where = f"the {machine.memory_gib:.1f} GiB of a {machine.device}"
    need = need_gib(training, machine, training.micro_batch)
    if need <= machine.memory_gib:
        return f"{half}; plan predicts that {need:.3g} GiB are enough, and {where} hold that"
    fits = nearest_micro_batch(training, machine)
    need = need_gib(training, machine, fits or 1)
    if fits == 0:
        return f"plan predicts that no micro-batch fits in {where}: --mbs 1 needs {need:.3g} GiB already; {_SMALLER}"
    return f"the nearest micro-batch predicted to fit in {where} is --mbs {fits}, with {need:.3g} GiB"


def nearest_micro_batch(training: Training, machine: Machine) -> int:
    """The largest micro-batch below that of the training that is predicted to fit; 0 if none is."""
    smaller = range(1, training.micro_batch)
    return bisect.bisect_right(smaller, machine.memory_gib, key=lambda size: need_gib(training, machine, size))


def need_gib(training: Training, machine: Machine, micro_batch: int) -> float:
    """The predicted memory that a rank needs with a micro-batch, in GiB."""
    memory = predict_memory(replace(training, micro_batch=micro_batch), machine)
    return memory.stages[memory.deciding].nvidia_smi
