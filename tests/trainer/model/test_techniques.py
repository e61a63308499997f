"""Techniques change memory, not numbers: gradients as without them, and what is kept counted."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.linear import TileLinear
from hpc_gpt.trainer.model.techniques import ActivationOffload, Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, full_name
from tests.trainer.model.test_gpt import SHAPES, SMALL, tokens_of
from tests.trainer.model.whole_parameters import merge_pieces, piece_of

BATCH = 3  # rows of tokens_of


@contextlib.contextmanager
def kept() -> Iterator[list[Tensor]]:
    """What autograd keeps while the context lasts; hooks inside it go first."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found


def train(model: Gpt, shape: ModelShape = SMALL) -> tuple[Tensor, dict[str, Tensor], int]:
    """(loss, gradients of the whole parameters by name, elements kept for the backward pass)"""
    with kept() as tensors:
        loss = model(*tokens_of(shape))
    count = sum(tensor.numel() for tensor in tensors)
    loss.backward()
    return loss.detach(), gradients_of(model), count


def gradients_of(model: Gpt) -> dict[str, Tensor]:
    pieces = []
    for parameter in model.parameters():
        assert parameter.grad is not None, full_name(parameter)
        pieces.append(piece_of(parameter, 0, parameter.grad))
    return merge_pieces(pieces)


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor], atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            ours[name], gradient, atol=atol, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def trained_alike(shape: ModelShape, techniques: Techniques) -> tuple[Gpt, Tensor]:
    """A model with these techniques, whose loss and gradients are those without any; and that loss."""
    loss, gradients, _ = train(Gpt(shape, 1), shape)
    again, found, _ = train(model := Gpt(shape, 1, techniques=techniques), shape)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(found, gradients, atol=1e-6)
    return model, loss


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_selective_recomputation_drops_the_cores_activations(kernel: SDPBackend) -> None:
    with sdpa_kernel(kernel):
        loss, gradients, all_kept = train(Gpt(SMALL, 1))
        again, recomputed, fewer = train(Gpt(SMALL, 1, techniques=Techniques(recompute="selective")))
        _, in_full, fewest = train(Gpt(SMALL, 1, techniques=Techniques(recompute="full")))
    assert loss == again
    assert_same(recomputed, gradients)
    assert_same(in_full, gradients)
    assert fewest < fewer < all_kept
    assert fewest < all_kept / 2
    if kernel is SDPBackend.MATH:
        # seq^2 probabilities a head are what it is about.
        assert all_kept - fewer >= SMALL.layers * BATCH * SMALL.heads * SMALL.seq**2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_offload_takes_every_activation_and_no_parameter(monkeypatch, recompute):
    loss, gradients, _ = train(Gpt(SMALL, 1))
    packed: list[tuple[Tensor, Any]] = []
    pack = ActivationOffload._pack

    def spy(self: ActivationOffload, tensor: Tensor) -> Any:
        packed.append((tensor, pack(self, tensor)))
        return packed[-1][1]

    monkeypatch.setattr(ActivationOffload, "_pack", spy)
    model = Gpt(SMALL, 1, techniques=Techniques(activation_offload=True, recompute=recompute))
    again, offloaded, on_device = train(model)
    assert again == loss
    assert_same(offloaded, gradients)
    *_, without_blocks = train(Gpt(replace(SMALL, layers=0), 1))
    assert on_device == without_blocks
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    copies = 0
    for tensor, result in packed:
        if tensor.untyped_storage().data_ptr() in parameters:
            assert isinstance(result[0], torch.nn.Parameter)
        else:
            # Before torch 2.13 an empty tensor may have no address.
            assert result[1].data_ptr() != tensor.data_ptr() or not tensor.numel()
            assert torch.equal(result[1], tensor)
            copies += tensor.numel()
    block_input = BATCH * SMALL.seq * SMALL.hidden
    if recompute == "full":
        assert copies == SMALL.layers * block_input
    else:
        assert copies > 8 * SMALL.layers * block_input


def test_offload_lets_an_engine_free_parameters_between_passes() -> None:
    _, gradients, _ = train(Gpt(SMALL, 1))
    model = Gpt(SMALL, 1, techniques=Techniques(activation_offload=True))
    loss = model(*tokens_of(SMALL))
    for parameter in model.blocks.parameters():
        whole = parameter.detach().clone()
        parameter.data.fill_(torch.nan)  # whoever kept the old memory will show it
        parameter.data = whole
    loss.backward()
    assert_same(gradients_of(model), gradients)


@pytest.mark.parametrize(
    "view", [lambda one: one, lambda one: one.t(), lambda one: one[:, 1:3], lambda one: one[:, :1].expand(5, 4)]
)
def test_offload_gives_back_what_it_got(view: Any) -> None:
    number = torch.randn(5, 4, generator=torch.Generator().manual_seed(2))
    grad, strides = [], []
    for context in (contextlib.nullcontext(), ActivationOffload(torch.nn.Module())):
        leaf = torch.ones_like(view(number)).requires_grad_()
        with context:
            product = leaf * view(number)
        strides.append(product.grad_fn._saved_other.stride())
        product.sum().backward()
        grad.append(leaf.grad)
    assert torch.equal(grad[0], grad[1])
    assert strides[0] == strides[1] or 0 in strides[0]


def test_offload_does_nothing_where_no_gradient_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ActivationOffload, "__enter__", lambda self: pytest.fail("entered"))
    with torch.no_grad():
        Gpt(SMALL, 1, techniques=Techniques(activation_offload=True))(*tokens_of(SMALL))


@pytest.mark.parametrize(("shape", "chunks"), [(SMALL, 30), (SHAPES[1], 5), (SHAPES[2], 2)])
def test_a_chunked_loss_is_the_loss(shape: ModelShape, chunks: int) -> None:
    model, loss = trained_alike(shape, Techniques(loss_chunks=chunks))
    assert list(model.state_dict()) == list(Gpt(shape, 1).state_dict())
    with torch.no_grad():
        torch.testing.assert_close(model(*tokens_of(shape)), loss, atol=1e-6, rtol=0)


class EachTensor(TorchDispatchMode):
    """Calls `note` with every tensor that an operation makes."""

    def __init__(self, note: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.note = note

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self.note(leaf)
        return result


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_logits_are_never_there(tied: bool) -> None:
    shape = ModelShape(hidden=16, layers=1, heads=2, vocab=1000, seq=16, tied=tied)
    logits, weight = BATCH * shape.seq * shape.vocab, shape.padded_vocab * shape.hidden
    largest, waiting = {}, {}
    for chunks in (1, 6):
        model = Gpt(shape, 1, techniques=Techniques(loss_chunks=chunks))
        made: list[Tensor] = []
        with EachTensor(made.append):
            *_, waiting[chunks] = train(model, shape)
        largest[chunks] = max(one.numel() for one in made)
    assert largest[1] >= logits
    assert largest[6] <= max(weight, -(-logits // 6) * 1.03)
    assert waiting[1] - waiting[6] >= logits - weight


@pytest.mark.parametrize(("shape", "tiles"), [(SMALL, 2), (SHAPES[1], 3), (SMALL, 8)])
def test_a_tiled_model_is_the_model(shape: ModelShape, tiles: int) -> None:
    model, _ = trained_alike(shape, Techniques(tiles=tiles))
    holders = [module for module in model.modules() if isinstance(module, TileLinear)]
    assert len(holders) == 4 * shape.layers * tiles
    assert all([*holder.parameters()] == [holder.weight] for holder in holders)


@pytest.mark.parametrize(("size", "tiles"), [(1, 3), (2, 1), (2, 2), (4, 3)])
def test_tiles_of_all_ranks_merge_to_the_whole(size: int, tiles: int) -> None:
    ranks = [Gpt(SMALL, 1, TensorParallel(rank, size), Techniques(tiles=tiles)) for rank in range(size)]
    pieces = [piece_of(parameter, rank) for rank, model in enumerate(ranks) for parameter in model.parameters()]
    whole = Gpt(SMALL, 1)
    merged = merge_pieces(reversed(pieces))
    assert merged.keys() == whole.state_dict().keys()
    for name, weight in whole.state_dict().items():
        assert torch.equal(merged[name], weight), name
    tiled = {piece.name for piece in pieces if piece.tile is not None}
    assert len(tiled) == (4 * SMALL.layers if tiles > 1 else 0)


def test_all_of_them_together_are_the_model() -> None:
    more = {"sequence_parallel": True, "tiles": 2, "activation_offload": True, "loss_chunks": 3}
    trained_alike(SMALL, Techniques(recompute="selective", **more))


class Products(TorchDispatchMode):
    """Counts the products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += called.__name__.partition(".")[0] in ("mm", "addmm")
        return called(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [SMALL, replace(SMALL, mlp="swiglu")])
def test_a_recomputed_block_does_not_repeat_its_last_product(shape: ModelShape) -> None:
    """Of its four products three, which a plan counts so, too: torch's checkpoint stops once every input is there."""
    counts = []
    for recompute in ("none", "full"):
        block = Gpt(shape, 1, None, Techniques(recompute=recompute)).blocks[0]  # type: ignore[arg-type]
        hidden = torch.ones(1, shape.seq, shape.hidden, requires_grad=True)
        with Products() as products:
            block(hidden).sum().backward()
        counts.append(products.count)
    assert counts == [12, 15]
