"""The GPUs of this machine, NVIDIA's and AMD's."""

from __future__ import annotations

import re
import shutil
from typing import Any

from hpc_gpt.core.machine.amd_gpus import list_amd_gpus
from hpc_gpt.core.process import run_in_time

_PATIENCE_S = 10.0
# nvidia-smi says that there is no GPU: by its exit code, or by a message, which may come with other codes.
_NO_GPU_CODES = (6, 9, 12)  # no device found, no driver, no library of the driver
_NO_GPU = re.compile(r"No devices were found|couldn't communicate with the NVIDIA driver|Driver Not Loaded", re.I)
# Printed by nvidia-smi instead of a card's name, or in a separate line.
_LOST = re.compile(r"\bis lost\b|\berror\b", re.IGNORECASE)


def ask_gpus(limit_s: float = _PATIENCE_S) -> tuple[list[dict[str, Any]], str]:
    """Returns (`name, memory_gib, driver, index, uuid` of each GPU of this machine, why these may not be all GPUs).

    nvidia-smi lists NVIDIA's. If it surely lists none, AMD's are returned (`core.machine.amd_gpus`); these are always
    known, as the kernel lists them. A card's memory is None if nvidia-smi does not know it, as for unified memory. If
    nvidia-smi does not answer in time, or fails other than for want of a driver or a device, it is not sure that there
    is no GPU.
    """
    cards, fault = _ask_nvidia(limit_s)
    return (cards, fault) if cards or fault else (list_amd_gpus(limit_s), "")


def _ask_nvidia(limit_s: float) -> tuple[list[dict[str, Any]], str]:
    if shutil.which("nvidia-smi") is None:
        return [], ""
    query = "--query-gpu=name,memory.total,driver_version,index,uuid"
    code, shown, errors = run_in_time(limit_s, "nvidia-smi", query, "--format=csv,noheader,nounits")
    if code is None:
        return [], errors
    cards, messages = list[dict[str, Any]](), errors.split()
    for line in shown.splitlines():
        fields = [field.strip() for field in line.split(",")]
        name, memory, driver, index, uuid = [*fields, "", ""][:5] if len(fields) > 2 else ("", "", "", "", "")
        if not name or _LOST.search(name + uuid):
            messages += line.split()
            continue
        memory_gib = round(int(memory) / 1024, 1) if memory.isdecimal() else None
        index = index if index.isdecimal() else str(len(cards))
        cards.append({"name": name, "memory_gib": memory_gib, "driver": driver, "index": index, "uuid": uuid})
    why = " ".join(messages)[:200]
    if not cards and (code in _NO_GPU_CODES or _NO_GPU.search(why) or (code == 0 and not messages)):
        return [], ""
    if code == 0 and cards and not _LOST.search(why):
        return cards, ""
    return cards, f"nvidia-smi ended with exit code {code}" + (f": {why}" if why else "")


def list_gpus() -> list[dict[str, Any]]:
    """The GPUs that `ask_gpus` lists."""
    return ask_gpus()[0]


def has_gpus() -> bool:
    """Whether this machine has a GPU; also true if nvidia-smi fails, as without a driver it says so."""
    return any(ask_gpus())
