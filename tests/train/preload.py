"""What the ranks of tests have in common: imported once, in the process they are forked from.

Each is a process of its own with its own environment, log and signals; only the seconds of importing torch are shared.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os

# Before torch, which counts its threads when it is imported.
os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_COMPILE_THREADS="1")

# The last two are what building an optimizer and initialising DeepSpeed import on the way.
MODULES = (
    "hpc_gpt.train.trainer",
    "hpc_gpt.train.deepspeed_3d",
    "hpc_gpt.model.pipeline",
    "deepspeed.runtime.pipe.topology",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
)
with contextlib.redirect_stdout(io.StringIO()):
    for module in MODULES:
        importlib.import_module(module)


def run_rank(environment: dict[str, str], log: str) -> None:
    """One rank, as `python -m hpc_gpt.train` would run it; ends the process."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(file, 1)
    os.dup2(file, 2)
    from hpc_gpt.train.__main__ import main

    main()
