"""The update that ends a step, fp16's loss scale, and fp32 masters: by themselves, on plain tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.model.tensor_parallel import Split, full_name, name_parameter, split_of
from hpc_gpt.train.engines.gradient_norm import gradients_of, norms_of
from hpc_gpt.train.engines.loss_scaler import LossScaler
from hpc_gpt.train.engines.master_weights import MasterWeights
from hpc_gpt.train.engines.update import Update

CPU = torch.device("cpu")
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "for-loop": {"foreach": False}}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda parameters, mode: torch.optim.AdamW(parameters, lr=0.1, **MODES[mode]),
    "sgd": lambda parameters, mode: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **MODES[mode]),
}
every_kind = pytest.mark.parametrize(("kind", "mode"), [(kind, mode) for kind in OPTIMIZERS for mode in MODES])


def make(kind: str, mode: str, clip: float = 0.0, dtype: str = "fp32") -> tuple[list[nn.Parameter], Update, LossScaler]:
    generator = torch.Generator().manual_seed(1)
    parameters = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]
    scaler = LossScaler(dtype, CPU)
    optimizer = OPTIMIZERS[kind](parameters, mode)
    update = Update(optimizer, lambda: norms_of(gradients_of(parameters)), None, clip, scaler, CPU)
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
@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str, mode: str, bad: float, clip: float) -> None:
    parameters, update, _ = make(kind, mode, clip)
    give(parameters, 1)
    update.apply(0.1)
    before = kept(parameters, update)
    give(parameters, 2)
    assert parameters[1].grad is not None
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
        assert weight.grad is not None
        if skipped:
            weight.grad[0] = math.inf
        theirs.step(optimizer)
        theirs.update()
        optimizer.zero_grad()
        ours.follow(torch.tensor(skipped))
        assert ours.factor == theirs.get_scale()
        scales.add(theirs.get_scale())
    assert scales == {32768.0, 16384.0, 65536.0}
    assert ours.read() == theirs.state_dict()


def test_the_scale_is_restored_with_its_count() -> None:
    first, second = LossScaler("fp16", CPU), LossScaler("fp16", CPU)
    for skipped in (True, False, False):
        first.follow(torch.tensor(skipped))
    second.restore(first.read())
    assert second.read() == first.read()
    assert second.read()["scale"] == 32768.0
    assert second.read()["_growth_tracker"] == 2
    assert second.factor == 32768.0


def test_fp32_and_bf16_are_not_scaled() -> None:
    for dtype in ("fp32", "bf16"):
        scaler = LossScaler(dtype, CPU)
        loss = torch.tensor(3.0)
        assert scaler.factor is None
        assert scaler.scale(loss) is loss
        scaler.follow(torch.tensor(True))
        scaler.restore(scaler.read())
        assert scaler.factor is None


def weights() -> list[nn.Parameter]:
    return [
        name_parameter(nn.Parameter(torch.full((4, 4), 1.0)), "one.weight", Split(0, 3)),
        name_parameter(nn.Parameter(torch.full((4,), 2.0)), "two.bias"),
    ]


def test_masters_are_what_the_weights_were() -> None:
    given = weights()
    given[0].data += 1e-4  # too little for bf16
    masters = MasterWeights(given, torch.bfloat16)
    assert [one.dtype for one in given] == [torch.bfloat16] * 2
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 1e-4))
    assert [full_name(one) for one in masters.masters] == ["one.weight", "two.bias"]
    assert [split_of(one) for one in masters.masters] == [Split(0, 3), None]
    assert masters.master_of(given[1]) is masters.masters[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_add_up_in_fp32_and_the_halves_are_dropped(dtype: torch.dtype) -> None:
    given = weights()
    masters = MasterWeights(given, dtype)
    small = 2.0**-11  # what 1 + small loses in either half
    for factor in (1.0, small, small, small):
        (given[0] * torch.tensor(factor, dtype=dtype)).sum().backward()
        assert given[0].grad is None
    gradient = masters.masters[0].grad
    assert gradient is not None
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 4), 1.0 + 3 * small))
    assert masters.masters[1].grad is None


def test_what_others_collect_stays() -> None:
    given = weights()
    masters = MasterWeights(given, torch.bfloat16)
    masters.collects = False
    given[0].sum().backward()
    assert given[0].grad is not None
    assert masters.masters[0].grad is None


def test_small_updates_reach_the_weights_through_the_masters() -> None:
    given = weights()
    masters = MasterWeights(given, torch.bfloat16)
    for _ in range(64):
        masters.masters[0].data += 2.0**-14
        masters.copy_back()
    # Not one of them by itself would have moved a bf16 of 1.
    assert torch.equal(given[0].float(), torch.full((4, 4), 1.0 + 2.0**-8).bfloat16().float())
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 2.0**-8))


def test_a_step_reads_nothing_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters, update, scaler = make("adamw", "fused", clip=1.0, dtype="fp16")
    assert scaler.factor is not None
    give(parameters, 1, float(scaler.factor))

    def refuse(*_: Any) -> None:
        raise AssertionError("a number was read from the device")

    for name in ("item", "tolist", "__bool__", "__float__"):
        monkeypatch.setattr(Tensor, name, refuse)
    norm, skipped = update.apply(0.1)
    monkeypatch.undo()
    assert norm.isfinite()
    assert not skipped
