"""DeepSpeed itself, as every engine built on it needs it: imported for the right device, quiet, compiling nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

# Its part of a checkpoint is the folder of this name.
TAG = "deepspeed"


def import_deepspeed(device: torch.device) -> Any:
    """DeepSpeed, told which device it serves, quiet, and kept from compiling anything."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # It calls collectives by names that torch has deprecated; nothing a user could mend.
        warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
        if device.type == "cpu":
            # Its shared-memory all-reduce takes a compiler and leaks 69 MB of /dev/shm a rank; gloo does without.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallows what DeepSpeed prints while it sets up, saves and loads; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
