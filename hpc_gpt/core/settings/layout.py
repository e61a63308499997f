"""The layout of a run over its GPUs, tensor x context x pipeline x data parallel, and the batch equation:
global_batch = micro_batch x micro_batches x dp."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from hpc_gpt.core.errors import LayoutError, check_sizes
from hpc_gpt.core.format import counted


class Coordinate(NamedTuple):
    """The coordinate of one rank: its index along each axis."""

    tp: int
    pp: int
    dp: int
    cp: int = 0


AXES = ("tp", "pp", "cp", "dp")
"The axes in the order in which a layout is printed."
_TEXT = re.compile(r"tp(?P<tp>\d{1,6})-pp(?P<pp>\d{1,6})(?:-cp(?P<cp>\d{1,6}))?-dp(?P<dp>\d{1,6})"
                   r"(?:-ep(?P<ep>\d{1,6})(?:-etp(?P<etp>\d{1,6}))?)?(?:-shard(?P<shard>\d{1,6}))?")  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """`tp` x `cp` x `pp` x `dp` ranks. tp varies fastest with the rank, then cp, then dp, then pp.

    This is the rank order of DeepSpeed's axes (pipe, data, model), so a tensor-parallel group always consists of
    neighbouring ranks and stays inside a node. The `cp` ranks of a replica share each sample's tokens; an engine sees
    them as ranks of its data axis, which has `data_ranks`. `dp` counts replicas, which read different samples.

    `ep` and `etp` divide experts over the same ranks, and are no further axes: ep ranks have different experts, and
    etp ranks share each of them, by default the tp ranks of a replica. Only engine megatron-lm has another etp.

    `shard`: the number of neighbours on the data axis that share weights and optimizer, if it is less than all of them
    (None); every such group holds the whole.
    """

    tp: int
    pp: int
    dp: int
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    shard: int | None = None

    def __post_init__(self) -> None:
        for axis in (*AXES, "ep", "etp", "shard"):
            size = getattr(self, axis)
            if size is not None and size < 1:
                raise LayoutError(f"{axis} is {size}, but must be at least 1", f"use {axis} = 1 to switch it off")

    def __str__(self) -> str:
        etp = f"-etp{self.etp}" if self.expert_tp != self.tp else ""
        experts = f"-ep{self.ep}{etp}" if self.ep > 1 or etp else ""
        text = f"tp{self.tp}-pp{self.pp}-{f'cp{self.cp}-' if self.cp > 1 else ''}dp{self.dp}{experts}"
        return text + (f"-shard{self.shard}" if self.shard else "")

    def table(self) -> dict[str, int]:
        """{axis: size}, with ep only above 1, etp and shard only if they are stated."""
        plain = {"ep": 1, "etp": None, "shard": None}
        return {name: size for name, size in vars(self).items() if name in AXES or size != plain[name]}

    @staticmethod
    def parse(text: str) -> "Layout":
        """The layout in a text such as tp4-pp16-dp1 or tp2-pp2-cp2-dp2. LayoutError for any other text."""
        if (match := _TEXT.fullmatch(text)) is None:
            raise LayoutError(
                f"{text!r:.60} is not a layout", "give one as tp4-pp16-dp1, tp2-pp2-cp2-dp2 or tp1-pp2-dp8-ep8"
            )
        return Layout(**{axis: int(size) for axis, size in match.groupdict().items() if size is not None})

    @property
    def gpus(self) -> int:
        """Number of ranks, one per GPU."""
        return self.tp * self.cp * self.pp * self.dp

    @property
    def data_ranks(self) -> int:
        """Ranks of the data axis, which average gradients and share weights and optimizer: cp x dp."""
        return self.cp * self.dp

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        return self.etp or self.tp

    @property
    def expert_replicas(self) -> int:
        """Ranks that have the same part of the same experts, and average its gradients: tp x cp x dp / (ep x etp)."""
        return self.tp * self.data_ranks // (self.ep * self.expert_tp)

    @property
    def shards(self) -> int:
        """The number of ranks over which weights and optimizer are sharded, if the engine shards them."""
        return self.shard or self.data_ranks

    def coordinate(self, rank: int) -> Coordinate:
        """The coordinate of `rank`; IndexError unless 0 <= rank < gpus."""
        if not 0 <= rank < self.gpus:
            raise IndexError(f"rank {rank} is outside 0..{self.gpus - 1} of {self}")
        others, tp = divmod(rank, self.tp)
        others, cp = divmod(others, self.cp)
        pp, dp = divmod(others, self.dp)
        return Coordinate(tp, pp, dp, cp)

    def rank(self, at: Coordinate) -> int:
        """The rank at a coordinate; IndexError outside the layout."""
        for axis in AXES:
            if not 0 <= getattr(at, axis) < getattr(self, axis):
                raise IndexError(f"{axis} {getattr(at, axis)} is outside 0..{getattr(self, axis) - 1} of {self}")
        return ((at.pp * self.dp + at.dp) * self.cp + at.cp) * self.tp + at.tp

    def data_rank(self, rank: int) -> int:
        """The index of `rank` on the data axis, where the cp ranks of a replica are neighbours."""
        return rank // self.tp % self.data_ranks

    def coordinates(self) -> Iterator[Coordinate]:
        """The coordinates of all ranks, in rank order."""
        return (self.coordinate(rank) for rank in range(self.gpus))

    def groups(self, axis: str) -> list[list[int]]:
        """The groups of ranks that differ only along `axis` ("tp", "pp", "cp", "dp"; "data" is cp and dp), each in the
        order of that axis. Of the data axis, a group "ep" has neighbours, and "edp" the ranks with equal experts. The
        ranks of a group "shard" hold the model once, without stages: tp x `shards` neighbours."""
        if axis == "shard":
            size = self.tp * self.shards
            return [[*range(first, first + size)] for first in range(0, self.gpus, size)]
        if axis in ("ep", "edp"):
            data = self.groups("data")
            if axis == "ep":
                return [ranks[first : first + self.ep] for ranks in data for first in range(0, len(ranks), self.ep)]
            return [ranks[place :: self.ep] for ranks in data for place in range(self.ep)]
        groups: dict[Coordinate, list[int]] = {}
        origin = {"dp": 0, "cp": 0} if axis == "data" else {axis: 0}
        for rank, at in enumerate(self.coordinates()):
            groups.setdefault(at._replace(**origin), []).append(rank)
        return list(groups.values())


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number that is at most `most`, and at most 4096.

    >>> largest_divisor(128, 24), largest_divisor(7, 6)
    (16, 1)
    """
    return next((size for size in range(min(most, number, 4096), 0, -1) if number % size == 0), 1)


def check_gpus(layout: Layout, gpus: int) -> None:
    """Raises LayoutError, with the product, if the layout does not use exactly these GPUs."""
    if layout.gpus != gpus:
        product = " x ".join(str(getattr(layout, axis)) for axis in AXES if axis != "cp" or layout.cp > 1)
        raise LayoutError(
            f"layout {layout} needs {counted(layout.gpus, 'GPU')} ({product} = {layout.gpus}), but there are {gpus}",
            f"use --gpus {layout.gpus}",
        )


def nodes_for(gpus: int, gpus_per_node: int) -> int:
    """The number of nodes that hold `gpus` ranks; one node if they do not fill it.

    Raises LayoutError if the ranks need several nodes and do not fill the last one.
    """
    if gpus <= gpus_per_node:
        return 1
    if gpus % gpus_per_node:
        whole = gpus // gpus_per_node * gpus_per_node
        raise LayoutError(
            f"{gpus} GPUs do not fill whole nodes of {gpus_per_node}: {gpus} = "
            f"{gpus // gpus_per_node} x {gpus_per_node} + {gpus % gpus_per_node}",
            f"use --gpus {whole} or --gpus {whole + gpus_per_node}",
        )
    return gpus // gpus_per_node


def check_nodes(layout: Layout, nodes: int, gpus_per_node: int, allow_tp_across_nodes: bool = False) -> None:
    """Raises LayoutError if the nodes cannot hold the layout, or if a tensor-parallel group spans nodes and may not.

    A tensor-parallel group all-reduces twice in every layer and pass; between nodes that costs more than it gains.
    """
    if layout.gpus > nodes * gpus_per_node:
        enough = -(-layout.gpus // gpus_per_node)
        raise LayoutError(
            f"layout {layout} needs {layout.gpus} GPUs, but {counted(nodes, 'node')} of "
            f"{counted(gpus_per_node, 'GPU')} {'gives' if nodes == 1 else 'give'} {nodes * gpus_per_node}",
            f"use --nodes {enough}",
        )
    per_node = min(gpus_per_node, -(-layout.gpus // nodes))
    if per_node % layout.tp and not allow_tp_across_nodes:
        raise LayoutError(
            f"tp {layout.tp} does not divide the {per_node} ranks of a node: a tensor-parallel group would span nodes",
            f"use a tp that divides {per_node}, or --allow-tp-across-nodes to accept the slow links",
        )


@dataclass(frozen=True)
class Batch:
    """`micro_batch` samples in a pass, `micro_batches` passes in a step, `global_batch` samples in a step."""

    micro_batch: int
    micro_batches: int
    global_batch: int


def solve_batch(
    dp: int, micro_batch: int | None = None, micro_batches: int | None = None, global_batch: int | None = None
) -> Batch:
    """The batch from any two of its sizes; a missing size is 1 or computed. LayoutError if they contradict."""
    check_sizes({"micro_batch": micro_batch, "micro_batches": micro_batches, "global_batch": global_batch})
    if global_batch is None:
        micro_batch, micro_batches = micro_batch or 1, micro_batches or 1
        return Batch(micro_batch, micro_batches, micro_batch * micro_batches * dp)
    if micro_batch is None and micro_batches is None:
        micro_batch = 1
    if micro_batch is None:
        assert micro_batches is not None
        micro_batch = _divide("micro_batches", micro_batches, dp, global_batch)
    elif micro_batches is None:
        micro_batches = _divide("micro_batch", micro_batch, dp, global_batch)
    assert micro_batches is not None
    if micro_batch * micro_batches * dp != global_batch:
        raise LayoutError(
            f"global_batch {global_batch} is not micro_batch x micro_batches x dp = "
            f"{micro_batch} x {micro_batches} x {dp} = {micro_batch * micro_batches * dp}",
            "give two of the three; the third follows",
        )
    return Batch(micro_batch, micro_batches, global_batch)


def _divide(name: str, size: int, dp: int, global_batch: int) -> int:
    """global_batch / (size x dp); LayoutError with the product if it is not whole."""
    quotient, remainder = divmod(global_batch, size * dp)
    if remainder or quotient == 0:
        lower = max(1, quotient) * size * dp
        raise LayoutError(
            f"global_batch {global_batch} is not a multiple of {name} x dp = {size} x {dp} = {size * dp}",
            f"use --global-batch-size {lower}" + (f" or {lower + size * dp}" if quotient else ""),
        )
    return quotient
