"""The learning rate by step, and what the optimizer is made of."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.tensor_parallel import name_parameter
from hpc_gpt.settings.experiment import Train
from hpc_gpt.settings.model_shape import ModelShape
from hpc_gpt.train.engines.gradient_norm import GradientNorm
from hpc_gpt.train.engines.optimizer import build_optimizer, learning_rate

SMALL = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16)
TRAIN = Train(steps=100, lr=1e-3, min_lr=1e-4, warmup_steps=10)


def test_it_warms_up_from_above_zero_to_the_full_rate() -> None:
    assert learning_rate(TRAIN, 0) == pytest.approx(1e-4)
    assert learning_rate(TRAIN, 9) == pytest.approx(1e-3)
    assert learning_rate(TRAIN, 10) == pytest.approx(1e-3)


def test_it_falls_as_half_a_cosine_and_stays() -> None:
    assert learning_rate(TRAIN, 55) == pytest.approx((1e-3 + 1e-4) / 2)
    assert learning_rate(TRAIN, 100) == learning_rate(TRAIN, 1000) == pytest.approx(1e-4)


def test_constant_stays_after_the_warm_up() -> None:
    assert {learning_rate(replace(TRAIN, decay="constant"), step) for step in (10, 50, 500)} == {1e-3}


@given(steps=st.integers(1, 50), warmup=st.integers(0, 60), step=st.integers(0, 100))
def test_it_is_never_outside_zero_and_the_rate(steps: int, warmup: int, step: int) -> None:
    rate = learning_rate(replace(TRAIN, steps=steps, warmup_steps=warmup), step)
    assert 0 < rate <= TRAIN.lr * (1 + 1e-12)
    assert math.isfinite(rate)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_matrices_decay_and_vectors_do_not(name: str) -> None:
    model = Gpt(SMALL, 1)
    optimizer = build_optimizer(replace(TRAIN, optimizer=name, weight_decay=0.3), model.parameters())
    decaying, others = optimizer.param_groups
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert all(parameter.ndim == 2 for parameter in decaying["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert decaying["fused"]


def test_the_settings_reach_adamw() -> None:
    train = replace(TRAIN, beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = build_optimizer(train, [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-6


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_mode_takes_the_same_steps(name: str) -> None:
    after = {}
    for mode in ("fused", "foreach", "for-loop", "host"):
        generator = torch.Generator().manual_seed(7)
        parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((8, 4), (4,), (5, 3))]
        optimizer = build_optimizer(replace(TRAIN, optimizer=name, optimizer_mode=mode), parameters)
        flags = optimizer.defaults["fused"], optimizer.defaults["foreach"]
        assert flags == (mode in ("fused", "host"), mode == "foreach")
        for _ in range(5):
            for parameter in parameters:
                parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
        after[mode] = [parameter.detach() for parameter in parameters]
    for weights in after.values():
        for ours, theirs in zip(weights, after["for-loop"], strict=True):
            torch.testing.assert_close(ours, theirs, atol=5e-7, rtol=0)


@pytest.mark.parametrize("mode", ["fused", "foreach", "for-loop"])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_a_gradient_that_is_not_finite_moves_nothing_in_any_mode(mode: str, clip: float) -> None:
    matrix, vector = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    for parameter in (matrix, vector):
        name_parameter(parameter, "x")
    optimizer = build_optimizer(replace(TRAIN, optimizer_mode=mode), [matrix, vector])
    norm = GradientNorm(optimizer, [matrix, vector], 0, None, clip)

    def step(slope: float) -> list[torch.Tensor]:
        matrix.grad, vector.grad = torch.full((2, 2), slope), torch.ones(2)
        optimizer.step()
        moments = [optimizer.state[parameter]["exp_avg"] for parameter in (matrix, vector)]
        return [tensor.detach().clone() for tensor in (matrix, vector, *moments)]

    before = step(3.0)
    assert norm.norm is not None
    assert norm.norm.item() == pytest.approx(38**0.5)
    after = step(math.nan)
    assert norm.skipped
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    then = step(3.0)
    assert not norm.skipped
    assert not any(torch.equal(one, other) for one, other in zip(before, then, strict=True))
