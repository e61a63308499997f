"""Bias gradients computed with those of the outputs; residuals that a compiled model keeps; compiled edges."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.bias_gradients import gelu, gelu_gradient, join_gradients, split_qkv
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from tests.trainer.model.test_gpt import SHAPES, SMALL, tokens_of
from tests.trainer.model.test_techniques import BATCH, assert_same, gradients_of, kept, train

FUSED = Techniques(fused_bias_gradients=True)


@pytest.mark.parametrize(
    ("shape", "others"),
    [(SHAPES[2], {}), (SMALL, {"recompute": "selective"}), (SHAPES[1], {"recompute": "full"}), (SMALL, {"tiles": 3})],
)
def test_gradients_are_those_of_autograd(shape: ModelShape, others: dict[str, Any]) -> None:
    loss, gradients, usual = train(Gpt(shape, 1, techniques=Techniques(**others)), shape)
    again, fused, count = train(Gpt(shape, 1, techniques=replace(FUSED, **others)), shape)
    assert again == loss
    assert_same(fused, gradients, atol=1e-6)
    assert count <= usual


def test_without_gradients_the_loss_is_the_same() -> None:
    with torch.no_grad():
        assert Gpt(SMALL, 1, techniques=FUSED)(*tokens_of(SMALL)) == Gpt(SMALL, 1)(*tokens_of(SMALL))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_the_sums_are_rounded_once(dtype: torch.dtype) -> None:
    outputs, bias = torch.randn(40, 9, 24).to(dtype).requires_grad_(), torch.randn(24).to(dtype).requires_grad_()
    slopes = torch.randn(40, 9, 24).to(dtype)
    gelu(outputs, bias).backward(slopes)
    assert bias.grad is not None
    torch.testing.assert_close(
        bias.grad, outputs.grad.double().sum((0, 1)).to(dtype), rtol=torch.finfo(dtype).eps, atol=0
    )


def test_the_operators_hold_what_torch_asks_of_one() -> None:
    slopes, outputs = torch.randn(2, 5, 12), torch.randn(2, 5, 12)
    for operator, given in ((gelu_gradient, (slopes, outputs)), (join_gradients, (slopes, outputs, slopes[..., :12]))):
        torch.library.opcheck(operator, given)


def test_parts_are_views_of_the_outputs() -> None:
    outputs, bias = torch.randn(2, 5, 12, requires_grad=True), torch.zeros(12, requires_grad=True)
    assert all(part.untyped_storage().data_ptr() == outputs.untyped_storage().data_ptr()
               for part in split_qkv(outputs, bias))  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_a_kept_residual_is_not_computed_again(norm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for Inductor")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    shape = replace(SMALL, layers=1, norm=norm)
    size = BATCH * shape.seq * shape.hidden
    plain = Gpt(shape, 1).bfloat16()
    residuals: list[Tensor] = []
    plain.blocks[0].norm2.register_forward_pre_hook(lambda module, given: residuals.append(given[0].detach()))
    plain(*tokens_of(shape)).backward()
    found = []
    for keep in (False, True):
        torch._dynamo.reset()
        model = Gpt(shape, 1).bfloat16()
        compile_model(model, Engine(compile="block", keep_residuals=keep))
        with kept() as tensors:
            loss = model(*tokens_of(shape))
        loss.backward()
        near = [one for one in tensors if one.numel() == size and one.dtype == torch.bfloat16
                and (one.flatten() - residuals[0].flatten()).abs().max() < 0.02]  # fmt: skip
        found.append((len(near), sum(one.nbytes for one in tensors)))
        for name, gradient in gradients_of(model).items():
            torch.testing.assert_close(gradient, gradients_of(plain)[name], atol=0.02, rtol=0.05)
    (without, bytes_without), (with_it, bytes_with) = found
    assert (without, with_it) == (0, 1)
    assert bytes_with <= bytes_without
