"""One of four ranks that compute attention, and a block with its loss, of parts of the same sequences.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument.
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.attention import mix
from hpc_gpt.trainer.model.context_parallel import ContextParallel, HeadsExchanged, KeysGathered, SequencePart
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from tests.distributed.groups import finish, meet
from tests.model.test_techniques import kept

BATCH, SEQ, WIDTH = 2, 16, 8
# (heads, heads of keys, cp): as many, more than ranks, as many as ranks, fewer, one.
HEADS = [(8, 8, 2), (8, 4, 2), (8, 2, 2), (8, 8, 4), (8, 4, 4), (8, 2, 4), (4, 1, 4)]
_PLAIN = {"hidden": 64, "layers": 1, "vocab": 61, "seq": 32}
_LLAMA: dict[str, Any] = {"mlp": "swiglu", "norm": "rmsnorm", "positions": "rope", "bias": "none", "ffn": 96}
SHAPES = {
    "gpt2": ModelShape(heads=4, **_PLAIN),
    "llama": ModelShape(heads=8, kv_heads=4, **_PLAIN, **_LLAMA),
    "qwen3": ModelShape(heads=8, kv_heads=4, qk_norm=True, **_PLAIN, **_LLAMA),
}
RECOMPUTES = ("none", "selective", "full")
EXCHANGES = {"heads": HeadsExchanged, "keys": KeysGathered}


def name_of(exchange: str, heads: int, key_heads: int, cp: int) -> str:
    return f"{exchange}, {heads} heads, {key_heads} of keys, cp {cp}"


def context(exchange: str, cp: int, groups: dict[int, dist.ProcessGroup | None]) -> ContextParallel:
    return EXCHANGES[exchange](SequencePart(dist.get_rank() % cp, cp, exchange == "keys"), groups[cp])


def attention(own: ContextParallel, heads: int, key_heads: int) -> dict[str, float]:
    """The largest difference of attention and of its gradients from those of one process; 0 are the same bits."""
    generator = torch.Generator().manual_seed(heads)
    whole = [
        torch.randn(BATCH, SEQ, count, WIDTH, generator=generator).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]
    # Of a size at which the gradients are about one: the limits of their differences are absolute.
    slope = torch.randn(BATCH, SEQ, heads * WIDTH, generator=generator) / 4
    expected = mix(*whole)
    expected.backward(slope)
    parts = [own.part.of(tensor.detach(), 1).requires_grad_() for tensor in whole]
    mixed = own.to_positions(own.attend(*parts, mix))
    # A gradient whose strides are not its shape's, as the next layer's may be.
    mixed.backward(own.part.of(slope, 1).transpose(0, 1).contiguous().transpose(0, 1))
    far = {"output": _far(mixed, own.part.of(expected, 1))}
    for name, part, tensor in zip(("query", "key", "value"), parts, whole, strict=True):
        assert part.grad is not None
        assert tensor.grad is not None
        far[name] = _far(part.grad, own.part.of(tensor.grad, 1))
    return far


def kept_bytes(shape: ModelShape, recompute: str, own: ContextParallel) -> int:
    """Bytes that autograd keeps of a block and the loss, each memory once, without parameters."""
    tp = TensorParallel(context=own)
    model = Gpt(shape, 1, tp, Techniques(recompute=recompute))  # type: ignore[arg-type]
    tokens = own.part.of(torch.zeros(BATCH, shape.seq, dtype=torch.int64), 1)
    hidden = model.embed(tokens).detach().requires_grad_()
    with kept() as tensors:
        loss = model.finish(model.blocks[0](hidden), tokens)
    loss.backward()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[tuple[int, int], int] = {}
    for tensor in tensors:
        if (memory := tensor.untyped_storage().data_ptr()) not in parameters and tensor.numel() > 1:
            found[memory, tensor.storage_offset()] = tensor.numel() * tensor.element_size()
    return sum(found.values())


def _far(ours: Tensor, theirs: Tensor) -> float:
    worst = (ours - theirs).abs().max().detach().reshape(1)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def main(folder: Path) -> None:
    meet(folder, "context")
    groups: dict[int, Any] = {4: dist.group.WORLD}
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    groups[2] = pairs[dist.get_rank() // 2]
    found: dict[str, Any] = {}
    for exchange in EXCHANGES:
        for heads, key_heads, cp in HEADS:
            own = context(exchange, cp, groups)
            found[name_of(exchange, heads, key_heads, cp)] = attention(own, heads, key_heads)
    for name, shape in SHAPES.items():
        for recompute in RECOMPUTES:
            kept_of = partial(kept_bytes, shape, recompute)
            alone = kept_of(ContextParallel())
            for exchange in EXCHANGES:
                shares = {cp: kept_of(context(exchange, cp, groups)) / alone for cp in (2, 4)}
                found[f"{exchange} {name} {recompute}"] = shares
    finish(folder, found)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
