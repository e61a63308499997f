"""One rank that compiles a block as `engine.compile` does; prints Inductor's counters: {"hits": n, "misses": n}."""

import json

import torch
from torch._dynamo.utils import counters

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.gpt import Gpt

if __name__ == "__main__":
    model = Gpt(ModelShape(32, 2, 2, vocab=61, seq=16), 1)
    compile_model(model, Engine("ddp", compile="block", keep_residuals=True))
    tokens = torch.zeros(1, 16, dtype=torch.int64)
    model(tokens, tokens).backward()
    found = counters["inductor"]
    print(json.dumps({"hits": found["fxgraph_cache_hit"], "misses": found["fxgraph_cache_miss"]}))
