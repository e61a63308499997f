"""How fast the ranks reach each other: pairs of nodes, and pairs and the ring of every group of the layout.

All pairs of a round are disjoint and exchange at the same time; a node has two neighbours, so that a slow pair can be
told from a slow node by the other pair that each of the two is in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.settings.layout import Layout
from hpc_gpt.train.preflight.device_probes import four_digits

_MIB = 2**20
_TIMES = 3
# A collective that stands this long will not end; NCCL's first among hundreds of ranks takes many seconds.
PATIENCE_S = 45
AXES = ("tp", "pp", "dp")


@dataclass(frozen=True)
class Exchange:
    """One exchange: "pair" or "ring", along an axis of the layout, within a "node" or between "nodes"."""

    kind: str
    axis: str
    ranks: tuple[int, ...]


def plan_exchanges(layout: Layout, nodes: Sequence[str]) -> list[list[Exchange]]:
    """Rounds of disjoint exchanges, the same on every rank. `nodes` names each rank's node; the layout's ranks come
    first, behind them those of spare nodes."""
    on: dict[str, list[int]] = {}
    for rank, node in enumerate(nodes):
        on.setdefault(node, []).append(rank)
    rounds = [*_pairs_of_ring("nodes", [ranks[0] for ranks in on.values()])]
    rounds.append([Exchange("ring", "node", tuple(ranks)) for ranks in on.values() if len(ranks) > 1])
    for axis in AXES:
        groups = [group for group in layout.groups(axis) if len(group) > 1]
        by_round: dict[int, list[Exchange]] = {}
        for group in groups:
            for number, pairs in enumerate(_pairs_of_ring(axis, group)):
                by_round.setdefault(number, []).extend(pairs)
        rounds += [pairs for _, pairs in sorted(by_round.items())]
        rounds.append([Exchange("ring", axis, tuple(group)) for group in groups])
    return [exchanges for exchanges in rounds if exchanges]


def _pairs_of_ring(axis: str, ring: Sequence[int]) -> Iterator[list[Exchange]]:
    """The neighbours of a ring in two rounds, or three where it is odd."""
    edges = [(at, (at + 1) % len(ring)) for at in range(len(ring) if len(ring) > 2 else len(ring) - 1)]
    closing = [edges.pop()] if len(ring) % 2 and len(ring) > 2 else []
    for some in (edges[0::2], edges[1::2], closing):
        if some:
            yield [Exchange("pair", axis, (ring[a], ring[b])) for a, b in some]


def run_exchanges(
    rounds: Sequence[Sequence[Exchange]],
    rank: int,
    device: torch.device,
    given: Mapping[str, Any],
    began: Callable[[Exchange], None],
    say: Callable[[Exchange, float], None],
) -> None:
    """Makes this rank's exchanges, and says the rate of each in GB/s of 1e9 bytes.

    Of a pair it is what each sends while it receives as much; of a ring the bus bandwidth, 2 (n - 1) / n of the buffer
    a second (nccl-tests, doc/PERFORMANCE.md). `given` may hold `pair_gb_s` and `all_reduce_gb_s`, a rate for every axis
    or one by axis, which stand in place of what was measured.
    """
    buffer = torch.ones((64 if device.type == "cuda" else 1) * _MIB // 4, device=device)
    other = torch.empty_like(buffer)
    groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    for exchanges in rounds:
        own = next((each for each in exchanges if rank in each.ranks), None)
        if own is None:
            continue
        began(own)
        if own.kind == "pair":
            peer = own.ranks[0] if own.ranks[1] == rank else own.ranks[1]
            seconds = _timed(device, lambda peer=peer: _swap(buffer, other, peer))  # type: ignore[misc]
            rate = buffer.nbytes / seconds / 1e9
        else:
            if own.ranks not in groups:
                groups[own.ranks] = dist.new_group(
                    list(own.ranks), timeout=timedelta(seconds=PATIENCE_S), use_local_synchronization=True
                )
            group = groups[own.ranks]
            seconds = _timed(device, lambda group=group: dist.all_reduce(buffer, group=group))  # type: ignore[misc]
            rate = 2 * (len(own.ranks) - 1) / len(own.ranks) * buffer.nbytes / seconds / 1e9
            buffer.fill_(1.0)
        say(own, _replaced(given, own, four_digits(rate)))


def _replaced(given: Mapping[str, Any], exchange: Exchange, measured: float) -> float:
    rates = given.get("pair_gb_s" if exchange.kind == "pair" else "all_reduce_gb_s")
    if isinstance(rates, Mapping):
        rates = rates.get(exchange.axis)
    return float(rates) if isinstance(rates, int | float) else measured


def _swap(mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    sent = dist.P2POp(dist.isend, mine, peer)
    received = dist.P2POp(dist.irecv, theirs, peer)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


def _timed(device: torch.device, work: Callable[[], Any]) -> float:
    """Seconds of one `work`, after one that opens the connection."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(_TIMES):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return max(time.perf_counter() - began, 1e-9) / _TIMES
