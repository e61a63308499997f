"""The machine that a training runs on: a device and a fabric, by name or from a cluster profile, nothing assumed;
and the rates of compute that a training reaches, from the data sheet and the constants."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.cluster import ClusterProfile
from hpc_gpt.core.settings.devices import DEVICES, Device, known_devices
from hpc_gpt.core.tables import close_matches, read_toml
from hpc_gpt.planner.constants import VALUES

# Figures that [machine] must give for a device that is not in devices.toml.
_OF_A_DEVICE = ("memory_gib", "peak_tflops", "memory_gb_s", "node_gb_s", "host_gb_s")
# Four GPUs of a node are a board on which NVLink joins each pair directly, up to the generation of H100 and GH200:
# NVIDIA's white papers of V100 (hybrid mesh) and HGX A100 and H100 4-GPU. More of them are joined by a switch.
_BOARD, _BOARD_UP_TO = 4, 4
# Kinds in fabrics.toml that connect the GPUs of a node; all others connect nodes.
_INSIDE = ("nvlink", "pcie")
_RATE = re.compile(
    r"(?<![\w.])(?:(\d{1,3}) ?[xX] ?)?(\d{1,5}(?:\.\d{1,3})?) ?([gGtT])(B?)(?:b|bit|bps|bE|ps|bit/s|b/s|/s)?(?!\w)"
)
_PORTS = re.compile(r"(?<![\w.])(?:(\d{1,3}) ?[xX] ?)?([A-Za-z]{2,8}\d{0,3})(?!\w)")


@dataclass(frozen=True)
class Machine:
    """One kind of node, and the network between nodes.

    Rates are from data sheets, in one direction: `memory_gb_s` of a GPU's own memory, `node_gb_s` from a GPU to
    the others of its node, `network_gb_s` from a whole node to the others (0 without a network), `host_gb_s` between a
    GPU and the host. NVLink connects a node: if it spans several `hosts`, `gpus_per_node` and `network_gb_s` are for
    all of them, and `host_memory_gib` is for one; None: unknown. `switched`: a switch gives any two GPUs of a node
    all their links; without one each pair has links of its own. `power_w` is the card's limit, `full_power_w` the
    limit at which its peak is measured, if that is higher, `sustained` the share of the peak's clock that large
    products hold. `generation` of the matrix units, if the device's table states it.
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
    generation: str | None = None
    hosts: int = 1
    switched: bool = True


@dataclass(frozen=True)
class Fabric:
    """A fabric: `network_gb_s` of a whole node in one direction (GB/s of 1e9 bytes), 0 if it names only links inside a
    node. `inside` is nvlink or pcie if it names one, `generation` its generation if that is stated.
    """

    network_gb_s: float = 0.0
    network_latency_s: float = 0.0
    inside: str | None = None
    generation: int | None = None


def machine_of(profile: ClusterProfile) -> Machine:
    """The machine of a cluster profile: figures of its device and fabric, replaced by those in its [machine].

    Without a fabric nothing joins its nodes, and NVLink, if the device has it, else PCI Express joins a node's GPUs.
    ConfigError, with a hint on what to add, if the profile names no device.
    """
    figures = asdict(profile.machine) if profile.machine else {}
    given_figures = {key: value for key, value in figures.items() if value is not None}
    where = f"profile {profile.name}"
    if profile.device is None:
        raise ConfigError(
            profile.no_device,
            "choose another profile with --cluster (hpc-gpt profile list names them), or set in yours fabric and "
            f"device; {known_devices()}",
        )
    fabric = parse_fabric(profile.fabric) if profile.fabric is not None else Fabric()
    if profile.device in DEVICES:
        machine = joined(DEVICES[profile.device], profile.gpus_per_node, fabric)
    else:
        lacking = [key for key in _OF_A_DEVICE if key not in given_figures]
        if lacking:
            raise ConfigError(
                f"{where}: device {profile.device!r:.60} is not known, and [machine] lacks {', '.join(lacking)}",
                f"{known_devices(profile.device)}; or give these in [machine]",
            )
        machine = Machine(
            profile.device,
            gpus_per_node=profile.gpus_per_node,
            network_gb_s=fabric.network_gb_s,
            network_latency_s=fabric.network_latency_s,
            **{key: given_figures[key] for key in _OF_A_DEVICE},
        )
    return replace(machine, **given_figures)


def check_reach(machine: Machine, gpus: int) -> None:
    """Raises ConfigError if the GPUs are more than one node has, and the machine has no network."""
    if gpus > machine.gpus_per_node and machine.network_gb_s <= 0:
        raise ConfigError(
            f"{gpus} GPUs are more than the {machine.gpus_per_node} of a node, and the profile names no fabric "
            "between nodes",
            'name it in the profile, as fabric = "infiniband 8x200G" (ports of a node x Gbit/s), or network_gb_s in '
            f"[machine]; or plan for one node: --gpus {machine.gpus_per_node}",
        )


def check_dtype(dtype: str, machine: Machine) -> None:
    """Raises ConfigError if the device has no unit for the dtype, so that a step's time cannot be predicted."""
    if dtype not in machine.peak_tflops:
        dtypes = ", ".join(machine.peak_tflops)
        raise ConfigError(
            f"{machine.device} has no unit for train.dtype {dtype}", f"use --set train.dtype= one of: {dtypes}"
        )


def joined(device: Device, gpus_per_node: int, fabric: Fabric) -> Machine:
    """The machine with a fabric and `gpus_per_node` of a device on each host. ConfigError if they contradict."""
    hosts = max(1, (device.nvlink_gpus or 0) // gpus_per_node) if fabric.inside != "pcie" else 1
    inside = fabric.inside or ("nvlink" if device.nvlink else "pcie")
    if inside == "nvlink" and fabric.generation is None and device.nvlink is None:
        raise ConfigError(
            f"device {device.name} has no NVLink",
            'leave fabric out for one node, else name the network between nodes, as "pcie + infiniband 4x200G"',
        )
    generation = fabric.generation or (device.nvlink if inside == "nvlink" else None)
    is_board = inside == "nvlink" and (generation or 0) <= _BOARD_UP_TO and hosts == 1 and gpus_per_node == _BOARD
    node_gb_s = link_gb_s(inside, generation) if generation else (device.node_gb_s or device.host_gb_s)
    if inside == "nvlink" and device.node_gb_s and fabric.generation in (None, device.nvlink):
        node_gb_s = device.node_gb_s
    shared_fields = ("memory_gib", "memory_gb_s", "host_gb_s", "power_w", "full_power_w", "sustained", "generation")
    return Machine(
        device=device.name,
        peak_tflops=dict(device.peaks),
        gpus_per_node=gpus_per_node * hosts,
        node_gb_s=node_gb_s,
        network_gb_s=fabric.network_gb_s * hosts,
        node_latency_s=float(_kinds()[inside]["latency_s"]),
        network_latency_s=fabric.network_latency_s,
        hosts=hosts,
        switched=not is_board,
        **{name: getattr(device, name) for name in shared_fields},
    )


@functools.cache
def parse_fabric(text: str) -> Fabric:
    """The fabric that a text names: `KIND NxRATEG` (ports of a node x Gbit/s of each), `KIND RATEG` (the whole node's),
    `nvlink`, `pcie`, or several of these with `+` between. ConfigError for anything else.

    >>> parse_fabric("omni-path 4x100G").network_gb_s
    50.0
    """
    fabric = Fabric()
    for part in re.split(r"[+,]", text.replace("\N{MULTIPLICATION SIGN}", "x")):
        kind, _, rate = part.strip().partition(" ")
        name, generation = _named(kind.lower().replace("_", "-"), text)
        if name in _INSIDE:
            fabric = replace(fabric, inside=name, generation=generation or fabric.generation)
        else:
            gb_s = fabric.network_gb_s + _node_gb_s(name, rate, text)
            fabric = replace(fabric, network_gb_s=gb_s, network_latency_s=float(_kinds()[name]["latency_s"]))
    return fabric


def link_gb_s(inside: str, generation: int) -> float:
    """GB/s of one GPU in one direction over its NVLinks or 16 PCI Express lanes of that generation. ConfigError for an
    unknown generation."""
    rates = _kinds()[inside]["generations"]
    if str(generation) not in rates:
        raise ConfigError(f"{inside} generation {generation} is unknown", f"known: {', '.join(rates)}")
    return float(rates[str(generation)])


@functools.cache
def _kinds() -> dict[str, Any]:
    return read_toml(Path(__file__).with_name("fabrics.toml"))


def _named(kind: str, text: str) -> tuple[str, int | None]:
    """Returns (name of the kind in fabrics.toml, generation in `kind`, if any). ConfigError for an unknown kind."""
    plain, digits = kind.rstrip("0123456789"), kind[len(kind.rstrip("0123456789")) :]
    for name, table in _kinds().items():
        if kind == name or kind in table.get("aliases", ()):
            return name, None
        if plain == name and name in _INSIDE:
            return name, int(digits[:3])
    kinds = list(_kinds())
    raise ConfigError(
        f"fabric {text!r:.80}: kind {kind!r:.40} is unknown",
        close_matches(kind, kinds) or f'write KIND NxRATEG, as "infiniband 4x200G"; kinds: {", ".join(kinds)}',
    )


def _node_gb_s(name: str, rate: str, text: str) -> float:
    """GB/s of a node, from the first rate in the text after the kind, else from the first port of known rate."""
    numbers, names = _RATE.search(rate), _kinds()[name]["ports"]
    ports = next((match for match in _PORTS.finditer(rate) if match[2].lower() in names), None)
    if numbers:
        port_gbit_s = float(numbers[2]) * (1000 if numbers[3] in "tT" else 1) * (8 if numbers[4] else 1)
        gbit_s = int(numbers[1] or 1) * port_gbit_s
    elif ports:
        gbit_s = int(ports[1] or 1) * float(names[ports[2].lower()])
    else:
        gbit_s = 0.0
    if gbit_s <= 0:
        raise ConfigError(
            f"fabric {text!r:.80} has no rate", f'give the ports of a node and their Gbit/s, as "{name} 4x200G"'
        )
    return gbit_s / 8


_TILE: float = VALUES["passes.tile"]  # rows and columns of a product's tile; a smaller tile at the edge takes as long


@dataclass(frozen=True)
class Constants:
    """Constants that no data sheet gives: each is a share of a data sheet's rate, or seconds.

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

    gemm: float = field(default=VALUES["machine.gemm"], metadata={"spread": 0.08, "most": 0.98})
    memory: float = field(default=VALUES["machine.memory"], metadata={"spread": 0.15, "most": 1.0})
    attention: float = field(default=VALUES["machine.attention"], metadata={"spread": 0.25, "most": 1.5})
    host_s: float = field(default=VALUES["machine.host_s"], metadata={"spread": 0.6})
    node: float = field(default=VALUES["machine.node"], metadata={"spread": 0.25, "most": 1.2})
    network: float = field(default=VALUES["machine.network"], metadata={"spread": 0.3, "most": 1.2})
    latency: float = field(default=VALUES["machine.latency"], metadata={"spread": 0.6})
    exposed: float = VALUES["machine.exposed"]  # not fitted: a step's time hardly distinguishes it from the rates
    reduction: float = field(default=VALUES["machine.reduction"], metadata={"spread": 0.5, "most": 1.2})
    step_s: float = field(default=VALUES["machine.step_s"], metadata={"spread": 0.8})


DEFAULT = Constants()


def constants_from(tables: Mapping[str, float]) -> Constants:
    """The constants of a profile. Unknown names are ignored, missing ones get their default. ConfigError for a value
    that is not above 0."""
    names = {entry.name for entry in fields(Constants)}
    constants = {name: value for name, value in tables.items() if name in names}
    for name, value in constants.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"calibration.constants.{name} is {value}, but must be above 0", "calibrate anew")
    return Constants(**constants)


class Rates:
    """A device's rates under `constants` for one training, in FLOP/s and bytes/s.

    `flops`: large products in 16 bits (or the dtype's); `layer_flops`: products in a layer, in the training's
    format, whose operands have `operand` bytes; `grouped`: the part of it that experts' products reach. `forward`,
    `backward`: attention that keeps no scores, over long sequences.
    """

    def __init__(self, machine: Machine, constants: Constants, training: Training) -> None:
        peaks, dtype, matmul = machine.peak_tflops, training.dtype, training.matmul
        peak = (
            peaks.get(dtype)
            or peaks.get("fp16" if dtype == "bf16" else "bf16")
            or peaks.get("fp32")
            or max(peaks.values(), default=1.0)
        )
        generation = generation_of(machine)
        if dtype == "fp32" and training.tf32 and "bf16" in peaks:
            peak = max(peak, peaks["bf16"] / 2)  # TF32's rate in NVIDIA's data sheets, from Ampere on
        scale = 1e12 * _limit(machine) * constants.gemm / DEFAULT.gemm
        self.flops = (
            peak * scale * _achievable(machine, generation, "bf16", peak) * VALUES[f"products.{generation}.none"]
        )
        self.layer_flops, self.operand = self.flops, 2.0
        if matmul != "none":
            bits = "fp4" if matmul == "nvfp4" else "fp8"
            low = peaks.get(bits) or peaks.get("fp8") or peak
            share = VALUES.get(f"products.{generation}.{matmul}") or VALUES[f"products.{generation}.none"]
            self.layer_flops = low * scale * _achievable(machine, generation, bits, low) * share
            self.operand = 0.5 if bits == "fp4" else 1.0
        self.grouped = float(VALUES.get(f"experts.eight_bits.{generation}", 1.0)) if matmul != "none" else 1.0
        copies = float(VALUES.get(f"bandwidth.{generation}.copies", 1.0))
        self.bytes = machine.memory_gb_s * 1e9 * constants.memory * copies
        kernel = "fa2" if training.mask == "layers" else _kernel(training.attention, generation)  # flash takes none
        shares = (
            VALUES.get(f"kernels.{kernel.removesuffix('-fp8')}.{generation}") or VALUES[f"kernels.fa2.{generation}"]
        )
        faster = VALUES["attention.eight_bits"] if kernel.endswith("-fp8") else 1.0
        if peaks.get("fp4", 0.0) > 2.5 * peaks.get("fp8", 0.0):
            faster *= VALUES["kernels.ultra.faster"]
        scale = peak * 1e12 * _limit(machine) * constants.attention / DEFAULT.attention * faster
        self.forward, self.backward = (scale * share for share in shares)
        self.plain = min(self.flops, (peaks.get("fp32") or peak / 16) * 1e12 * VALUES["passes.off_units"])

    def product_s(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Seconds of `batch` products of m x k by k x n in 16 bits."""
        return self._product_s(m, n, k, batch, self.flops, 2.0)

    def layer_product_s(self, m: float, n: float, k: float) -> float:
        """Seconds of a product of m x k by k x n in the format of a layer's products."""
        return self._product_s(m, n, k, 1.0, self.layer_flops, self.operand)

    def _product_s(self, m: float, n: float, k: float, batch: float, flops: float, operand: float) -> float:
        tiled = math.ceil(m / _TILE) * math.ceil(n / _TILE) * (_TILE * _TILE)
        return batch * (2 * tiled * k / flops + (2 * m * n + operand * (n * k + m * k)) / self.bytes)


def generation_of(machine: Machine) -> str:
    """The generation of a device's matrix units: the stated one, else NVIDIA's, by their narrowest format."""
    if machine.generation is not None:
        return machine.generation
    names = {"fp4": "blackwell", "fp8": "hopper", "bf16": "ampere"}
    return next((name for bits, name in names.items() if bits in machine.peak_tflops), "volta")


def _kernel(attention: str, generation: str) -> str:
    """The attention kernel that runs; some are chosen only at run time.

    On Hopper and newer PyTorch's SDPA takes cuDNN's kernel if cuDNN is above 9.15, as PyTorch brings along from 2.11
    on; before, but for 2.5.0, FlashAttention-2 (pytorch, sdp_utils.cpp, check_prefer_cudnn_attention; pytorch#138522,
    transformers#48163). `sdpa` is FlashAttention-2, with which the published tables ran.
    """
    if attention == "te":
        return "cudnn" if generation in ("hopper", "blackwell") else "fa2"
    return "fa2" if attention in ("sdpa", "unfused") else attention


def _achievable(machine: Machine, generation: str, bits: str, peak: float) -> float:
    """The share of the peak that the best product reaches: the published one, else estimated from the card's power."""
    if (published := VALUES.get(f"achievable.{bits}.{machine.device}")) is not None:
        return float(published)
    most = float(VALUES["power.most"])
    alike = VALUES.get(f"power.{generation}.{bits}")
    if machine.power_w is None or machine.sustained is not None or alike is None:
        return most * (machine.sustained or 1.0)
    power_w, alike_peak, share = alike
    per_tflop = (machine.full_power_w or machine.power_w) / peak
    return min(most, float(share * (per_tflop * alike_peak / power_w) ** VALUES["power.exponent"]))


def _limit(machine: Machine) -> float:
    """The share of the clock that remains under a power limit below the die's own."""
    if machine.power_w is None or machine.full_power_w is None:
        return 1.0
    return float((machine.power_w / machine.full_power_w) ** VALUES["power.exponent"])
