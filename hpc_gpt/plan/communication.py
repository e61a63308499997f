"""Seconds that collectives and sends take on the links of a machine.

Ranks are laid out tp fastest, then cp, dp, pp, so a group's members are `stride` ranks apart. A ring carries
(n-1)/n of a buffer over each member's link once for a gather or a reduce-scatter, twice for an all-reduce; between
nodes all groups that cross from the same node share its ports.
Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; nccl-tests, PERFORMANCE.md (bus bandwidth).
"""

from __future__ import annotations

import math

from hpc_gpt.plan.constants import Constants
from hpc_gpt.plan.machine import Machine

# Where nothing is known to join nodes but a group needs it: slow, finite, so that such a layout is ranked last.
_NO_NETWORK_GB_S = 0.1


class Links:
    """The links of a machine, as collectives reach them under `constants`."""

    def __init__(self, machine: Machine, constants: Constants) -> None:
        self.per_node = max(1, machine.gpus_per_node)
        self.node_b_s = machine.node_gb_s * 1e9 * constants.node
        self.network_b_s = (machine.network_gb_s or _NO_NETWORK_GB_S) * 1e9 * constants.network
        self.reduction_b_s = self.network_b_s / constants.network * constants.reduction
        self.host_b_s = machine.host_gb_s * 1e9 * 0.8  # what copies reach of PCIe's signalling rate
        self.node_latency_s = machine.node_latency_s * constants.latency
        self.network_latency_s = machine.network_latency_s * constants.latency

    def ring_s(self, size: float, members: int, stride: int = 1, network_b_s: float | None = None) -> float:
        """Seconds to gather, or to reduce and scatter, `size` bytes among `members`; an all-reduce takes twice that."""
        if members < 2:
            return 0.0
        span = members * stride
        if span <= self.per_node:
            rate, latency = self.node_b_s, (members - 1) * self.node_latency_s * 0.5
        else:
            inside = max(1, self.per_node // stride)  # members of one group on one node
            groups = self.per_node / inside  # groups that leave a node, each by its share of the ports
            rate = min(self.node_b_s, (network_b_s or self.network_b_s) / groups)
            # Trees over nodes, rings inside: log of the nodes, not their number.
            latency = (inside - 1) * self.node_latency_s * 0.5 + math.log2(span / self.per_node + 1) * (
                self.network_latency_s
            )
        return size * (members - 1) / members / rate + latency

    def send_s(self, size: float, stride: int) -> float:
        """Seconds to send `size` bytes to the next pipeline stage, every GPU of the node at once."""
        if 2 * stride <= self.per_node:
            return size / self.node_b_s + self.node_latency_s
        return size / min(self.node_b_s, self.network_b_s / self.per_node) + self.network_latency_s
