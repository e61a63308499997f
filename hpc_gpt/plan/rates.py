"""The share of a machine's data sheet that a training reaches: constants, and rates of compute and links under them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.machine import Machine

# W per TFLOP/s of peak below which power limits a card's clock (an A100 has so many, and keeps its clock in large
# products), and the exponent by which the clock falls there. Source: H100 at 500 and 700 W, torchtitan's and
# Megatron-LM's tables.
_COOL_W = 1.28
_CLOCK = 0.2
# The same exponent for a limit below the die's own: near the lowest voltage the clock falls almost like the power.
_LIMITED = 0.6
_TILE = 128  # rows and columns of a product's tile: a partial tile takes as long (cuBLAS, CUTLASS)
# Attention's products do not run on the matrix units if the head's width is not a multiple of 8; this part of the fp32
# rate is left. Source: BigScience's chronicles-prequel.md, heads of 150 against 128.
_OFF_UNITS = 0.4
# The rate if no network is known but a group needs one: slow and finite, so that such a layout is ranked last.
_NO_NETWORK_GB_S = 0.1


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say: each is a share of a data sheet's rate, or seconds.

    `gemm`: large matrix products, of the peak. `memory`: passes over activations, of memory bandwidth.
    `attention`: fused attention, of the rate of large products. `host_s`: the host's time to launch one pass over one
    layer. `node`, `network`: collectives, of a link in a node and between nodes. `latency`: one hop of a collective,
    over the link's latency. `exposed`: the part of communication that compute could hide but does not. `reduction`:
    reductions of gradients and gathers of sharded parameters, of the network when every node sends. `step_s`: seconds
    of a step in addition to all that (data, logs, synchronization for clipping and scaling).

    The defaults are for a machine of which only the data sheet is known; calibration fits them to rows of one cluster.
    Metadata: `spread`, the standard deviation of the constant's logarithm in the prior of the fit; `most`, its largest
    possible value, if it has one.
    """

    gemm: float = field(default=0.765, metadata={"spread": 0.08, "most": 0.98})
    memory: float = field(default=0.88, metadata={"spread": 0.15, "most": 1.0})
    attention: float = field(default=0.43, metadata={"spread": 0.25, "most": 1.5})
    host_s: float = field(default=1.1e-3, metadata={"spread": 0.6})
    node: float = field(default=0.75, metadata={"spread": 0.25, "most": 1.2})
    network: float = field(default=0.75, metadata={"spread": 0.3, "most": 1.2})
    latency: float = field(default=1.1, metadata={"spread": 0.6})
    exposed: float = 0.22  # not fitted: a step's time hardly distinguishes it from the rates
    reduction: float = field(default=0.60, metadata={"spread": 1.0, "most": 1.2})
    step_s: float = field(default=0.025, metadata={"spread": 0.8})


DEFAULT = Constants()


def constants_from(tables: Mapping[str, float]) -> Constants:
    """The constants of a profile: unknown names are ignored, missing ones get their default. ConfigError for a value
    that is not above 0."""
    names = {entry.name for entry in fields(Constants)}
    known = {name: value for name, value in tables.items() if name in names}
    for name, value in known.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"calibration.constants.{name} is {value}, but must be above 0", "calibrate anew")
    return Constants(**known)


class Rates:
    """A device's rates under `constants` for one dtype, in FLOP/s and bytes/s."""

    def __init__(self, machine: Machine, constants: Constants, dtype: str) -> None:
        peaks = machine.peak_tflops
        peak = (
            peaks.get(dtype)
            or peaks.get("fp16" if dtype == "bf16" else "bf16")
            or peaks.get("fp32")
            or max(peaks.values(), default=1.0)
        )
        self.flops = peak * 1e12 * constants.gemm * _clock(machine, peak)
        self.bytes = machine.memory_gb_s * 1e9 * constants.memory
        self.attention = self.flops * constants.attention
        self.plain = min(self.flops, (peaks.get("fp32") or peak / 16) * 1e12 * _OFF_UNITS)

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products of m x k by k x n."""
        tiled = math.ceil(m / _TILE) * math.ceil(n / _TILE) * (_TILE * _TILE)
        return batch * (2 * tiled * k / self.flops + 2 * (m * n + n * k + m * k) / self.bytes)


def _clock(machine: Machine, peak: float) -> float:
    """The share of the peak's clock that a card holds in large products."""
    if machine.power_w is None:
        return 1.0 if machine.sustained is None else machine.sustained
    full = machine.full_power_w or machine.power_w
    own = machine.sustained or min(1.0, float((full / peak / _COOL_W) ** _CLOCK))
    return own * float((machine.power_w / full) ** _LIMITED)


class Links:
    """The rates of a machine's links in collectives and sends under `constants`.

    Rank order is tp fastest, then dp, then pp, so the members of a group are `stride` ranks apart. A ring sends (n-1)/n
    of a buffer over each member's link once for an all-gather or a reduce-scatter, twice for an all-reduce. Between
    nodes, all groups that leave one node share its ports.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; nccl-tests, PERFORMANCE.md (bus
    bandwidth).
    """

    def __init__(self, machine: Machine, constants: Constants) -> None:
        self.per_node = max(1, machine.gpus_per_node)
        self.node_b_s = machine.node_gb_s * 1e9 * constants.node
        self.network_b_s = (machine.network_gb_s or _NO_NETWORK_GB_S) * 1e9 * constants.network
        self.reduction_b_s = self.network_b_s / constants.network * constants.reduction
        self.host_b_s = machine.host_gb_s * 1e9 * 0.8  # the share of PCIe's signalling rate that copies reach
        self.node_latency_s = machine.node_latency_s * constants.latency
        self.network_latency_s = machine.network_latency_s * constants.latency

    def ring_s(self, size: float, members: int, stride: int = 1, network_b_s: float | None = None) -> float:
        """Seconds of an all-gather or a reduce-scatter of `size` bytes among `members`; an all-reduce takes twice."""
        if members < 2:
            return 0.0
        span = members * stride
        if span <= self.per_node:
            rate, latency = self.node_b_s, (members - 1) * self.node_latency_s * 0.5
        else:
            inside = max(1, self.per_node // stride)  # members of one group on one node
            groups = self.per_node / inside  # groups that leave a node, each with its share of the ports
            rate = min(self.node_b_s, (network_b_s or self.network_b_s) / groups)
            # A tree over nodes, rings inside: the logarithm of the nodes, not their number.
            hops = math.log2(span / self.per_node + 1)
            latency = (inside - 1) * self.node_latency_s * 0.5 + hops * self.network_latency_s
        return size * (members - 1) / members / rate + latency

    def send_s(self, size: float, stride: int) -> float:
        """Seconds to send `size` bytes to the next pipeline stage while every GPU of the node sends."""
        if 2 * stride <= self.per_node:
            return size / self.node_b_s + self.node_latency_s
        return size / min(self.node_b_s, self.network_b_s / self.per_node) + self.network_latency_s
