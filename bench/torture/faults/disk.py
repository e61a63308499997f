"""The disk of the run folder is full."""

import os
import time
from pathlib import Path

from bench.torture.faults.kind import kind
from bench.torture.order import SAVE_EVERY
from bench.torture.scene import Scene


def fill(ballast: Path) -> None:
    """Makes a file of all that is free of its disk."""
    with open(ballast, "wb", buffering=0) as file:
        piece = 1 << 20
        while piece:
            try:
                if os.write(file.fileno(), b"\0" * piece) < piece:
                    piece //= 2
            except OSError:
                piece //= 2


# If the disk stays full for some saves, the run ends, and is started again by hand.
@kind(earliest=SAVE_EVERY + 1, small_disk=True, by_hand=("disk_full",))
def fill_the_disk(scene: Scene) -> None:
    """Somebody fills it, and frees it some seconds later or when the run is over."""
    scene.wait_moment()
    ballast = scene.launcher.logs / "ballast"
    freed_s = scene.chance.choice((1, 3, None))
    scene.detail = "freed once the run is over" if freed_s is None else f"freed after {freed_s} s"
    scene.remember()
    fill(ballast)
    if freed_s is None:
        scene.mending.callback(ballast.unlink, missing_ok=True)
    else:
        time.sleep(freed_s)
        ballast.unlink()
