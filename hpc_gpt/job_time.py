"""Slurm's time limits: "90", "90:30", "1:30:00", "2-12", "2-12:30", "2-12:30:00" in seconds."""

from __future__ import annotations

import re

from hpc_gpt.errors import ConfigError

_FORMS = (
    (re.compile(r"(?P<m>\d+)(:(?P<s>\d+))?"), "minutes[:seconds]"),
    (re.compile(r"(?P<h>\d+):(?P<m>\d+):(?P<s>\d+)"), "hours:minutes:seconds"),
    (re.compile(r"(?P<d>\d+)-(?P<h>\d+)(:(?P<m>\d+)(:(?P<s>\d+))?)?"), "days-hours[:minutes[:seconds]]"),
)
_SECONDS = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def limit_s(text: str | None) -> int | None:
    """Seconds of a time limit; None for no limit. ConfigError where sbatch would not read it.

    >>> limit_s("1:30:00"), limit_s("90"), limit_s("2-12")
    (5400, 5400, 216000)
    """
    if text is None or text.lower() in ("unlimited", "infinite"):
        return None
    for form, _ in _FORMS:
        if found := form.fullmatch(text):
            seconds = sum(_SECONDS[unit] * int(size) for unit, size in found.groupdict().items() if size)
            return seconds or None  # sbatch takes 0 as no limit
    forms = ", ".join(name for _, name in _FORMS)
    raise ConfigError(f"job.time {text!r} is no time limit: {forms}", "for example 02:00:00")
