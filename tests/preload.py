"""What all ranks of tests import, once, in the process that they are forked from. See tests/forked.py."""

import contextlib
import gc
import importlib
import io
import os

# Before torch, which counts its threads when it is imported.
os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu", CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_COMPILE_THREADS="1")

# The last two are what building an optimizer and initialising DeepSpeed import on the way.
MODULES = (
    "hpc_gpt.trainer.attempt",
    "hpc_gpt.trainer.engines.deepspeed_3d",
    "hpc_gpt.trainer.model.pipeline",
    "deepspeed.runtime.pipe.topology",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch._dynamo",
)
with contextlib.redirect_stdout(io.StringIO()):
    for module in MODULES:
        importlib.import_module(module)

# What is here stays: no rank looks through a million objects for garbage, and memory stays shared.
gc.collect()
gc.freeze()
