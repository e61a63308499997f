"""Accelerators by name, and their dense peak for each dtype.

A peak is in TFLOP/s of one GPU, without structured sparsity (datasheets often print twice that), at the
precision the matrix units take in: `fp32` is plain fp32, which PyTorch multiplies in unless TF32 is allowed.
An unknown device, or a dtype a device has no unit for, has no peak; nothing is assumed in its place.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One accelerator. `peaks` maps fp32, tf32, fp16, bf16, fp8 to dense TFLOP/s; `source` says who says so."""

    name: str
    memory_gb: int
    peaks: dict[str, float]
    source: str


# V100 has no bf16 and no TF32 unit. Its 16 GB card was announced at 120 (so seed 001 has it) and is listed at 125.
_V100 = {"fp32": 15.7, "fp16": 125.0}
_A100 = {"fp32": 19.5, "tf32": 156.0, "fp16": 312.0, "bf16": 312.0}
_HOPPER = {"fp32": 66.9, "tf32": 494.7, "fp16": 989.4, "bf16": 989.4, "fp8": 1978.9}
_B200 = {"fp32": 75.0, "tf32": 1125.0, "fp16": 2250.0, "bf16": 2250.0, "fp8": 4500.0}
_GB200 = {"fp32": 80.0, "tf32": 1250.0, "fp16": 2500.0, "bf16": 2500.0, "fp8": 5000.0}

_V100_SOURCE = "NVIDIA V100 datasheet (2020), column SXM2"
_A100_SOURCE = "NVIDIA A100 datasheet (2021), column SXM"
_H100_SOURCE = "NVIDIA H100 architecture white paper v1.04, table 3, SXM5, without sparsity"

DEVICES = {
    device.name: device
    for device in (
        Device("v100-16g", 16, _V100, _V100_SOURCE),
        Device("v100-32g", 32, _V100, _V100_SOURCE),
        Device("a100-40g", 40, _A100, _A100_SOURCE),
        Device("a100-80g", 80, _A100, _A100_SOURCE),
        Device("h100-80g", 80, _HOPPER, _H100_SOURCE),
        # The same die under a lower power limit: the figure stands, at clocks the limit rarely allows.
        Device("h100-96g-500w", 96, _HOPPER, _H100_SOURCE + "; the card's 500 W limit is not in it"),
        Device("h200", 141, _HOPPER, "NVIDIA H200 datasheet (2024), column SXM, halved: it prints sparsity"),
        Device("b200", 180, _B200, "NVIDIA HGX B200 datasheet (2024), one eighth, halved: it prints sparsity"),
        Device("gb200", 186, _GB200, "NVIDIA GB200 NVL72 datasheet (2024), one of 72, halved: it prints sparsity"),
        Device("b300", 288, _B200, "NVIDIA HGX B300 datasheet (2025), one eighth, halved: it prints sparsity"),
        Device("gb300", 288, _GB200, "NVIDIA GB300 NVL72 datasheet (2025), one of 72, halved: it prints sparsity"),
    )
}

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
    """Our name for what the driver calls a GPU, None where it is not in the table.

    >>> device_named("Tesla V100-SXM2-32GB")
    'v100-32g'
    """
    if product in DEVICES:
        return product
    if "NVL" in product or "PCIE" in product.upper():
        return None
    return next((name for part, name in _PRODUCT_NAMES if part in product), None)


def peak_tflops(device: str | None, dtype: str) -> float | None:
    """Dense peak of one GPU in TFLOP/s for a dtype (fp32, tf32, fp16, bf16, fp8); None where it is not known."""
    known = DEVICES.get(device or "")
    return known.peaks.get(dtype) if known else None
