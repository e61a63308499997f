"""The rates of a machine's links in collectives and sends."""

import math

from hpc_gpt.planner.constants import VALUES
from hpc_gpt.planner.machine import Constants, Machine, generation_of


class Links:
    """The rates of a machine's links in collectives and sends under `constants`.

    Rank order is tp fastest, then dp, then pp, so the members of a group are `stride` ranks apart. A ring sends (n-1)/n
    of a buffer over each member's link, once for an all-gather or a reduce-scatter, twice for an all-reduce. Between
    nodes, all groups that leave one node share its ports.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; nccl-tests, PERFORMANCE.md (bus
    bandwidth).
    """

    def __init__(self, machine: Machine, constants: Constants) -> None:
        self.per_node, self.switched = max(1, machine.gpus_per_node), machine.switched
        self.node_b_s = machine.node_gb_s * 1e9 * constants.node
        self.network_b_s = (machine.network_gb_s or VALUES["links.unknown_network_gb_s"]) * 1e9 * constants.network
        share = float(VALUES.get(f"reduction.{generation_of(machine)}.share", 1.0))
        self.reduction_b_s = self.network_b_s / constants.network * constants.reduction * share
        self.host_b_s = machine.host_gb_s * 1e9 * VALUES["host.copies"]
        self.node_latency_s = machine.node_latency_s * constants.latency
        self.hop_s = self.node_latency_s * float(VALUES["links.hop"])  # from one member of a ring to the next
        self.network_latency_s = machine.network_latency_s * constants.latency

    def ring_s(self, size: float, members: int, stride: int = 1, network_b_s: float | None = None) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes among `members`; an all-reduce takes twice."""
        if members < 2:
            return 0.0
        span = members * stride
        if span <= self.per_node:
            rate, latency = self.inside_b_s(members), (members - 1) * self.hop_s
        else:
            inside = max(1, self.per_node // stride)  # members of one group on one node
            groups = self.per_node / inside  # so many groups leave a node, each with its share of the ports
            rate = min(self.inside_b_s(inside), (network_b_s or self.network_b_s) / groups)
            # A tree over nodes, rings inside: the logarithm of the nodes, not their number.
            hops = math.log2(span / self.per_node + 1)
            latency = (inside - 1) * self.hop_s + hops * self.network_latency_s
        return size * (members - 1) / members / rate + latency

    def exchange_s(self, size: float, members: int, stride: int, inside: float, leaving: float) -> float:
        """Seconds of an all-to-all among `members`. Each sends so many copies of `size` bytes `inside` its node, and so
        many, `leaving`, to other nodes at the same time, over its GPU's share of the ports."""
        within = size * inside / self.inside_b_s(max(2, min(members, self.per_node // stride)))
        if members * stride <= self.per_node:
            return within + self.node_latency_s
        across = size * leaving / min(self.node_b_s, self.network_b_s / self.per_node)
        return max(within, across) + self.network_latency_s

    def inside_b_s(self, members: int) -> float:
        """Bytes/s from a GPU to the other `members` - 1 of its node, over all its links to them. A GPU that is alone in
        its group on the node sends to other nodes instead, over its link to the network."""
        if self.switched or members < 2:
            return self.node_b_s
        return self.node_b_s * (members - 1) / (self.per_node - 1)

    def send_s(self, size: float, stride: int, stages: int) -> tuple[float, float]:
        """Seconds to send `size` bytes to the next of `stages` pipeline stages while every GPU of a stage sends: over
        the slowest boundary, and on average. At a boundary between nodes, a stage's GPUs on a node share its ports."""
        inside = size / self.inside_b_s(2) + self.node_latency_s
        if stages * stride <= self.per_node:
            return inside, inside
        leaving = min(stride, self.per_node)
        across = size / min(self.node_b_s, self.network_b_s / leaving) + self.network_latency_s
        return max(inside, across), inside + (across - inside) * leaving / self.per_node
