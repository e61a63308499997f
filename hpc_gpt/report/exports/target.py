"""Whether an export can be written, before an hour of reading: the package that writes it, and the folder."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from hpc_gpt.errors import RunFolderError, UserError

ANOTHER = "name another folder for the export"
_WRITTEN = {"tensorboard": "event files are", "wandb": "W&B runs are"}


def check_target(folder: Path, package: str) -> None:
    """UserError where the package is not installed, RunFolderError where the folder can be neither made nor written."""
    try:
        there = find_spec(package) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        raise not_installed(package)
    above = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    if not above.is_dir():
        raise RunFolderError(f"{above} is no folder", ANOTHER)
    if not os.access(above, os.W_OK | os.X_OK):
        raise RunFolderError(f"{above} cannot be written to", ANOTHER)


def not_installed(package: str, why: str = "") -> UserError:
    """The package of an export is not here, or not whole, with how to get it."""
    return UserError(
        f"{_WRITTEN[package]} written by the package {package}, which is not installed{f': {why}' if why else ''}",
        f"pip install 'hpc-gpt[{package}]'",
    )
