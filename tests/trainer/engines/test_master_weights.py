"""Master weights, and AdamW over flat ones in one pass: torch's AdamW, its checkpoints fused's, its norm exact."""

import math
import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Engine, Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.folders import load_safely
from hpc_gpt.trainer.checkpoints.rank_files import HostCopies, RankFiles
from hpc_gpt.trainer.checkpoints.replicated import ReplicatedCheckpoint
from hpc_gpt.trainer.engines.master_weights import HALF, FlatMasterWeights, MasterWeights, OnePassAdamW
from hpc_gpt.trainer.engines.optimizer import LossScaler, Update, build_optimizer
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, name_parameter, split_of


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
@pytest.mark.parametrize("mode", ["fused", "aot_eager"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_blocks_gradients_are_copied_in_one_launch(mode: str, tied: bool) -> None:
    """The operators that move gradients, as the profiler counts them: one a block and two, of 12 tensors a block."""
    shape = replace(ODD, layers=3, tied=tied)
    model = Gpt(shape, 1)
    masters: MasterWeights
    if mode == "fused":
        masters = MasterWeights(model.parts(), torch.bfloat16)
    else:
        masters = FlatMasterWeights(model.parts(), torch.bfloat16, torch.float32)
    tokens = torch.randint(0, shape.vocab, (2, shape.seq))
    for operator in (
        "aten::_foreach_copy_",
        "aten::_foreach_add_",
    ):  # of the first micro-batch, and of each further one
        loss = model(tokens, tokens)
        with torch.autograd.profiler.profile(use_kineto=False) as profile:
            loss.backward()
        launched = Counter(event.name for event in profile.function_events or () if _is_launched(event))
        launched.pop("aten::_foreach_zero_", None)  # of a new buffer's gaps
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
# Sizes of 61, 30 and 90 numbers leave gaps in the buffers.
ODD = ModelShape(hidden=30, layers=2, heads=2, vocab=61, seq=16)
TRAIN = Train(dtype="bf16", weight_decay=0.3, clip=0.05)
# Of a gradient's numbers; times fp16's first scale it fits fp16, and the norm is above what is clipped to.
_DRAWN = 2.0**-10


class Training:
    """A model's weights, their masters and their update, given gradients that are drawn and not computed."""

    def __init__(self, mode: str, train: Train = TRAIN, seed: int = 1, sums: str = "halves") -> None:
        """`mode`: fused, or the backend of mode compiled. `sums`: what mode compiled keeps gradients in."""
        parts, half = Gpt(ODD, seed).parts(), HALF[train.dtype]
        self.masters: MasterWeights
        self.optimizer: torch.optim.Optimizer
        if mode == "fused":
            self.masters = MasterWeights(parts, half)
            self.optimizer = build_optimizer(train, self.masters.masters)
        else:
            self.masters = flat = FlatMasterWeights(parts, half, half if sums == "halves" else torch.float32)
            self.optimizer = OnePassAdamW(train, flat, Engine("ddp", compile_backend=mode))
        self.scaler = LossScaler(train.dtype, CPU)
        self.update = Update(self.optimizer, self.masters.norms, None, train.clip, self.scaler, CPU)
        self.checkpoint = ReplicatedCheckpoint(self.masters.masters, self.optimizer)
        self.half = half

    def step(
        self, number: int, lr: float = 1e-2, bad: float | None = None, micro_batches: int = 1
    ) -> tuple[float, bool]:
        """(norm, skipped) of a step whose gradients `number` draws; `bad` is one number of them."""
        generator = torch.Generator().manual_seed(number)
        factor = 1.0 if self.scaler.factor is None else float(self.scaler.factor)
        for _ in range(micro_batches):
            for weight in self.masters.weights:
                gradient = (factor * _DRAWN * torch.randn(weight.shape, generator=generator)).to(self.half)
                if bad is not None:
                    gradient.view(-1)[-1] = bad
                weight.grad = gradient
                for hook in weight._post_accumulate_grad_hooks.values():
                    hook(weight)
            assert all(weight.grad is None for weight in self.masters.weights)
        norm, skipped = self.update.apply(lr)
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
        self.checkpoint.save(files, 0, 7, {})
        if copied:
            files.copy(HostCopies())
        files.write(folder)
        return folder

    def load(self, folder: Path) -> None:
        """As the engine does."""
        assert self.checkpoint.load(folder, 0) == (7, {})
        self.masters.copy_back()


def check_same(ours: Training, theirs: Training) -> None:
    """Masters and moments but for rounding, and halves to the bit."""
    expected = theirs.numbers()
    found = ours.numbers()
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert value.shape == expected[name].shape, name
        torch.testing.assert_close(value, expected[name], rtol=2e-6, atol=1e-6, msg=name)
    for weight, master in zip(ours.masters.weights, ours.masters.masters, strict=True):
        assert torch.equal(weight, master.to(ours.half))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.long)])
def test_it_is_torchs_adamw(backend: str) -> None:
    """Over rates that change, a clipping that acts and a step that is left out; compiled once."""
    if backend == "inductor" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler here, which Inductor needs on a CPU")
    ours, theirs = Training(backend), Training("fused")
    first = ours.numbers()
    for number in range(20):
        rate, bad = 1e-3 * (1 + number % 7), math.nan if number == 11 else None
        norm, skipped = ours.step(number, rate, bad)
        expected, left_out = theirs.step(number, rate, bad)
        assert norm == pytest.approx(expected, rel=1e-6, nan_ok=True)
        assert skipped == left_out == (number == 11)
        assert skipped or norm > TRAIN.clip
    check_same(ours, theirs)
    assert not any(torch.equal(first[name], value) for name, value in ours.numbers().items())
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("dtype", "micro_batches"), [("fp16", 2), ("fp16", 1), ("bf16", 3)])
def test_scaled_and_summed_gradients(dtype: Any, micro_batches: int) -> None:
    train = replace(TRAIN, dtype=dtype)
    sums = "halves" if micro_batches == 1 else "fp32"
    ours, theirs = Training("aot_eager", train, sums=sums), Training("fused", train)
    for number in range(4):
        pair = [each.step(number, micro_batches=micro_batches) for each in (ours, theirs)]
        assert pair[0] == pytest.approx(pair[1], rel=1e-6)
    check_same(ours, theirs)


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("dtype", "bad"), [("bf16", math.nan), ("fp16", math.inf), ("bf16", -math.inf)])
def test_a_gradient_that_is_not_finite_changes_nothing(dtype: Any, bad: float) -> None:
    """Not the first step either, whose bias corrections would be zero."""
    training = Training("aot_eager", replace(TRAIN, dtype=dtype))
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


def test_a_second_gradient_needs_sums() -> None:
    with pytest.raises(AssertionError, match="a second gradient"):
        Training("aot_eager").step(1, micro_batches=2)


def test_a_gradient_that_did_not_come_is_noticed() -> None:
    training = Training("aot_eager")
    weight = training.masters.weights[0]
    training.masters.add([weight], [torch.ones_like(weight)])
    with pytest.raises(AssertionError, match="1 of 28 gradients"):
        training.update.apply(1e-3)


@pytest.mark.long(but="first")
@pytest.mark.parametrize(
    ("source", "target", "copied"),
    [("fused", "aot_eager", False), ("aot_eager", "fused", True), ("aot_eager", "aot_eager", True),
     ("fused", "fused", True)],
)  # fmt: skip
def test_each_goes_on_from_the_others_checkpoint(tmp_path: Path, source: str, target: str, copied: bool) -> None:
    unbroken, other = Training(source), Training(target, seed=2)
    for number in range(3):
        unbroken.step(number)
    other.step(5)  # which leaves moments of another training
    other.load(unbroken.save(tmp_path / "kept", copied))
    assert all(torch.equal(value, other.numbers()[name]) for name, value in unbroken.numbers().items())
    for number in range(3, 6):
        unbroken.step(number)
        other.step(number)
    check_same(other, unbroken)


def test_the_files_are_fuseds(tmp_path: Path) -> None:
    """The same names, shapes and types, and no byte of a buffer around a view."""
    folders = {}
    for mode in ("fused", "aot_eager"):
        training = Training(mode)
        training.step(1)
        folders[mode] = training.save(tmp_path / mode)
    for file in ("weights.pt", "optimizer-00000.pt", "progress.pt"):
        fused, ours = (load_safely(folders[mode] / file) for mode in ("fused", "aot_eager"))
        assert _described(ours) == _described(fused)
        sizes = [(folders[mode] / file).stat().st_size for mode in ("fused", "aot_eager")]
        assert sizes[0] == sizes[1]
    names = [load_safely(folders[mode] / "weights.pt").keys() for mode in ("aot_eager", "fused")]
    assert names[0] == names[1]


def _described(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _described(value) for key, value in state.items()}
    return (state.shape, state.dtype, state.untyped_storage().nbytes()) if isinstance(state, Tensor) else state


def test_a_checkpoint_from_before_the_first_step(tmp_path: Path) -> None:
    """Fused has no moments then, and this one zeros."""
    for source, target in (("fused", "aot_eager"), ("aot_eager", "fused")):
        begun, other = Training(source), Training(target, seed=2)
        other.step(5)
        other.load(begun.save(tmp_path / source))
        begun.step(1)
        other.step(1)
        check_same(other, begun)


def test_what_a_training_holds_by_parameter() -> None:
    """2 + 4 + 8 bytes between steps, 2 or 4 more from the first gradient to the end of the step."""
    shape = replace(ODD, hidden=64, vocab=1024, seq=64)
    for sums, size in ((torch.bfloat16, 2), (torch.float32, 4)):
        model = Gpt(shape, 1)
        weights = list(model.parameters())
        count = sum(weight.numel() for weight in weights)
        masters = FlatMasterWeights(model.parts(), torch.bfloat16, sums)
        optimizer = OnePassAdamW(TRAIN, masters, Engine("ddp", compile_backend="aot_eager"))
        states = [value for state in optimizer.state.values() for value in state.values()]
        held = _storage_bytes([*weights, *masters.masters, *states])
        assert held == pytest.approx(14 * count, rel=0.02)
        assert all(group.gradients is None for group in masters.groups)
        for weight in weights:
            masters.add([weight], [torch.ones_like(weight)])
        gradients = [masters.gradient_of(weight) for weight in weights]
        assert _storage_bytes(gradients) == pytest.approx(size * count, rel=0.02)
        optimizer.step()
        masters.drop_gradients(masters.weights)
        assert all(group.gradients is None for group in masters.groups)


def _storage_bytes(tensors: list[Any]) -> int:
    return sum({one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}.values())


def test_the_norm_of_halves_is_exact_however_large_they_are() -> None:
    generator = torch.Generator().manual_seed(3)
    weights = [name_parameter(nn.Parameter(torch.zeros(shape)), str(shape)) for shape in ((2048, 2049), (77,))]
    masters = FlatMasterWeights([weights], torch.bfloat16, torch.bfloat16)
    gradients = [torch.randn(one.shape, generator=generator).bfloat16() for one in weights]
    masters.add(weights, gradients)
    exact = math.sqrt(sum(float(one.double().square().sum()) for one in gradients))
    optimizer = OnePassAdamW(TRAIN, masters, Engine("ddp", compile_backend="aot_eager"))
    norm, _ = Update(optimizer, masters.norms, None, 0.0, LossScaler("bf16", CPU), CPU).apply(1e-3)
    assert float(norm) == pytest.approx(exact, rel=2e-7)


def test_matrices_decay_and_vectors_do_not() -> None:
    optimizer = Training("aot_eager").optimizer
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert [{one.ndim for one in group["params"]} for group in optimizer.param_groups] == [{2}, {1}]


def test_parameters_begin_where_kernels_want_them() -> None:
    for weight in Training("aot_eager").masters.weights:
        assert weight.storage_offset() * weight.element_size() % 128 == 0
        assert weight.is_contiguous()
