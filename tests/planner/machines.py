"""Machines by the names of their device and fabric, without a cluster profile."""

from __future__ import annotations

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.devices import DEVICES
from hpc_gpt.core.tables import close_matches
from hpc_gpt.planner.machine import Fabric, Machine, joined, parse_fabric


def machine_named(device: str, gpus_per_node: int, fabric: str | None) -> Machine:
    """The machine with `gpus_per_node` of a known device on a host, and a `fabric` (`parse_fabric`; None: no network
    between hosts). ConfigError for an unknown device or fabric."""
    if device not in DEVICES:
        raise ConfigError(
            f"device {device!r:.60} is not known",
            close_matches(device, DEVICES)
            or f"known: {', '.join(DEVICES)}; a profile's [machine] can give its figures",
        )
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node is {gpus_per_node}, but must be at least 1", "count the GPUs of one node")
    return joined(DEVICES[device], gpus_per_node, parse_fabric(fabric) if fabric is not None else Fabric())
