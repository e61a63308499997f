"""Master weights: sums in fp32, one launch a block, and updates that reach the half weights."""

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedIndex, SavedStates, put_states
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.engines.master_weights import HALF, MasterWeights
from hpc_gpt.trainer.engines.torch_engine import LossScaler
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, name_parameter, split_of
from hpc_gpt.trainer.optimizers import build_optimizer
from tests.trainer.engines.updates import Update
from tests.trainer.launch import settings


def weights() -> list[nn.Parameter]:
    return [
        name_parameter(nn.Parameter(torch.full((4, 4), 1.0)), "one.weight", Split(0, 3)),
        name_parameter(nn.Parameter(torch.full((4,), 2.0)), "two.bias"),
    ]


def test_masters_are_what_the_weights_were() -> None:
    given = weights()
    given[0].data += 1e-4  # too little for bf16
    masters = MasterWeights([[one] for one in given], torch.bfloat16)
    assert [one.dtype for one in given] == [torch.bfloat16] * 2
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 1e-4))
    assert [full_name(one) for one in masters.masters] == ["one.weight", "two.bias"]
    assert [split_of(one) for one in masters.masters] == [Split(0, 3), None]
    assert masters.master_of(given[1]) is masters.masters[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_add_up_in_fp32_and_the_halves_are_dropped(dtype: torch.dtype) -> None:
    given = weights()
    masters = MasterWeights([[one] for one in given], dtype)
    small = 2.0**-11  # what 1 + small loses in either half
    for factor in (1.0, small, small, small):
        (given[0] * torch.tensor(factor, dtype=dtype)).sum().backward()
        assert given[0].grad is None
    gradient = masters.masters[0].grad
    assert gradient.dtype == torch.float32
    assert torch.equal(gradient, torch.full((4, 4), 1.0 + 3 * small))
    assert masters.masters[1].grad is None


def test_what_others_collect_stays() -> None:
    given = weights()
    masters = MasterWeights([[one] for one in given], torch.bfloat16)
    masters.collects = False
    given[0].sum().backward()
    assert given[0].grad is not None
    assert masters.masters[0].grad is None


@pytest.mark.long(but="each value")
@pytest.mark.parametrize("tied", [True, False])
def test_a_blocks_gradients_are_copied_in_one_launch(tied: bool) -> None:
    """The operators that move gradients, as the profiler counts them: one a block and two, of 12 tensors a block."""
    shape = replace(ODD, layers=3, tied=tied)
    model = Gpt(shape, 1)
    masters = MasterWeights(model.parts(), torch.bfloat16)
    tokens = torch.randint(0, shape.vocab, (2, shape.seq))
    for operator in (
        "aten::_foreach_copy_",
        "aten::_foreach_add_",
    ):  # of the first micro-batch, and of each further one
        loss = model(tokens, tokens)
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            loss.backward()
        launched = Counter(event.name for event in profile.function_events or () if _is_launched(event))
        assert launched == {operator: shape.layers + 2}
        assert all(weight.grad is None for weight in masters.weights)


def _is_launched(event: Any) -> bool:
    """Whether it is an operator that computes, called where gradients are complete and not by another operator."""
    without_kernel = ("empty", "empty_like", "view", "detach", "slice")
    kind, _, name = event.name.partition("::")
    at = event.cpu_parent
    return kind == "aten" and name not in without_kernel and at is not None and at.name.endswith("::AccumulateGrad")


def test_small_updates_reach_the_weights_through_the_masters() -> None:
    given = weights()
    masters = MasterWeights([[one] for one in given], torch.bfloat16)
    for _ in range(64):
        masters.masters[0].data += 2.0**-14
        masters.refresh(masters.weights)
    # Not one of them by itself would have moved a bf16 of 1.
    assert torch.equal(given[0].float(), torch.full((4, 4), 1.0 + 2.0**-8).bfloat16().float())
    assert torch.equal(masters.masters[0], torch.full((4, 4), 1.0 + 2.0**-8))


CPU = torch.device("cpu")
ODD = ModelShape(hidden=30, layers=2, heads=2, vocab=64, seq=16)
TRAIN = Train(dtype="bf16", weight_decay=0.3, clip=0.05)
# Of a gradient's numbers; times fp16's first scale it fits fp16, and the norm is above what is clipped to.
_DRAWN = 2.0**-10
RUN = settings(Path("none.tokens"), {"gpus": 1}, Engine(name="ddp"))


class Training:
    """A model's weights, their masters and their update, given gradients that are drawn and not computed."""

    def __init__(self, train: Train = TRAIN, seed: int = 1) -> None:
        self.half = HALF[train.dtype]
        self.masters = MasterWeights(Gpt(ODD, seed).parts(), self.half)
        self.optimizer = build_optimizer(replace(RUN, train=train), self.masters.masters)
        self.scaler = LossScaler(train.dtype, CPU)
        self.update = Update(self.optimizer, self.masters.masters, None, train.clip, self.scaler)
        shares = [whole_share(one, ODD) for one in self.masters.masters]
        self.states = TorchStates(self.masters.masters, shares, self.optimizer, lambda share: True)

    def step(self, number: int, bad: float | None = None) -> tuple[float, bool]:
        """(norm, skipped) of a step whose gradients `number` draws; `bad` is one number of them."""
        generator = torch.Generator().manual_seed(number)
        factor = 1.0 if self.scaler.factor is None else float(self.scaler.factor)
        for weight in self.masters.weights:
            gradient = (factor * _DRAWN * torch.randn(weight.shape, generator=generator)).to(self.half)
            if bad is not None:
                gradient.view(-1)[-1] = bad
            weight.grad = gradient
            for hook in weight._post_accumulate_grad_hooks.values():
                hook(weight)
        assert all(weight.grad is None for weight in self.masters.weights)
        norm, skipped = self.update.apply(1e-2)
        self.masters.refresh(self.masters.weights)
        self.masters.drop_gradients(self.masters.weights)
        return float(norm), bool(skipped)

    def numbers(self) -> dict[str, Tensor]:
        """Copies of masters and states, by name."""
        found = {full_name(one): one.detach().clone() for one in self.masters.masters}
        for one in self.masters.masters:
            found |= {f"{full_name(one)} {key}": value.clone() for key, value in self.optimizer.state[one].items()}
        return found

    def save(self, folder: Path, copied: bool = False) -> Path:
        """Its checkpoint, from the tensors themselves or from copies of them."""
        folder.mkdir()
        files = RankFiles()
        about = {"settings": {"layout.tp": 1}, "optimizer": self.states.numbers()}
        put_states(files, self.states.held(), about, SavedIndex())
        if copied:
            files.copy(HostCopies())
        files.write(folder)
        return folder

    def load(self, folder: Path) -> None:
        """As the engine does."""
        self.states.load(SavedStates(folder))
        self.masters.copy_back()


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("dtype", "bad"), [("bf16", math.nan), ("fp16", math.inf), ("bf16", -math.inf)])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: Any, bad: float) -> None:
    """Not the first step either, whose bias corrections would be zero."""
    training = Training(replace(TRAIN, dtype=dtype))
    for number in range(2):
        before, halves = training.numbers(), [one.detach().clone() for one in training.masters.weights]
        norm, skipped = training.step(7, bad=bad)
        assert skipped
        assert not math.isfinite(norm)
        after = training.numbers()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert all(map(torch.equal, halves, training.masters.weights))
        _, skipped = training.step(number)
        assert not skipped
        assert {float(value) for name, value in training.numbers().items() if name.endswith(" step")} == {number + 1}


@pytest.mark.parametrize("copied", [False, True])
def test_another_training_goes_on_from_its_checkpoint(tmp_path: Path, copied: bool) -> None:
    unbroken, other = Training(), Training(seed=2)
    for number in range(3):
        unbroken.step(number)
    other.step(5)  # which leaves moments of another training
    other.load(unbroken.save(tmp_path / "kept", copied))
    assert all(torch.equal(value, other.numbers()[name]) for name, value in unbroken.numbers().items())
    for number in range(3, 6):
        unbroken.step(number)
        other.step(number)
    assert all(torch.equal(value, other.numbers()[name]) for name, value in unbroken.numbers().items())
    assert all(map(torch.equal, unbroken.masters.weights, other.masters.weights))
