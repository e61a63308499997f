"""What a training reaches of a machine's data sheet: constants, and the rates of compute and links under them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.machine import Machine

# W per TFLOP/s of peak under which a card's power holds its clock down (an A100's, which keeps its clock in products),
# and how the clock follows power there. Source: H100 at 500 and 700 W, torchtitan's and Megatron-LM's tables.
_COOL_W = 1.28
_CLOCK = 0.2
# How the clock follows a limit set below the die's own: near the lowest voltage it falls almost as power does.
_LIMITED = 0.6
_TILE = 128  # rows and columns of a product's tile: a part of one takes as long (cuBLAS, CUTLASS)
# Attention's products whose width is not a multiple of 8 leave the matrix units; this part of the fp32 rate is left.
# Source: BigScience's chronicles-prequel.md, 150 against 128 wide heads.
_OFF_UNITS = 0.4
# If nothing is known to join nodes but a group needs it: slow, finite, so that such a layout is ranked last.
_NO_NETWORK_GB_S = 0.1


@dataclass(frozen=True)
class Constants:
    """What data sheets do not say: each is a share of a data sheet's rate, or seconds.

    `gemm`: large products over the peak. `memory`: passes over activations against memory bandwidth.
    `attention`: fused attention's rate over that of large products. `host_s`: what the host needs to launch one pass
    over one layer. `node`, `network`: what collectives reach of a link, in a node and between nodes. `latency`: times
    the links' latency a hop of a collective takes. `exposed`: the part of communication that compute could hide and
    does not. `reduction`: what reducing gradients and gathering sharded parameters reach of the network, when every
    node sends. `step_s`: seconds of a step beside all that (data, logs, the stops of clipping and scaling).

    A default is for any machine of which only the data sheet is known; calibration moves them to rows of one cluster.
    """

    gemm: float = 0.765
    memory: float = 0.88
    attention: float = 0.43
    host_s: float = 1.1e-3
    node: float = 0.75
    network: float = 0.75
    latency: float = 1.1
    exposed: float = 0.22
    reduction: float = 0.60
    step_s: float = 0.025


DEFAULT = Constants()
# How far a constant may be from its default: the standard deviation of its logarithm, against which rows are weighed.
SPREAD = Constants(
    gemm=0.08,
    memory=0.15,
    attention=0.25,
    host_s=0.6,
    node=0.25,
    network=0.3,
    latency=0.6,
    exposed=0.6,
    reduction=1.0,
    step_s=0.8,
)


def constants_from(tables: Mapping[str, float]) -> Constants:
    """Constants as a profile stores them, without those that this version does not know, and with defaults for those
    that it lacks. ConfigError for one that is not above 0."""
    names = {entry.name for entry in fields(Constants)}
    known = {name: value for name, value in tables.items() if name in names}
    for name, value in known.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"calibration.constants.{name} is {value}, but must be above 0", "calibrate anew")
    return Constants(**known)


class Rates:
    """A device's rates under `constants`, for one dtype. FLOP/s and bytes/s."""

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
    """The part of the peak's clock that a card holds in large products."""
    if machine.power_w is None:
        return 1.0 if machine.sustained is None else machine.sustained
    full = machine.full_power_w or machine.power_w
    own = machine.sustained or min(1.0, float((full / peak / _COOL_W) ** _CLOCK))
    return own * float((machine.power_w / full) ** _LIMITED)


class Links:
    """The links of a machine, as collectives and sends reach them under `constants`.

    Ranks are laid out tp fastest, then dp, pp, so the members of a group are `stride` ranks apart. A ring carries
    (n-1)/n of a buffer over each member's link once for a gather or a reduce-scatter, twice for an all-reduce; between
    nodes all groups that cross from the same node share its ports.
    Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms"; nccl-tests, PERFORMANCE.md (bus
    bandwidth).
    """

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
            # Trees over nodes, rings inside: the logarithm of the nodes, not their number.
            latency = (inside - 1) * self.node_latency_s * 0.5 + math.log2(span / self.per_node + 1) * (
                self.network_latency_s
            )
        return size * (members - 1) / members / rate + latency

    def send_s(self, size: float, stride: int) -> float:
        """Seconds to send `size` bytes to the next pipeline stage, every GPU of the node at once."""
        if 2 * stride <= self.per_node:
            return size / self.node_b_s + self.node_latency_s
        return size / min(self.node_b_s, self.network_b_s / self.per_node) + self.network_latency_s
