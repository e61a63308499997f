"""The machine that a device and a fabric make, or a cluster profile; nothing that is not known is assumed."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.fabrics import Fabric, link_gb_s, link_latency_s, parse_fabric
from hpc_gpt.plan.machine import Machine
from hpc_gpt.settings.devices import DEVICES, Device
from hpc_gpt.tables import close_matches

if TYPE_CHECKING:
    from hpc_gpt.settings.cluster import ClusterProfile

# What [machine] must have for a device that devices.toml lacks.
_OF_A_DEVICE = ("memory_gib", "peak_tflops", "memory_gb_s", "node_gb_s", "host_gb_s")


def machine_named(device: str, gpus_per_node: int, fabric: str | None) -> Machine:
    """The machine of a known device, so many on a host, joined by `fabric` (words as `fabrics` takes; None: hosts are
    not joined). ConfigError for a device or fabric that is not known."""
    if device not in DEVICES:
        raise ConfigError(
            f"device {device!r:.60} is not known",
            close_matches(device, DEVICES)
            or f"known: {', '.join(DEVICES)}; a profile's [machine] can give its figures",
        )
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node is {gpus_per_node}, but must be at least 1", "count the GPUs of one node")
    return _joined(DEVICES[device], gpus_per_node, parse_fabric(fabric) if fabric is not None else Fabric())


def machine_of(profile: ClusterProfile) -> Machine:
    """The machine of a cluster profile: its device's figures, its fabric's, and what its [machine] gives instead.

    ConfigError, which says what to give, where the profile does not tell: names no device, or no fabric.
    """
    given = (
        {key: value for key, value in asdict(profile.machine).items() if value is not None} if profile.machine else {}
    )
    where = f"profile {profile.name}"
    if profile.device is None:
        raise ConfigError(f"{where} names no device", f"set in it device = one of {_known()}; and fabric")
    if profile.fabric is None and "network_gb_s" not in given:
        raise ConfigError(
            f"{where} names no fabric",
            'give it fabric = "infiniband 8x200G" (ports of a node x Gbit/s), "nvlink" for one node, or '
            "network_gb_s in [machine]",
        )
    fabric = parse_fabric(profile.fabric) if profile.fabric is not None else Fabric()
    if profile.device in DEVICES:
        machine = _joined(DEVICES[profile.device], profile.gpus_per_node, fabric)
    else:
        lacking = [key for key in _OF_A_DEVICE if key not in given]
        if lacking:
            raise ConfigError(
                f"{where}: device {profile.device!r:.60} is not known, and [machine] lacks {', '.join(lacking)}",
                close_matches(profile.device, DEVICES)
                or f"give these in [machine]; known devices: {', '.join(DEVICES)}",
            )
        machine = Machine(
            profile.device,
            gpus_per_node=profile.gpus_per_node,
            network_gb_s=fabric.network_gb_s,
            network_latency_s=fabric.network_latency_s,
            **{key: given[key] for key in _OF_A_DEVICE},
        )
    return replace(machine, **given)


def check_reach(machine: Machine, gpus: int) -> None:
    """ConfigError where so many GPUs are more than one node has and nothing is known to join nodes."""
    if gpus > machine.gpus_per_node and machine.network_gb_s <= 0:
        raise ConfigError(
            f"{gpus} GPUs are more than the {machine.gpus_per_node} of a node, and no fabric is named that joins nodes",
            'name it, as fabric = "infiniband 8x200G"',
        )


def _known() -> str:
    """Every real device's name."""
    return ", ".join(device.name for device in DEVICES.values() if not device.nominal)


def _joined(device: Device, gpus_per_node: int, fabric: Fabric) -> Machine:
    hosts = max(1, (device.nvlink_gpus or 0) // gpus_per_node) if fabric.inside != "pcie" else 1
    inside = fabric.inside or ("nvlink" if device.nvlink else "pcie")
    if inside == "nvlink" and fabric.generation is None and device.nvlink is None:
        raise ConfigError(f"device {device.name} has no NVLink", 'name its fabric, as "pcie"')
    generation = fabric.generation or (device.nvlink if inside == "nvlink" else None)
    node_gb_s = link_gb_s(inside, generation) if generation else (device.node_gb_s or device.host_gb_s)
    return Machine(
        device=device.name,
        memory_gib=device.memory_gib,
        peak_tflops=dict(device.peaks),
        memory_gb_s=device.memory_gb_s,
        gpus_per_node=gpus_per_node * hosts,
        node_gb_s=node_gb_s,
        network_gb_s=fabric.network_gb_s * hosts,
        host_gb_s=device.host_gb_s,
        node_latency_s=link_latency_s(inside),
        network_latency_s=fabric.network_latency_s,
        power_w=device.power_w,
        full_power_w=device.full_power_w,
        sustained=device.sustained,
    )
