"""Stand-ins for a machine with AMD's GPUs: the kernel's folders, and the tools with the answers that ROCm 6 and 7
document."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.programs import put

GIB = 2**30
# The two dies of an MI250X: the second has no power of its own, which the driver shows as 0.
MODULE = (
    {"unique_id": "1f9de0957d137942", "hwmon/hwmon3/power1_average": 412_000_000},
    {"unique_id": "2a00e0957d13794b", "hwmon/hwmon3/power1_average": 0},
)
_FILES = {
    "vendor": "0x1002", "device": "0x7408", "gpu_busy_percent": 97, "product_name": "AMD INSTINCT MI200 (MCM) OAM LC",
    "mem_info_vram_total": 68_702_699_520, "mem_info_vram_used": 40 * GIB,
    "pp_dpm_sclk": "0: 500Mhz\n1: 1700Mhz *", "hwmon/hwmon3/temp1_input": 44_000, "hwmon/hwmon3/temp2_input": 61_000,
}  # fmt: skip


def amd_sysfs(folder: Path, *gpus: Mapping[str, object]) -> Path:
    """A folder in the place of /sys, in which card0 is the node's console and the GPUs follow, the last first on the
    bus; a file named in one of `gpus` has that text."""
    for name, text in {"vendor": "0x1a03", "device": "0x2000"}.items():
        _put(folder / "class/drm/card0/device" / name, text)
    (folder / "class/drm/card1-DP-1/device").mkdir(parents=True)
    for place, gpu in enumerate(gpus):
        device = folder / f"class/drm/card{len(gpus) - place}/device"
        files = {**_FILES, "uevent": f"DRIVER=amdgpu\nPCI_SLOT_NAME=0000:C{place}:00.0", **gpu}
        for name, text in files.items():
            _put(device / name, text)
    return folder


def _put(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if text is not None:
        path.write_text(f"{text}\n")


def put_amd_smi(folder: Path, rocm: int, *gpus: Mapping[str, Any]) -> None:
    """amd-smi as of ROCm 6 or 7: `static --json` prints a list, or a table that has it as gpu_data."""
    listed = [
        {
            "gpu": number,
            "asic": {"market_name": "AMD Instinct MI300X", "vendor_id": "0x1002", "device_id": "0x74a1",
                     "asic_serial": f"0x5B00{number:012X}", "oam_id": number, **gpu},
            "bus": {"bdf": f"0000:{5 + number:02X}:00.0", "max_pcie_width": 16},
            "driver": {"name": "amdgpu", "version": "6.12.12"},
            "vram": {"type": "HBM", "vendor": "N/A", "size": {"value": 196592, "unit": "MB"}},
        }
        for number, gpu in enumerate(gpus)
    ]  # fmt: skip
    put_json(folder / "amd-smi", listed if rocm < 7 else {"gpu_data": listed})


def put_json(program: Path, answer: object, before: str = "", code: int = 0) -> None:
    text = json.dumps(answer, indent=4)
    put(program, f"#!/bin/sh\ncat <<'E'\n{before}{text}\nE\nexit {code}\n")
