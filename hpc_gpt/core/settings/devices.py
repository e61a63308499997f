"""The table of accelerators in devices.toml: memory, peaks and links."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.core.tables import close_matches, read_toml

_DEVICES_FILE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True)
class Device:
    """One accelerator.

    `peaks` maps fp32, tf32, fp16, bf16, fp8 to dense TFLOP/s of one GPU, without structured sparsity, at the input
    precision of the matrix units; a dtype without such a unit has no peak. `source` is the origin of the figures. Rates
    are in one direction, in GB/s of 1e9 bytes. `nvlink` is the generation of NVLink; without it the GPUs of a node
    communicate at `node_gb_s`, or at the host's rate; with it, `node_gb_s` is the rate of a card with fewer links than
    usual. `nvlink_gpus` is the number of GPUs that NVLink joins, if more than a node has. `nominal` figures are for
    tests. `cuda`: whether our own kernels support it. `full_power_w` is the die's power at its peak if the card's limit
    is below it. `sustained` is the measured share of the peak's clock that large matrix products sustain. `products`
    are parts of the name that torch.cuda.get_device_name or nvidia-smi prints. `pci` are its numbers as a PCI device,
    for GPUs whose tools print the name of a board. `generation` is that of the matrix units, if NVIDIA did not make it.
    """

    name: str
    memory_gib: float
    peaks: Mapping[str, float]
    memory_gb_s: float
    host_gb_s: float
    power_w: float
    source: str
    nvlink: int | None = None
    nvlink_gpus: int | None = None
    node_gb_s: float | None = None
    nominal: bool = False
    cuda: bool = True
    full_power_w: float | None = None
    sustained: float | None = None
    products: Sequence[str] = ()
    pci: Sequence[str] = ()
    generation: str | None = None


DEVICES = {name: Device(name=name, **table) for name, table in read_toml(_DEVICES_FILE).items()}


def is_amd(device: str | None) -> bool:
    """Whether a device is an AMD Instinct, also one that the table lacks.

    >>> is_amd("mi250x"), is_amd("mi430x"), is_amd("h200"), is_amd(None)
    (True, True, False, False)
    """
    return re.match(r"mi\d{2,}", device or "") is not None


def build_for(device: str | None) -> str | None:
    """The part of torch.version that a build of PyTorch for this device has; None if the device is not known.

    >>> build_for("mi250x"), build_for("h200"), build_for("max-1550"), build_for("cpu"), build_for("tpu")
    ('hip', 'cuda', 'xpu', None, None)
    """
    if is_amd(device):
        return "hip"
    if (device or "").startswith("max-"):  # Intel's Data Center GPU Max
        return "xpu"
    row = DEVICES.get(device or "")
    return "cuda" if row is not None and row.cuda and device != "cpu" else None


def device_named(product: str) -> str | None:
    """Our name of a GPU, from that name or the driver's; None if it is not in the table. What a user types is
    also given in lower case; a log's `GH200` may be one of several.

    >>> device_named("Tesla V100-SXM2-32GB"), device_named("h100-80g")
    ('v100-32g', 'h100-80g')
    """
    if product in DEVICES:
        return product
    is_card = "NVL" in product or "PCIE" in product.upper()
    for name, device in DEVICES.items():
        for part in device.products:
            # Whole words: an L40 is not an L4, and a card whose name continues with a D is a smaller one.
            is_its = re.search(rf"{re.escape(part)}(?![\w-]| D$)", product)
            if is_its and (not is_card or "NVL" in part or "PCI" in part):
                return name
    return None


def known_devices(name: str = "") -> str:
    """The hint for a device that the table lacks: the names near to it, and those of the same maker."""
    makers = [build_for(name.lower()) or "cuda"] if name else ["cuda", "hip", "xpu"]
    names = [device.name for device in DEVICES.values() if not device.nominal]
    of_maker = ", ".join(device for device in names if build_for(device) in makers)
    return f"{close_matches(name, names)} known: {of_maker}".strip()


def product_of_pci(number: str) -> str | None:
    """The product with a number of a PCI device (hexadecimal, with or without 0x); None if none in the table has it.

    >>> product_of_pci("0x7408")
    'MI250X'
    """
    digits = number.lower().removeprefix("0x")
    return next((device.products[0] for device in DEVICES.values() if digits in device.pci), None)


def units_of(dtype: str | None, matmul: str | None) -> str | None:
    """The dtype of the device's peak that mfu and hfu refer to: the format of the layers' products, which is `matmul`
    unless that is "none" or None.

    >>> units_of("bf16", "none"), units_of("bf16", "mxfp8"), units_of("bf16", "nvfp4")
    ('bf16', 'fp8', 'fp4')
    """
    return dtype if matmul in (None, "none") else "fp4" if matmul == "nvfp4" else "fp8"


def peaks_of(device: str | None, stated: Mapping[str, float] | None) -> Mapping[str, float]:
    """The peaks of a profile's device from its `[machine]`, else from our table; empty if neither has them."""
    row = DEVICES.get(device or "")
    return stated or (row.peaks if row is not None and not row.nominal else {})


def peak_tflops(device: str | None, dtype: str) -> float | None:
    """Dense peak of one GPU in TFLOP/s for a dtype (fp32, tf32, fp16, bf16, fp8); None if it is not known."""
    row = DEVICES.get(device or "")
    return row.peaks.get(dtype) if row and not row.nominal else None
