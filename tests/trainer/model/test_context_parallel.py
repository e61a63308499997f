"""Attention of sequences whose parts are on several ranks: its bits, and what each rank keeps."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.engines.attention import flash_of_last
from hpc_gpt.trainer.model.attention import attention_core
from hpc_gpt.trainer.model.context_parallel import ContextParallel, HeadsExchanged, KeysGathered, SequencePart
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from tests.distributed.ranks import run_together
from tests.trainer.model.test_techniques import kept

pytestmark = pytest.mark.xdist_group("context-parallel")  # one launch serves all

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
# Each shape, each recomputation.
KEPT = [("gpt2", "none"), ("gpt2", "selective"), ("llama", "full"), ("qwen3", "none")]
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
    expected = attention_core(*whole)
    expected.backward(slope)
    parts = [own.part.of(tensor.detach(), 1).requires_grad_() for tensor in whole]
    mixed = own.to_positions(own.attend(*parts, attention_core))
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


def measure(folder: Path) -> dict[str, Any]:
    """Of four ranks: how far attention is off in each exchange, and what part of the activations they keep."""
    groups: dict[int, Any] = {4: dist.group.WORLD}
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    groups[2] = pairs[dist.get_rank() // 2]
    found: dict[str, Any] = {}
    for exchange in EXCHANGES:
        for heads, key_heads, cp in HEADS:
            own = context(exchange, cp, groups)
            found[name_of(exchange, heads, key_heads, cp)] = attention(own, heads, key_heads)
    for name, recompute in KEPT:
        kept_of = partial(kept_bytes, SHAPES[name], recompute)
        alone = kept_of(ContextParallel())
        for exchange in EXCHANGES:
            shares = {cp: kept_of(context(exchange, cp, groups)) / alone for cp in (2, 4)}
            found[f"{exchange} {name} {recompute}"] = shares
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = run_together(measure, 4, tmp_path_factory.mktemp("context"))
    return found


@pytest.mark.parametrize(("heads", "key_heads", "cp"), HEADS)
def test_attention_with_some_heads_has_the_bits_of_one_process(found, heads, key_heads, cp):
    far = found[name_of("heads", heads, key_heads, cp)]
    assert far["output"] == far["query"] == 0
    # The gradients of a repeated head are summed in another order.
    limit = 3e-6 if key_heads < cp else 0
    assert far["key"] <= limit
    assert far["value"] <= limit


@pytest.mark.parametrize(("heads", "key_heads", "cp"), HEADS)
def test_attention_of_two_chunks_is_that_of_one_process(
    found: dict[str, Any], heads: int, key_heads: int, cp: int
) -> None:
    # The kernel sums over as many keys as a chunk sees.
    assert max(found[name_of("keys", heads, key_heads, cp)].values()) <= 3e-6


@pytest.mark.parametrize("expands", [False, True])
def test_a_kernel_for_the_last_queries_does_what_the_mask_does(expands: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key, value = (torch.randn(2, *size, 8, generator=generator) for size in ((3, 4), (7, 2), (7, 2)))

    def by_hand(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
        scores = query @ key.transpose(-2, -1) / 8**0.5
        sees = torch.arange(7) <= torch.arange(4, 7)[:, None]
        return scores.masked_fill(~sees, -torch.inf).softmax(-1) @ value

    masked = attention_core(query, key, value, expands)
    torch.testing.assert_close(attention_core(query, key, value, expands, last=by_hand), masked, atol=1e-6, rtol=0)


@pytest.mark.parametrize("width", [64, 12])
def test_the_flash_kernel_for_the_last_queries_gives_their_shape(width: int) -> None:
    # Without a GPU its shapes alone: its numbers are not tested here.
    query, key = (torch.empty(2, *size, width, dtype=torch.bfloat16, device="meta") for size in ((4, 3), (2, 7)))
    assert flash_of_last(query, key, key).shape == query.shape


@pytest.mark.parametrize(("shape", "recompute"), KEPT)
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_a_rank_keeps_its_part_of_the_activations(found, exchange, shape, recompute):
    for cp, share in found[f"{exchange} {shape} {recompute}"].items():
        assert share * int(cp) == pytest.approx(1, rel=0.02)
