"""The dialects: one small module each, with a `DIALECT`. A module is used as soon as it is in this folder; nothing else names it."""

import importlib
import pkgutil
from functools import cache

from hpc_gpt.reader.pattern import Dialect


@cache
def dialects() -> tuple[Dialect, ...]:
    """Every dialect, sorted by the names of the modules."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(importlib.import_module(f"{__name__}.{name}").DIALECT for name in names)
