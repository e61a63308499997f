"""The figures that a GPU's driver measures."""

from typing import NamedTuple


class GpuFigures(NamedTuple):
    """The figures of a GPU from its driver: utilisation in percent, memory in use and in total in GiB, power in W,
    temperature in degrees Celsius. None for a figure that the card does not have."""

    util: float | None
    memory_gib: float | None
    total_gib: float | None
    power_w: float | None
    temperature_c: float | None
