"""What attention and the loss read and write beside their products, counted in what runs and in what is compiled."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.attention import Attention
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss

SHAPE = ModelShape(hidden=32, layers=1, heads=2, vocab=100, seq=8)  # padded to 128
BATCH = 3
TOKENS = BATCH * SHAPE.seq


class Made(TorchDispatchMode):
    """Counts operations whose result is memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        given = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves(args) if isinstance(leaf, Tensor)}
        first = tree_leaves(result)[0]
        if first.untyped_storage().data_ptr() not in given:
            self.count[function.overloadpacket.__name__] += 1
        return result


def attention_and_input() -> tuple[Attention, Tensor]:
    tp = TensorParallel()
    attention = Attention(0, SHAPE, tp, tp.initial(1, 1), Techniques()).bfloat16()
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(BATCH, SHAPE.seq, SHAPE.hidden, generator=generator).bfloat16()
    return attention, hidden.requires_grad_()


def test_around_attention_one_copy_is_made() -> None:
    attention, hidden = attention_and_input()
    with Made() as forward:
        mixed = attention(hidden)
    with Made() as backward:
        mixed.backward(hidden)
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert forward.count == {"addmm": 1, kernel: 1, "mm": 1, "add": 1}
    # Products for two inputs and two weights, sums for two biases; the gradients of Q, K and V lie side by side.
    assert backward.count == {"mm": 4, f"{kernel}_backward": 1, "sum": 2, "cat": 1}


def compiled_graphs(function: Callable[..., Tensor], *args: Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """What Inductor is given for the forward and the backward pass."""
    torch._dynamo.reset()
    graphs = []

    def keep(graph: fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    torch.compile(function, backend=backend, dynamic=False)(*args).sum().backward()
    forward, backward = graphs
    return forward, backward


def names(graph: fx.GraphModule) -> Counter[str]:
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return Counter(getattr(node.target, "overloadpacket", node.target).__name__ for node in nodes)


def test_compiled_attention_copies_its_gradients_alone() -> None:
    attention, hidden = attention_and_input()
    forward, backward = map(names, compiled_graphs(attention, hidden))
    copies = {"cat", "stack", "clone", "copy", "select_scatter", "slice_scatter"}
    assert not copies & forward.keys()
    assert {name: backward[name] for name in copies & backward.keys()} == {"cat": 1}


def loss_and_arguments() -> tuple[VocabParallelLoss, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(BATCH, SHAPE.seq, SHAPE.padded_vocab, generator=generator).bfloat16().requires_grad_()
    targets = torch.randint(SHAPE.vocab, (BATCH, SHAPE.seq), generator=generator)
    return VocabParallelLoss(SHAPE.vocab, SHAPE.padded_vocab, TensorParallel()), logits, targets


def passes(graph: fx.GraphModule) -> list[str]:
    """The reductions over all of the logits."""
    found = []
    for node in graph.graph.nodes:
        given = [one.meta["val"].numel() for one in node.all_input_nodes if isinstance(one.meta.get("val"), Tensor)]
        made = node.meta.get("val")
        if isinstance(made, Tensor) and made.numel() <= TOKENS and max(given, default=0) >= TOKENS * SHAPE.vocab:
            found.append(node.target.overloadpacket.__name__)
    return found


def test_a_compiled_loss_goes_over_the_logits_as_often_as_needed() -> None:
    loss, logits, targets = loss_and_arguments()
    forward, backward = compiled_graphs(loss, logits, targets)
    # Largest and sum, and the target's own score, one number of each token.
    assert (sorted(passes(forward)), passes(backward)) == (["amax", "gather", "sum"], [])
    (kept,) = (node.args[0] for node in forward.graph.nodes if node.op == "output")
    large = [node.meta["val"] for node in kept if node.meta["val"].numel() > TOKENS]
    assert [(one.dtype, one.shape) for one in large] == [(torch.bfloat16, logits.shape)]


@pytest.mark.parametrize(
    ("scale", "dtype", "summed"),
    [(1.0, torch.bfloat16, False), (1e4, torch.float32, True), (1e4, torch.bfloat16, True)],
)
def test_a_compiled_loss_is_the_loss(scale: float, dtype: torch.dtype, summed: bool) -> None:
    loss, logits, targets = loss_and_arguments()
    found = []
    for compiles in (False, True):
        leaf = (logits.detach() * scale).to(dtype).requires_grad_()
        function = loss.total if summed else loss.forward
        function = torch.compile(function, backend="aot_eager", dynamic=False) if compiles else function
        value = function(leaf.flatten(0, 1), targets.flatten()) if summed else function(leaf, targets)
        value.backward()
        assert not leaf.grad[..., SHAPE.vocab :].any()
        found.append((value.detach(), leaf.grad))
    (value, gradient), (again, compiled) = found
    torch.testing.assert_close(again, value, rtol=1e-6, atol=0)
    torch.testing.assert_close(compiled, gradient, rtol=1e-6 if dtype is torch.float32 else 1e-2, atol=1e-7)
