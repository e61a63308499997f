"""The dialects: one small module each, with `DIALECT` in it. A module put here is read by; nothing else names it."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from hpc_gpt.readers.pattern import Dialect


@cache
def dialects() -> tuple[Dialect, ...]:
    """Every dialect, by the name of its module."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").DIALECT for name in names)
