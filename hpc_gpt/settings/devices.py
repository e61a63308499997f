"""Accelerators by name, as devices.toml has them: memory, links, and the dense peak for each dtype.

A peak is in TFLOP/s of one GPU, without structured sparsity, at the precision the matrix units take in.
An unknown device, or a dtype a device has no unit for, has no peak; nothing is assumed in its place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_gpt.tables import read_toml

_FILE = Path(__file__).with_name("devices.toml")


@dataclass(frozen=True)
class Device:
    """One accelerator. `peaks` maps fp32, tf32, fp16, bf16, fp8 to dense TFLOP/s; `source` says who says so.

    Rates are in one direction, in GB/s of 1e9 bytes. `nvlink` is a generation, None without one: then `node_gb_s`
    joins ranks, or the host's link. `nvlink_gpus` is how many GPUs NVLink joins if a node has fewer. `nominal`
    figures are for tests. `full_power_w` is what the die takes for its peak if the card's limit is below that;
    `sustained` the part of the peak's clock that large products hold, if measured.
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
    full_power_w: float | None = None
    sustained: float | None = None


class _Devices(Mapping[str, Device]):
    """Every device by its name. The file is read when one is first asked for."""

    @functools.cached_property
    def _read(self) -> dict[str, Device]:
        return {name: Device(name=name, **table) for name, table in read_toml(_FILE).items()}

    def __getitem__(self, name: str) -> Device:
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


DEVICES = _Devices()


# What torch.cuda.get_device_name or nvidia-smi call them, most telling part first. A PCIe card is another device.
_PRODUCT_NAMES = (
    ("V100-SXM2-16GB", "v100-16g"),
    ("V100-SXM2-32GB", "v100-32g"),
    ("V100-SXM3-32GB", "v100-32g"),
    ("A100-SXM4-40GB", "a100-40g"),
    ("A100-SXM4-80GB", "a100-80g"),
    ("A100-SXM-80GB", "a100-80g"),
    ("H100 80GB HBM3", "h100-80g"),
    ("H100-SXM5-80GB", "h100-80g"),
    ("NVIDIA H200", "h200"),
    ("GB200", "gb200"),
    ("GB300", "gb300"),
    ("NVIDIA B200", "b200"),
    ("NVIDIA B300", "b300"),
)


def device_named(product: str) -> str | None:
    """Our name for what the driver calls a GPU, None if it is not in the table.

    >>> device_named("Tesla V100-SXM2-32GB")
    'v100-32g'
    """
    if product in DEVICES:
        return product
    if "NVL" in product or "PCIE" in product.upper():
        return None
    return next((name for part, name in _PRODUCT_NAMES if part in product), None)


def peak_tflops(device: str | None, dtype: str) -> float | None:
    """Dense peak of one GPU in TFLOP/s for a dtype (fp32, tf32, fp16, bf16, fp8); None if it is not known."""
    known = DEVICES.get(device or "")
    return known.peaks.get(dtype) if known and not known.nominal else None
