"""What the optimizer is made of, the update that ends a step, and fp16's loss scale."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.torch_engine import LossScaler
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.optimizers import build_optimizer
from tests.trainer.engines.updates import Update
from tests.trainer.launch import settings

SMALL = ModelShape(hidden=32, layers=2, heads=4, vocab=61, seq=16)
TRAIN = Train(steps=100, lr=1e-3, min_lr=1e-4, warmup_steps=10)
CPU = torch.device("cpu")
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters, mode: torch.optim.AdamW(parameters, lr=0.1, **MODES[mode]),
    "sgd": lambda parameters, mode: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **MODES[mode]),
}
RUN = replace(settings(Path("none.tokens"), {"gpus": 1}, Engine(name="ddp")), train=TRAIN)
every_kind = pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind in OPTIMIZERS for mode in MODES])


def run_with(**changed: Any) -> Resolved:
    return replace(RUN, train=replace(TRAIN, **changed))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_matrices_decay_and_vectors_do_not(name: str) -> None:
    model = Gpt(SMALL, 1)
    optimizer = build_optimizer(run_with(optimizer=name, weight_decay=0.3), model.parameters())
    decaying, others = optimizer.param_groups
    assert decaying["weight_decay"] == 0.3
    assert others["weight_decay"] == 0.0
    assert all(parameter.ndim == 2 for parameter in decaying["params"])
    assert all(parameter.ndim == 1 for parameter in others["params"])
    assert len(decaying["params"]) + len(others["params"]) == len(list(model.parameters()))
    assert decaying["fused"]


def test_the_settings_reach_adamw() -> None:
    run = run_with(beta1=0.8, beta2=0.9, eps=1e-6)
    optimizer = build_optimizer(run, [torch.nn.Parameter(torch.zeros(2, 2)), torch.nn.Parameter(torch.zeros(2))])
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-6


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_mode_takes_the_same_steps(name: str) -> None:
    after = {}
    for mode in ("fused", "foreach", "for-loop", "host"):
        generator = torch.Generator().manual_seed(7)
        parameters = [torch.nn.Parameter(torch.randn(size, generator=generator)) for size in ((8, 4), (4,), (5, 3))]
        optimizer = build_optimizer(run_with(optimizer=name, optimizer_mode=mode), parameters)
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


def make(kind: str, mode: str, clip: float = 0.0, dtype: str = "fp32") -> tuple[list[nn.Parameter], Update, LossScaler]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]
    scaler = LossScaler(dtype, CPU)
    update = Update(OPTIMIZERS[kind](parameters, mode), parameters, None, clip, scaler)
    return parameters, update, scaler


def give(parameters: list[nn.Parameter], seed: int, scale: float = 1.0) -> float:
    """Gives the parameters gradients, scaled; returns the norm they have unscaled."""
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(one.shape, generator=generator) for one in parameters]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient * scale
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients))


def kept(parameters: list[nn.Parameter], update: Update) -> list[Tensor]:
    """Copies of the weights and of all that the optimizer remembers."""
    states = [value for state in update.optimizer.state.values() for value in state.values()]
    return [one.detach().clone() for one in (*parameters, *states)]


@every_kind
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_it_does_what_torchs_own_clipping_and_optimizer_do(kind: str, mode: str, dtype: str) -> None:
    parameters, update, scaler = make(kind, mode, clip=1.0, dtype=dtype)
    plain, _, _ = make(kind, mode)
    theirs = OPTIMIZERS[kind](plain, "for-loop")
    for step in range(3):
        factor = scaler.factor
        norm = give(parameters, step, 1.0 if factor is None else float(factor))
        measured, skipped = update.apply(0.1 / (step + 1))
        assert float(measured) == pytest.approx(norm, rel=1e-6)
        assert not skipped
        give(plain, step)
        assert norm > 1.0
        torch.nn.utils.clip_grad_norm_(plain, 1.0)
        theirs.param_groups[0]["lr"] = 0.1 / (step + 1)
        theirs.step()
    for ours, other in zip(parameters, plain, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=1e-6)


@every_kind
@pytest.mark.parametrize(("bad", "clip"), [(math.inf, 0.0), (math.nan, 1.0)])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, mode: str, bad: float, clip: float) -> None:
    parameters, update, _ = make(kind, mode, clip)
    give(parameters, 1)
    update.apply(0.1)
    before = kept(parameters, update)
    give(parameters, 2)
    parameters[1].grad[3] = bad
    norm, skipped = update.apply(0.1)
    assert skipped
    assert not norm.isfinite()
    assert all(torch.equal(one, other) for one, other in zip(before, kept(parameters, update), strict=True))
    give(parameters, 3)
    _, skipped = update.apply(0.1)
    assert not skipped
    assert not torch.equal(parameters[0], before[0])


def test_the_scale_moves_as_torchs_does() -> None:
    ours, theirs = LossScaler("fp16", CPU), torch.amp.GradScaler("cpu")
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    # Two overflows; then twice as many good steps as double the scale, and an overflow one step before the third time.
    verdicts = [True, False, True] + [False] * 4000 + [False] * 1999 + [True] + [False] * 3
    scales = set()
    for skipped in verdicts:
        theirs.scale(weight.sum()).backward()
        if skipped:
            weight.grad[0] = math.inf
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.follow(torch.tensor(skipped))
        assert ours.factor == theirs.get_scale()
        scales.add(theirs.get_scale())
    assert scales == {32768.0, 16384.0, 65536.0}
    state = theirs.state_dict()
    assert ours.read() == {"scale": state["scale"], "good_steps": state["_growth_tracker"]}


def test_the_scale_is_restored_with_its_count() -> None:
    first, second = LossScaler("fp16", CPU), LossScaler("fp16", CPU)
    for skipped in (True, False, False):
        first.follow(torch.tensor(skipped))
    second.restore(first.read())
    assert (second.read(), second.read()["scale"]) == (first.read(), 32768.0)
    assert (second.read()["good_steps"], second.factor) == (2, 32768.0)


def test_fp32_and_bf16_are_not_scaled() -> None:
    for dtype in ("fp32", "bf16"):
        scaler = LossScaler(dtype, CPU)
        loss = torch.tensor(3.0)
        assert scaler.factor is None
        assert scaler.scale(loss) is loss
        scaler.follow(torch.tensor(True))
        scaler.restore(scaler.read())
        assert scaler.factor is None


def test_a_step_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, update, scaler = make("adamw", "fused", clip=1.0, dtype="fp16")
    give(parameters, 1, float(scaler.factor))
    update.apply(0.1)  # the first step of a process looks at what torch has
    give(parameters, 2, float(scaler.factor))

    def refuse(*_: Any) -> None:
        raise AssertionError("a number was read from the device")

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, refuse)
    norm, skipped = update.apply(0.1)
    monkeypatch.undo()
    assert norm.isfinite()
    assert not skipped
