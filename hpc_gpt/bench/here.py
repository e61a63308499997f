"""This machine as a cluster profile: where a bench runs, and what the planner reckons with."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from hpc_gpt.settings.cluster import ClusterProfile, MachineFigures, load_profile
from hpc_gpt.settings.devices import device_named

LOCAL = "local"
# Of a profile, what says which machine it is; all the rest is about asking a scheduler for it.
_OF_THE_MACHINE = ("device", "fabric", "machine", "calibration", "python", "venv", "modules", "environment")


def profile_here(chosen: ClusterProfile | None, gpus: Sequence[Mapping[str, Any]]) -> ClusterProfile:
    """The profile of this machine, whose GPUs are `gpus` as provenance lists them; `chosen` says more of it.

    A bench always runs here, so of a Slurm site's profile only what tells its device, its software and its
    calibration is taken.
    """
    profile = load_profile(LOCAL)
    if chosen is not None and chosen.name != LOCAL:
        told = {key: getattr(chosen, key) for key in _OF_THE_MACHINE}
        profile = chosen if chosen.scheduler == LOCAL else replace(profile, **told)
    if not gpus:
        return profile
    device = profile.device or device_named(str(gpus[0]["name"]))
    figures = profile.machine or MachineFigures()
    if profile.fabric is None and figures.network_gb_s is None:
        figures = replace(figures, network_gb_s=0.0)  # nothing joins this machine to another one
    return replace(profile, device=device, machine=figures, gpus_per_node=len(gpus))


def has_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (os.environ.get("CXX") or "g++", "clang++"))
