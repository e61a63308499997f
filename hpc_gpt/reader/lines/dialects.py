"""The dialects: a module of `programs` or `failures` has a `DIALECT`, or several in `DIALECTS`. It is used as soon as
it is in its folder; no module names it."""

import importlib
import pkgutil
from functools import cache

from hpc_gpt.reader.lines.pattern import Dialect

_FOLDERS = ("hpc_gpt.reader.programs", "hpc_gpt.reader.failures")


@cache
def dialects() -> tuple[Dialect, ...]:
    """Every dialect, sorted by name."""
    found: list[Dialect] = []
    for folder in _FOLDERS:
        names = [module.name for module in pkgutil.iter_modules(importlib.import_module(folder).__path__)]
        for module in [importlib.import_module(f"{folder}.{name}") for name in names]:
            alone = getattr(module, "DIALECT", None)
            found += getattr(module, "DIALECTS", [alone] if alone is not None else [])
    return tuple(sorted(found, key=lambda dialect: dialect.name))


@cache
def dialects_by_name() -> dict[str, Dialect]:
    """Every dialect by its name."""
    return {dialect.name: dialect for dialect in dialects()}
