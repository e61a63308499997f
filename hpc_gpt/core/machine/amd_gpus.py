"""AMD's GPUs of this machine: listed by amd-smi, else by rocm-smi, else by the kernel, which also gives their figures.

The kernel's driver amdgpu shows each GPU, a die of an MI250X too, as a device below /sys/class/drm
(docs.kernel.org/gpu/amdgpu/driver-misc.html and thermal.html). HPC_GPT_SYSFS takes the place of /sys.
"""

import contextlib
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from hpc_gpt.core.formulas import GIB
from hpc_gpt.core.machine.gpu_figures import GpuFigures
from hpc_gpt.core.process import run_in_time
from hpc_gpt.core.settings.devices import product_of_pci

T = TypeVar("T")
_VENDOR = "0x1002"
_RENDER_NODES = Path("/dev/dri")
_CARD = re.compile(r"card\d+")  # others are a card's connectors, as card0-DP-1
_AMD_SMI = ("amd-smi", "static", "--asic", "--vram", "--driver", "--bus", "--json")
_ROCM_SMI = ("rocm-smi", *("--showproductname", "--showuniqueid", "--showbus"), "--showmeminfo", "vram")
_UNITS = {"B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30}


class ClockedFigures(NamedTuple):
    """A GPU's figures, and the clock of its compute units in MHz; None if the driver does not show it."""

    figures: GpuFigures
    clock_mhz: float | None


def list_amd_gpus(limit_s: float) -> list[dict[str, Any]]:
    """`name, memory_gib, driver, index, uuid` of each GPU, as of NVIDIA's (`core.runs.provenance`). A tool that does
    not answer within `limit_s`, or that lists no GPU, is passed over.

    The UUID is the one that HIP takes, GPU- and 16 digits. Partitions of a GPU share it, so they have their place on
    the PCI bus instead, and so has a GPU without one. ROCR_VISIBLE_DEVICES hides GPUs from all programs; HIP counts
    the others.
    """
    cards = _by_amd_smi(limit_s) or _by_rocm_smi(limit_s) or [_card_of(device) for device in _devices()]
    times = Counter(card["uuid"] for card in cards)
    cards = _shown(cards, [card["uuid"] for card in cards], "ROCR_VISIBLE_DEVICES")
    for index, card in enumerate(cards):
        bus = card.pop("bus")
        card["index"] = str(index)
        if not card["uuid"] or times[card["uuid"]] > 1:
            card["uuid"] = bus
    return cards


def hip_variable() -> str:
    """The variable that chooses a process's GPUs by number: CUDA's, but where HIP runs its own wins, if it is set."""
    is_hips = "HIP_VISIBLE_DEVICES" in os.environ and shutil.which("nvidia-smi") is None
    return "HIP_VISIBLE_DEVICES" if is_hips else "CUDA_VISIBLE_DEVICES"


def shown_devices() -> list[Path]:
    """The kernel's folders of the GPUs that this process may use, in HIP's order: ROCR_VISIBLE_DEVICES chooses first,
    `hip_variable` among the rest (ROCm, "GPU isolation techniques")."""
    devices = _devices()
    for variable in ("ROCR_VISIBLE_DEVICES", hip_variable()):
        devices = _shown(devices, [_uuid(_line(path, "unique_id")) for path in devices], variable)
    return devices


def _shown(gpus: list[T], uuids: Sequence[str], variable: str) -> list[T]:
    """The GPUs that a variable names, by numbers or UUIDs; all without it. Names after one that HIP does not know do
    not count."""
    if variable not in os.environ:
        return gpus
    shown = list[T]()
    for name in os.environ[variable].split(","):
        name = name.strip()
        if name.isdecimal() and int(name) < len(gpus):
            shown.append(gpus[int(name)])
        elif name in uuids and name:
            shown.append(gpus[uuids.index(name)])
        else:
            break
    return shown


def read_device(device: Path) -> ClockedFigures:
    """The figures of the GPU whose folder the kernel shows. The second die of an MI250X has no power of its own: the
    driver shows 0 W, and the first die's are the module's."""
    sensors = next(iter(sorted(device.glob("hwmon/hwmon*"))), device)
    in_use, in_all = _number(device, "mem_info_vram_used"), _number(device, "mem_info_vram_total")
    microwatts = _number(sensors, "power1_average") or _number(sensors, "power1_input")
    # The sensor at the hottest point, else the one at the die's edge, which an MI300 has not.
    heat = _number(sensors, "temp2_input") or _number(sensors, "temp1_input")
    clock = re.search(r"(\d+) ?mhz ?\*", _text(device, "pp_dpm_sclk").lower())
    figures = GpuFigures(
        util=_number(device, "gpu_busy_percent"),
        memory_gib=None if in_use is None else round(in_use / GIB, 1),
        total_gib=None if in_all is None else round(in_all / GIB, 1),
        power_w=round(microwatts / 1e6) if microwatts else None,
        temperature_c=round(heat / 1000) if heat else None,
    )
    return ClockedFigures(figures, float(clock[1]) if clock else None)


def _devices() -> list[Path]:
    """The folders of the AMD GPUs that this process can open, by their places on the PCI bus, as HIP orders them. The
    kernel shows all of the machine; those of another job are closed by the job's cgroup."""
    folder = Path(os.environ.get("HPC_GPT_SYSFS") or "/sys") / "class/drm"
    with contextlib.suppress(OSError):
        devices = [path / "device" for path in folder.iterdir() if _CARD.fullmatch(path.name)]
        gpus = (path for path in devices if _line(path, "vendor") == _VENDOR and _number(path, "mem_info_vram_total"))
        return sorted(filter(_opens, gpus), key=lambda path: (_bus(path), path.parent.name))
    return []


def _opens(device: Path) -> bool:
    """Whether this process can open a GPU's render node, if it has one."""
    for node in device.glob("drm/renderD*"):
        try:
            os.close(os.open(_RENDER_NODES / node.name, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            return False
    return True


def _card_of(device: Path) -> dict[str, Any]:
    total, module = _number(device, "mem_info_vram_total"), device / "driver/module"
    return _card(
        _line(device, "device"), _line(device, "product_name"), total, _line(module, "version"),
        _line(device, "unique_id"), _bus(device),
    )  # fmt: skip


def _by_amd_smi(limit_s: float) -> list[dict[str, Any]]:
    """ROCm 6 prints a list, ROCm 7 (amd-smi 26) a table with the same list as gpu_data."""
    answer = _json_of(limit_s, *_AMD_SMI)
    listed = answer.get("gpu_data") if isinstance(answer, dict) else answer
    cards = []
    for gpu in listed if isinstance(listed, list) else []:
        asic, vram, driver, bus = (_table(gpu, key) for key in ("asic", "vram", "driver", "bus"))
        size = _table(vram, "size")
        value, unit = str(size.get("value")), str(size.get("unit")).upper()
        total = float(value) * _UNITS.get(unit, 2**20) if _is_number(value) else None
        number, name = str(asic.get("device_id", "")), str(asic.get("market_name", ""))
        if number or name:
            version = str(driver.get("version", driver.get("driver_version", "")))
            serial, place = str(asic.get("asic_serial", "")), str(bus.get("bdf", ""))
            cards.append(_card(number, name, total, version, serial, place.lower()))
    return cards


def _by_rocm_smi(limit_s: float) -> list[dict[str, Any]]:
    answer = _json_of(limit_s, *_ROCM_SMI, "--showdriverversion", "--json")
    cards, tables = [], answer if isinstance(answer, dict) else {}
    driver = str(_table(tables, "system").get("Driver version", ""))
    names = sorted((name for name in tables if _CARD.fullmatch(name)), key=lambda name: int(name[len("card") :]))
    for name in names:
        # Keys are written differently by versions: "Card series" and "Card Series".
        gpu = {str(key).lower(): str(value) for key, value in _table(tables, name).items()}
        total = gpu.get("vram total memory (b)", "")
        numbers = [gpu.get(key, "") for key in ("device id", "card model", "gpu id")]
        number = next((number for number in numbers if number.startswith("0x")), "")
        cards.append(
            _card(
                number, gpu.get("card series", ""), float(total) if _is_number(total) else None, driver,
                gpu.get("unique id", ""), gpu.get("pci bus", "").lower(),
            )
        )  # fmt: skip
    return cards


def _card(number: str, name: str, total: float | None, driver: str, unique: str, bus: str) -> dict[str, Any]:
    """A GPU by its number of a PCI device, the tool's name of it, bytes of memory, the driver's version, its unique
    number and its place on the bus. The tools name an MI250X after its board, so its number names it, if known."""
    product = product_of_pci(number)
    name = f"AMD Instinct {product}" if product else name if name not in ("", "N/A") else f"AMD GPU {number}"
    memory_gib = None if total is None else round(total / GIB, 1)
    return {"name": name, "memory_gib": memory_gib, "driver": driver, "index": "", "uuid": _uuid(unique), "bus": bus}


def _uuid(unique: str) -> str:
    digits = unique.lower().removeprefix("0x")
    return f"GPU-{digits.zfill(16)}" if re.fullmatch(r"[0-9a-f]{1,16}", digits) and digits.strip("0") else ""


def _bus(device: Path) -> str:
    slot = re.search(r"^PCI_SLOT_NAME=(\S+)", _text(device, "uevent"), re.MULTILINE)
    return slot[1].lower() if slot else device.resolve().name


def _json_of(limit_s: float, *command: str) -> Any:
    """The JSON that a tool prints, after any lines of warning; None if there is none."""
    if shutil.which(command[0]) is None:
        return None
    shown = run_in_time(limit_s, *command)[1]
    for start in _starts(shown):
        with contextlib.suppress(ValueError):
            return json.JSONDecoder().raw_decode(shown, start)[0]
    return None


def _starts(shown: str) -> Iterator[int]:
    """Places at which a line begins that may be JSON."""
    return (match.start() for match in re.finditer(r"^[\[{]", shown, re.MULTILINE))


def _table(tables: object, key: str) -> Mapping[str, Any]:
    value = tables.get(key) if isinstance(tables, dict) else None
    return value if isinstance(value, dict) else {}


def _is_number(text: str) -> bool:
    return re.fullmatch(r"\d+(\.\d+)?", text) is not None


def _text(folder: Path, name: str) -> str:
    with contextlib.suppress(OSError):
        return (folder / name).read_text(encoding="utf-8", errors="replace")
    return ""


def _line(folder: Path, name: str) -> str:
    return _text(folder, name).strip()


def _number(folder: Path, name: str) -> int | None:
    text = _line(folder, name)
    return int(text) if re.fullmatch(r"\d+", text) else None
