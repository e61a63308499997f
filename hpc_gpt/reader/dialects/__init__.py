"""The dialects: a module has a `DIALECT`, or small ones in `DIALECTS`. It is used as soon as it is in this folder."""

import importlib
import pkgutil
from functools import cache

from hpc_gpt.reader.pattern import Dialect


@cache
def dialects() -> tuple[Dialect, ...]:
    """Every dialect, sorted by name."""
    modules = [importlib.import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    every = [dialect for module in modules for dialect in getattr(module, "DIALECTS", None) or (module.DIALECT,)]
    return tuple(sorted(every, key=lambda dialect: dialect.name))


@cache
def dialects_by_name() -> dict[str, Dialect]:
    """Every dialect by its name."""
    return {dialect.name: dialect for dialect in dialects()}
