"""Seconds to compile a first step, forward and backward, of two layers on a CPU: `make bench` does not run it.

python bench/first_step.py gpt2-xl | llama-8b

With nothing in the caches, and no other process to compile in. In another checkout, to compare: the same file there, in
turns. Seconds of CPU say more than those of the clock on a machine that others use, too.
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ |= {"TORCHINDUCTOR_CACHE_DIR": tempfile.mkdtemp(), "TORCHINDUCTOR_COMPILE_THREADS": "1"}

import torch

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.engines.kernels import compile_model, compile_seconds
from hpc_gpt.trainer.model.gpt import Gpt

SHAPES = {
    "gpt2-xl": ModelShape(1600, 2, 25, vocab=50257, seq=128),
    # An eighth of the vocabulary: the whole head and its gradients would need 8 GiB in fp32.
    "llama-8b": ModelShape(
        4096, 2, 32, vocab=16032, seq=128, kv_heads=8, ffn=14336, norm="rmsnorm", positions="rope", mlp="swiglu",
        bias="none", tied=False,
    ),
}  # fmt: skip

if __name__ == "__main__":
    model = Gpt(SHAPES[sys.argv[1]], 1)
    compile_model(model, Engine("ddp", compile="edges", keep_residuals=True))
    tokens = torch.zeros(1, 128, dtype=torch.int64)
    began = sum(os.times()[:4])
    model(tokens, tokens).backward()
    taken = sum(os.times()[:4]) - began
    print(f"{sys.argv[1]}: compiled in {compile_seconds():.1f} s, {taken:.1f} s of CPU with the step", flush=True)
    os._exit(0)
