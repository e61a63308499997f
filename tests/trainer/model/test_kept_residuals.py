"""Residuals that a compiled model keeps."""

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.model.gpt import Gpt
from tests.trainer.model.test_gpt import SMALL, tokens_of
from tests.trainer.model.test_techniques import BATCH, gradients_of, kept


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
