"""The loss in one pass: its gradients are the usual loss's, and logits are in memory once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpc_gpt.errors import ConfigError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.settings.experiment import Engine, natures
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.settings.resolve import config_hash
from hpc_gpt.train.engines.kernels import compile_model
from tests.distributed.equality_cases import Case
from tests.model.test_gpt import SHAPES, SMALL, tokens_of
from tests.model.test_techniques import BATCH, assert_same, gradients_of, kept, train


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_its_gradients_are_the_usual_losss(shape: ModelShape, chunks: int) -> None:
    loss, gradients, _ = train(Gpt(shape, 1), shape)
    model = Gpt(shape, 1, techniques=Techniques(one_pass_loss=True, loss_chunks=chunks))
    again, one_pass, _ = train(model, shape)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(one_pass, gradients, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(model(*tokens_of(shape)), loss, atol=1e-6, rtol=0)


def test_micro_batches_add_up_each_by_its_own_factor() -> None:
    summed = []
    for techniques in (Techniques(), Techniques(one_pass_loss=True)):
        model = Gpt(SMALL, 1, techniques=techniques)
        for number, factor in enumerate((1 / 3, 0.5, -2.0)):
            (model(*tokens_of(SMALL, number)) * factor).backward()
        summed.append(gradients_of(model))
    assert_same(summed[1], summed[0], atol=1e-6)


@pytest.mark.parametrize("how", ["block", "whole"])
def test_a_compiled_model_leaves_it_as_it_is(how: Any) -> None:
    loss, gradients, _ = train(Gpt(SMALL, 1))
    techniques = Techniques(one_pass_loss=True)
    model = Gpt(SMALL, 1, techniques=techniques)
    compile_model(model, Engine(compile=how, compile_backend="aot_eager", one_pass_loss=True))
    again, compiled, _ = train(model)
    torch.testing.assert_close(again, loss, atol=1e-6, rtol=0)
    assert_same(compiled, gradients, atol=1e-6)


class Made(TorchDispatchMode):
    """Notes the memory of every tensor of a size that an operation makes."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements = elements
        self.found: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.found += [leaf for leaf in leaves if leaf.numel() >= self.elements]
        return result


def test_the_gradient_of_the_logits_overwrites_them() -> None:
    shape = ModelShape(hidden=16, layers=1, heads=2, vocab=1000, seq=16, vocab_multiple=8)
    logits = BATCH * shape.seq * shape.vocab
    model = Gpt(shape, 1, techniques=Techniques(one_pass_loss=True))
    with Made(logits) as made, kept() as tensors:
        model(*tokens_of(shape)).backward()
    assert len({tensor.untyped_storage().data_ptr() for tensor in made.found}) == 1
    assert max(tensor.numel() for tensor in tensors) < logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_half_precision_is_as_near_as_the_usual_loss(dtype: torch.dtype, scale: float) -> None:
    """A loss scale comes in the backward pass. In fp16, without one, the usual loss loses small gradients."""
    _, exact, _ = train(Gpt(SMALL, 1))
    worst = []
    for techniques in (Techniques(), Techniques(one_pass_loss=True), Techniques(one_pass_loss=True, loss_chunks=3)):
        model = Gpt(SMALL, 1, techniques=techniques).to(dtype)
        (model(*tokens_of(SMALL)) * scale).backward()
        found = {name: gradient.float() / scale for name, gradient in gradients_of(model).items()}
        worst.append(max(float((found[name] - exact[name]).abs().max()) for name in exact))
    assert max(worst[1:]) <= 1.3 * worst[0]


def test_too_high_a_loss_scale_still_shows() -> None:
    model = Gpt(SMALL, 1, techniques=Techniques(one_pass_loss=True)).to(torch.float16)
    (model(*tokens_of(SMALL)) * 2.0**30).backward()
    assert not all(gradient.isfinite().all() for gradient in gradients_of(model).values())


def test_a_gpu_without_triton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    model = Gpt(SMALL, 1, techniques=Techniques(one_pass_loss=True))
    engine = Engine(one_pass_loss=True)
    compile_model(model, engine)
    monkeypatch.setattr(torch.nn.Parameter, "device", torch.device("cuda"))
    with pytest.raises(ConfigError, match="one_pass_loss is true, which needs Triton for a GPU") as refused:
        compile_model(model, engine)
    assert "one_pass_loss = false" in refused.value.hint


def test_a_run_with_it_counts_as_another_one() -> None:
    """Without it the hash is as before the key (tests/specimens compares those of earlier runs)."""
    usual = Case(Layout(1, 1, 1), Engine("ddp")).resolved
    changed = replace(usual, engine=replace(usual.engine, one_pass_loss=True))
    assert config_hash(usual) != config_hash(changed)
    assert natures(Engine)["one_pass_loss"].resume == "free"
