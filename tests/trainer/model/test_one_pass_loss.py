"""The loss in one pass: its gradients are the usual loss's, and logits are in memory once."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.engines.build import build_engine
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model import vocab_loss
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.vocab_loss import OnePassLoss
from tests.allocated import peak, profiled
from tests.distributed.equality_cases import Case, micro_batches
from tests.trainer.model.test_gpt import SHAPES, SMALL, tokens_of
from tests.trainer.model.test_techniques import BATCH, EachTensor, assert_same, gradients_of, kept, train


@pytest.mark.parametrize(("shape", "chunks"), [(SMALL, 1), (SHAPES[1], 5), (SHAPES[2], 2), (SHAPES[2], 1)])
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
    for one_pass in (False, True):
        model = Gpt(SMALL, 1, techniques=Techniques(one_pass_loss=one_pass))
        for number, factor in enumerate((1 / 3, 0.5, -2.0)):
            (model(*tokens_of(SMALL, number)) * factor).backward()
        summed.append(gradients_of(model))
    assert_same(summed[1], summed[0], atol=1e-6)


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "dtype", "count", "products"),
    [
        ("ddp", "fp32", 1, 0), ("ddp", "bf16", 1, 0), ("fsdp", "bf16", 1, 0), ("ddp", "fp16", 1, 2),
        ("ddp", "bf16", 2, 4),
    ],
)  # fmt: skip
def test_an_engine_multiplies_no_gradient_by_one(alone, monkeypatch, name, dtype, count, products):
    made: list[Tensor] = []
    multiply = vocab_loss._Plain.multiply
    monkeypatch.setattr(
        vocab_loss._Plain, "multiply", lambda values, *how: made.append(values) or multiply(values, *how)
    )
    case = Case(Layout(1, 1, 1), Engine(name, one_pass_loss=True), dtype, micro_batches=count)
    engine: Any = build_engine(case.resolved, torch.device("cpu"))
    norms = []
    for step in range(3):
        norms.append(float(engine.train_step(iter(micro_batches(case.resolved, 0, step))).grad_norm))
    assert len(made) == 3 * products
    # The same bits as multiplied.
    monkeypatch.setattr(OnePassLoss, "unscaled", property(lambda loss: False, lambda loss, value: None))
    engine = build_engine(case.resolved, torch.device("cpu"))
    assert norms == [
        float(engine.train_step(iter(micro_batches(case.resolved, 0, step))).grad_norm) for step in range(3)
    ]


def test_the_gradient_of_the_logits_overwrites_them() -> None:
    shape = ModelShape(hidden=16, layers=1, heads=2, vocab=1000, seq=16, vocab_multiple=8)
    logits = BATCH * shape.seq * shape.vocab
    model = Gpt(shape, 1, techniques=Techniques(one_pass_loss=True))
    made: list[Tensor] = []
    with EachTensor(made.append), kept() as tensors:
        model(*tokens_of(shape)).backward()
    assert len({tensor.untyped_storage().data_ptr() for tensor in made if tensor.numel() >= logits}) == 1
    assert max(tensor.numel() for tensor in tensors) < logits


def test_of_several_pieces_the_logits_of_one_are_there() -> None:
    shape, chunks = ModelShape(hidden=8, layers=1, heads=2, vocab=4096, seq=128), 4
    model = Gpt(shape, 1, techniques=Techniques(one_pass_loss=True, loss_chunks=chunks))
    given = tokens_of(shape)
    model(*given).backward()
    model.zero_grad()
    piece = 4 * given[1].numel() * shape.padded_vocab // chunks
    assert piece < peak(profiled(lambda: model(*given).backward())) < 1.5 * piece


@pytest.mark.long(but="each value")
@pytest.mark.parametrize("how", ["none", "block", "edges"])
@pytest.mark.parametrize("chunks", [1, 3])
def test_an_evaluation_holds_the_logits_and_two_bytes_each(how: Any, chunks: int) -> None:
    shape = ModelShape(hidden=8, layers=1, heads=2, vocab=2990, seq=32, vocab_multiple=500)
    engine = Engine(compile=how, compile_backend="aot_eager", one_pass_loss=True, loss_chunks=chunks)
    model = Gpt(shape, 1, techniques=Techniques.of(engine, Train())).to(torch.bfloat16)
    compile_model(model, engine)
    given = tokens_of(shape)
    logits = given[1].numel() * shape.padded_vocab // chunks
    hidden = torch.ones(given[1].numel() // chunks, shape.hidden, dtype=torch.bfloat16)
    with torch.no_grad():
        model(*given)
        # A CPU may multiply in fp32 first, 2 + 4 bytes a logit, or copy the weight, before the loss begins.
        product = peak(profiled(lambda: model.output_layer.scores(hidden)))
        most = peak(profiled(lambda: model(*given)))
    # A few hidden states are beside the logits: 4 x 2 x 8 bytes a token, 0.02 a logit.
    assert most <= max(2 * logits + 2 * logits, product + 0.1 * logits)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 2.0**16])
def test_half_precision_is_as_near_as_the_usual_loss(dtype: torch.dtype, scale: float) -> None:
    """A loss scale comes in the backward pass. In fp16, without one, the usual loss loses small gradients."""
    _, exact, _ = train(Gpt(SMALL, 1))
    worst = []
    for each in (Techniques(), Techniques(one_pass_loss=True), Techniques(one_pass_loss=True, loss_chunks=3)):
        model = Gpt(SMALL, 1, techniques=each).to(dtype)
        (model(*tokens_of(SMALL)) * scale).backward()
        found = {name: gradient.float() / scale for name, gradient in gradients_of(model).items()}
        worst.append(max(float((found[name] - exact[name]).abs().max()) for name in exact))
    assert max(worst[1:]) <= 1.3 * worst[0]


def test_too_high_a_loss_scale_still_shows() -> None:
    model = Gpt(SMALL, 1, techniques=Techniques(one_pass_loss=True)).to(torch.float16)
    (model(*tokens_of(SMALL)) * 2.0**30).backward()
    assert not all(gradient.isfinite().all() for gradient in gradients_of(model).values())
