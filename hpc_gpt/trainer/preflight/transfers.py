"""The transfers of a preflight: between pairs of nodes, between pairs and in a ring of every group of the layout, and
from all to all of the ranks that divide experts.

All pairs of a round are disjoint and run at the same time. A node is in two pairs, so if a pair is slow, the other
pairs of its two nodes tell a slow connection from a slow node. Every rank and the judge make the same plan from the
same nodes, so a rank sends only rates, in the plan's order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from hpc_gpt.core.settings.layout import AXES, Layout


@dataclass(frozen=True)
class Transfer:
    """One measured transfer: a "pair", a "ring" or an "all-to-all", along an axis of the layout, among the ranks that
    divide experts ("ep"), within a "node" or between "nodes"."""

    kind: str
    axis: str
    ranks: tuple[int, ...]


def plan_transfers(layout: Layout, nodes: Sequence[str]) -> list[list[Transfer]]:
    """Rounds of disjoint transfers, the same on every rank.

    `nodes` has each rank's node; the layout's ranks come first, then those of spare nodes.
    """
    on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on.setdefault(node, []).append(rank)
    rounds = [*_pairs_of_ring("nodes", [ranks[0] for ranks in on.values()])]
    rounds.append([Transfer("ring", "node", tuple(ranks)) for ranks in on.values() if len(ranks) > 1])
    for axis in AXES:
        groups = [group for group in layout.groups(axis) if len(group) > 1]
        for together in zip_longest(*(_pairs_of_ring(axis, group) for group in groups), fillvalue=[]):
            rounds.append([pair for pairs in together for pair in pairs])
        rounds.append([Transfer("ring", axis, tuple(group)) for group in groups])
    if layout.ep > 1 and layout.expert_tp == layout.tp:
        rounds.append([Transfer("all-to-all", "ep", tuple(group)) for group in layout.groups("ep")])
    return [transfers for transfers in rounds if transfers]


def _pairs_of_ring(axis: str, ring: Sequence[int]) -> Iterator[list[Transfer]]:
    """The pairs of neighbours in a ring, in two rounds, or in three for an odd number of ranks."""
    edges = [(at, (at + 1) % len(ring)) for at in range(len(ring) if len(ring) > 2 else len(ring) - 1)]
    closing = [edges.pop()] if len(ring) % 2 and len(ring) > 2 else []
    for some in (edges[0::2], edges[1::2], closing):
        if some:
            yield [Transfer("pair", axis, (ring[a], ring[b])) for a, b in some]
