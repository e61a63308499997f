"""Adapts DeepSpeed to our engines: imports it silently for the right device."""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from hpc_gpt.core.process import no_collections
from hpc_gpt.trainer.engines.library_patches import use_gloo


def import_deepspeed(device: torch.device) -> Any:
    """Imports DeepSpeed for the device, silently and without compiling anything.

    Raises ConfigError if this version would compile something.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    with quiet():
        with no_collections():
            import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # DeepSpeed calls collectives by names that torch deprecates.
        warnings.filterwarnings("ignore", message=".*torch.distributed.*deprecated", category=FutureWarning)
        if device.type == "cpu":
            use_gloo(deepspeed)
    return deepspeed


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """A context that discards DeepSpeed's output during set-up; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield
