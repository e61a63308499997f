"""The machine a training runs on: its device's speeds and its links', from data files or a cluster profile."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """One kind of node and what joins nodes.

    Rates are what a data sheet says, in one direction: `memory_gb_s` of a GPU's own memory, `node_gb_s` from a GPU to
    the others of its node, `network_gb_s` from a whole node to the others, `host_gb_s` between a GPU and the host.
    A node is what NVLink joins: where that is more than one host's GPUs, `gpus_per_node` and `network_gb_s` are of all
    of these. `network_gb_s` is 0 where nothing joins nodes. `power_w` is the card's limit,
    `full_power_w` the one its peak is of where that is higher,
    `sustained` the part of its peak's clock that large products hold.
    """

    device: str
    memory_gib: float
    peak_tflops: dict[str, float]
    memory_gb_s: float
    gpus_per_node: int
    node_gb_s: float
    network_gb_s: float
    host_gb_s: float
    host_memory_gib: float | None = None
    node_latency_s: float = 5e-6
    network_latency_s: float = 15e-6
    power_w: float | None = None
    full_power_w: float | None = None
    sustained: float | None = None
