"""Counts, durations and time limits as an outlook says them."""

from __future__ import annotations

import math


def counted(count: int, what: str) -> str:
    """`1 link`, `2 links`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`0.912 s`, `95 s`, `3 h 20 min`, `11 d 4 h`."""
    if seconds < 600:
        return f"{seconds:.3g} s" if seconds < 100 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 180:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 72:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def clock(seconds: float) -> str:
    """A time limit as sbatch takes it, in whole minutes upwards."""
    minutes = max(1, math.ceil(seconds / 60))
    days, rest = divmod(minutes, 1440)
    return (f"{days}-" if days else "") + f"{rest // 60:02d}:{rest % 60:02d}:00"


def rounded_up(hours: float) -> str:
    """Three digits, upwards, of hours above 0."""
    size = 10.0 ** (math.floor(math.log10(hours)) - 2)
    return f"{math.ceil(hours / size) * size:g}"
