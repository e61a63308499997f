"""Disks that are full."""

import os
from contextlib import suppress
from pathlib import Path


def fill(folder: Path) -> Path:
    """Takes all the space there is."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(4096))
    assert os.statvfs(folder).f_bavail == 0
    return path
