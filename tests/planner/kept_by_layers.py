"""The bytes that compiled layers keep for the backward pass, with `engine.keep_residuals` and without.

python -m tests.planner.kept_by_layers      [bytes without, bytes with, bytes as plan counts them]
"""

import json

import torch
from torch import Tensor

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.layer_bytes import layer_bytes
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.gpt import Gpt

SHAPE = ModelShape(hidden=256, layers=2, heads=4, vocab=64, seq=256)
BATCH = 4


def kept_bytes(shape: ModelShape, keep: bool) -> int:
    """Of all layers, in bf16, but for norms' means and the like, which have one number a token or head."""
    torch._dynamo.reset()
    model = Gpt(shape, 1).to(torch.bfloat16)
    compile_model(model, Engine("ddp", compile="block", keep_residuals=keep))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hidden = torch.randn(BATCH, shape.seq, shape.hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for block in model.blocks:
            hidden = block(hidden)
    sizes = [one.untyped_storage().nbytes() for place, one in found.items() if place not in weights]
    return sum(size for size in sizes if size >= 2 * BATCH * shape.seq * shape.hidden)


if __name__ == "__main__":
    planned = layer_bytes(Training(SHAPE, engine="ddp", flash=True, compiled=True, micro_batch=BATCH)).kept
    print(json.dumps([kept_bytes(SHAPE, False), kept_bytes(SHAPE, True), planned * SHAPE.layers]))
