"""What every engine promises beyond its steps: a resume to the last digit (in another layout: `test_chains`); that a
step which is not finite leaves no trace; that a checkpoint it cannot take is refused; fp16's loss scale."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.engines.torch_engine import TorchEngine
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss
from tests.distributed.engine_states import are_equal, states_of
from tests.distributed.equality_cases import CLIP, STEPS, Case, zero
from tests.distributed.ranks import Task, each
from tests.distributed.trainings import (
    SAVED,
    build,
    complaint,
    everyone,
    new_folder,
    save_now,
    train,
)

Found = Callable[[Task], Any]
DP1, DP2, DP4, TP2, PP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 4), Layout(2, 1, 1), Layout(1, 2, 1)
TP2_DP2, TP2_PP2 = Layout(2, 1, 2), Layout(2, 2, 1)
HYBRID = Layout(1, 1, 4, shard=2)
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
SHARDED = Engine(name="ddp", sharded_optimizer=True)


def ours(layout: Layout, engine: Engine, dtype: Any = "fp32", micro_batches: int = 2, **how: Any) -> Case:
    """Of ddp or fsdp, on a model whose shards are uneven."""
    return Case(layout, engine, dtype, CLIP, model="uneven", micro_batches=micro_batches, **how)


def muon(layout: Layout, engine: Engine, dtype: Any = "fp32") -> Case:
    return ours(layout, engine, dtype, optimizer="muon", muon_dtype="bf16")


def staged(layout: Layout, stage: int = 1, dtype: Any = "fp32") -> Case:
    """Of deepspeed-3d."""
    return Case(layout, zero(stage), dtype, CLIP)


def sharded(layout: Layout, stage: int, dtype: Any = "fp32", **switches: Any) -> Case:
    """Of deepspeed-zero."""
    return Case(layout, Engine(name="deepspeed-zero", zero_stage=stage, **switches), dtype, CLIP)


def hf(stage: int = 3, **how: Any) -> Case:
    return Case(DP2, Engine(name="hf-deepspeed", zero_stage=stage), clip=CLIP, **how)


def state_of(engine: Any) -> list[Any]:
    """A number for each of every rank's tensors: parameters, and what ddp's or fsdp's optimizer works on and keeps."""
    own = [*engine.module.parameters()]
    if isinstance(engine, TorchEngine):
        own += getattr(engine, "_shards", None) or engine._parameters
        own += [value for state in engine._optimizer.state.values() for value in state.values()]
    held = [getattr(one, "ds_tensor", one) for one in own]
    local = [one.to_local() if hasattr(one, "to_local") else one for one in held]
    return everyone([float(one.detach().double().sum()) for one in local])


def scale_of(engine: Any) -> float | None:
    """fp16's loss scale; ddp and fsdp have none in other dtypes."""
    if isinstance(engine, TorchEngine):
        scale: float | None = engine._scaler.read().get("scale")
        return scale
    return float(engine._engine.optimizer.loss_scale) if engine._resolved.train.dtype == "fp16" else None


@contextmanager
def poisoned(engine: Any) -> Iterator[None]:
    """A context in which no step is finite: by one number of rank 0's gradient, ready to be used, or by the loss."""
    if not isinstance(engine, TorchEngine):
        loss = getattr(engine.module, "loss_fn", None) or engine.module.loss
        hook = loss.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
        yield
        hook.remove()
        return
    complete = engine._complete_gradients

    def with_infinity() -> None:
        complete()
        if dist.get_rank() == 0 or engine._resolved.engine.name == "ddp":  # whose gradients are the same on all
            _first_gradient(engine).view(-1)[0] = math.inf

    engine._complete_gradients = with_infinity  # type: ignore[method-assign]
    yield
    engine._complete_gradients = complete  # type: ignore[method-assign]


def _first_gradient(engine: Any) -> torch.Tensor:
    gradient: torch.Tensor = (getattr(engine, "_shards", None) or engine._parameters)[0].grad
    return gradient


def resume(folder: Path, case: Case) -> dict[str, Any]:
    """Its steps unbroken, against two of them, a save, and the others by an engine that began with other weights; then
    a step that is not finite, and two more by both."""
    resolved = case.resolved
    first = build(resolved)
    train(first, resolved, range(SAVED))
    torch.manual_seed(17)
    kept = save_now(first, new_folder(folder / f"{case.name} resumed"))
    drawn = torch.rand(3).tolist()
    unbroken = train(first, resolved, range(SAVED, resolved.train.steps))
    second = build(resolved, seed=2)
    if isinstance(second, TorchEngine):
        train(second, resolved, range(1))  # what it has trained is forgotten
    torch.manual_seed(18)
    second.load(kept)
    found = {"step": second.step, "same_random": all(everyone(torch.rand(3).tolist() == drawn)), "unbroken": unbroken}
    found["resumed"] = train(second, resolved, range(SAVED, resolved.train.steps))
    before = state_of(second)
    found["same_state"] = scale_of(second) == scale_of(first) and are_equal(states_of(second), states_of(first))
    matrices = [one for one in first.module.parameters() if len(getattr(one, "ds_shape", one.shape)) > 1]
    found["split"] = [hasattr(one, "ds_tensor") and not one.ds_persist for one in matrices]
    found["shares"] = [one.ds_tensor.numel() / one.ds_numel for one in matrices if hasattr(one, "ds_tensor")]
    with poisoned(second):
        found["bad"] = everyone(train(second, resolved, range(1)))
    found |= {"kept": before == state_of(second), "scales": everyone(scale_of(second))}
    found |= {"after_bad": train(second, resolved, range(2)), "last": second.step}
    return found | {"without_bad": train(first, resolved, range(2))}


# One of each engine in every run of the tests; what others keep, or keep in other places, in every run of CI.
SHORT_RESUMED = [
    hf(),
    sharded(TP2, 3, "bf16"),
    staged(PP2, dtype="bf16"),
    ours(DP2, DDP, "fp16"),
    ours(TP2, FSDP, "fp16"),
    muon(DP2, FSDP, "bf16"),
]
ALWAYS_RESUMED = [
    sharded(DP2, 1, "bf16"),
    sharded(DP2, 3, offload="full"),
    staged(TP2_PP2, dtype="bf16"),
    ours(DP2, SHARDED),
    ours(TP2_DP2, FSDP),
    ours(HYBRID, FSDP),
    muon(DP2, SHARDED, "fp16"),
    muon(TP2_DP2, FSDP),
]
LONG_RESUMED = [
    sharded(DP2, 0),
    sharded(DP2, 2, "bf16", offload="optimizer"),
    staged(DP2, 0),
    staged(TP2_PP2, 1),
    Case(DP1, zero(0), optimizer="sgd"),
    ours(DP1, DDP, "bf16"),
    ours(DP2, replace(FSDP, offload="full")),
    muon(DP1, DDP, "fp16"),
    muon(HYBRID, FSDP),
]
each_resumed = each(resume, SHORT_RESUMED, LONG_RESUMED, ALWAYS_RESUMED)


@each_resumed
def test_a_resumed_run_equals_an_unbroken_one_to_the_last_digit(task: Task, found: Found) -> None:
    one = found(task)
    assert (one["step"], one["resumed"]) == (SAVED, one["unbroken"])
    assert one["same_state"]
    assert one["same_random"]


@each_resumed
def test_a_step_that_is_not_finite_leaves_no_trace(task: Task, found: Found) -> None:
    """It is skipped on every rank, changes nothing but fp16's scale, which it halves, and training goes on."""
    one, case = found(task), task.given[0]
    for ((_, norm, skipped),) in one["bad"]:
        assert skipped
        assert not math.isfinite(norm)
    assert one["kept"]
    assert set(one["scales"]) == ({32768.0} if case.dtype == "fp16" else {None})
    assert one["last"] == case.resolved.train.steps + 3
    assert all(math.isfinite(norm) and not skipped for _, norm, skipped in one["after_bad"])
    # The rate is a function of the step, which a skipped one counts in: past the last step it stays what it is.
    assert one["after_bad"] == one["without_bad"] or case.dtype == "fp16"


@each(resume, SHORT_RESUMED[:2], LONG_RESUMED[:2], ALWAYS_RESUMED[:2])
def test_zero_3_and_it_alone_splits_every_matrix_over_the_ranks(task: Task, found: Found) -> None:
    one, case = found(task), task.given[0]
    assert len(one["split"]) >= 14
    assert set(one["split"]) == {case.engine.zero_stage == 3}
    assert set(one["shares"]) <= {1 / case.layout.dp}


def refuse(folder: Path, case: Case) -> dict[str, str]:
    """What loading says of checkpoints of other settings, of none, and of a damaged one."""
    resolved, engine = case.resolved, build(case.resolved)
    kept = save_now(engine, new_folder(folder / f"{case.name} refused"))
    others = {
        "same": resolved,
        "model": replace(resolved, model=replace(resolved.model, hidden=64)),
    }
    said = {name: complaint(engine, kept, other) for name, other in others.items()}
    said["missing"] = complaint(engine, folder / "nowhere")
    dist.barrier()
    if dist.get_rank() == 0:
        (kept / "states.json").rename(kept / "lost")
    dist.barrier()
    return said | {"lost": complaint(engine, kept)}


@each(refuse, [sharded(DP2, 1), ours(DP1, FSDP)])
def test_a_checkpoint_of_another_model_is_refused(task: Task, found: Found) -> None:
    said, hidden = found(task), task.given[0].resolved.model.hidden
    assert said["same"] == ""
    assert f"another model: model.hidden is {hidden} in it and 64 in this run" in said["model"]
    assert "cannot be read" in said["missing"]
    assert "cannot be read" in said["lost"]


def overflow(folder: Path, case: Case, other: Case) -> dict[str, Any]:
    """fp16's loss scale over two overflows in DeepSpeed's own bookkeeping, and what another engine makes of it."""
    resolved, engine = case.resolved, build(case.resolved)
    scales, results, kept = [scale_of(engine)], [], []
    for step in range(3):
        before = state_of(engine)
        if step:
            with poisoned(engine):
                results += train(engine, resolved, range(step, step + 1))
        else:
            results += train(engine, resolved, range(1))
        kept.append(before == state_of(engine))
        scales.append(scale_of(engine))
    saved = save_now(engine, new_folder(folder / f"{case.name} overflown"))
    then = train(engine, resolved, range(3, STEPS))
    taken = build(other.resolved, seed=2)
    taken.load(saved)
    counts = taken.step, taken._engine.skipped_steps, scale_of(taken)
    elsewhere = train(taken, other.resolved, range(3, STEPS))
    return {
        "scales": scales,
        "skipped": [skipped for _, _, skipped in results],
        "kept": kept,
        "counts": counts,
        "then": then,
        "elsewhere": elsewhere,
        "last": (engine.step, engine._engine.skipped_steps, scale_of(engine)),
    }


@each(
    overflow,
    [],
    [(staged(TP2_PP2, dtype="fp16"), staged(TP2_PP2, dtype="fp16"))],
    [(sharded(DP2, 2, "fp16"), sharded(DP2, 3, "fp16"))],
)
def test_fp16_keeps_scale_and_skipped_steps_at_another_stage(task: Task, found: Found) -> None:
    one = found(task)
    # Steps 1 and 2 overflow. Hysteresis 2 forgives the first; the second halves.
    assert one["scales"] == [65536.0] * 3 + [32768.0]
    assert one["skipped"] == one["kept"] == [False, True, True]
    assert (one["counts"], one["last"]) == ([3, 2, 32768.0], [STEPS, 2, 32768.0])
    for before, after in zip(one["then"], one["elsewhere"], strict=True):
        assert after[0] == pytest.approx(before[0], abs=1e-4)
        assert (before[2], after[2]) == (False, False)


def determine(folder: Path, case: Case) -> dict[str, Any]:
    """The same training with and without deterministic kernels."""
    resolved = case.resolved
    usual = train(build(resolved), resolved, range(3))
    asked = replace(resolved, train=replace(resolved.train, deterministic=True))
    engine = build(asked)
    return {"on": torch.are_deterministic_algorithms_enabled(), "usual": usual, "exact": train(engine, asked, range(3))}


@each(determine, [staged(DP1)])
def test_deterministic_kernels_are_asked_for_and_agree(task: Task, found: Found) -> None:
    one = found(task)
    assert one["on"]
    assert one["exact"] == one["usual"]


def pad(folder: Path, case: Case) -> dict[str, Any]:
    """The loss if one rank's whole share of the vocabulary is padding."""
    tp = TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 5, 64, generator=generator)
    tokens = torch.randint(0, 30, (2, 5), generator=generator)
    own = Split(2).shard(logits, tp.rank, tp.size).requires_grad_()
    loss = VocabParallelLoss(30, 64, tp)(own, tokens)
    loss.backward()
    assert own.grad is not None
    plain = F.cross_entropy(logits[..., :30].flatten(0, 1), tokens.flatten())
    return {"loss": float(loss.detach()), "plain": float(plain), "padding": everyone(float(own.grad.abs().max()))[1]}


@each(pad, [staged(TP2)])
def test_a_rank_may_hold_nothing_but_padding(task: Task, found: Found) -> None:
    one = found(task)
    assert (one["loss"], one["padding"]) == (pytest.approx(one["plain"], abs=1e-6), 0.0)


@each(resume, [hf()], [], [staged(TP2_PP2, dtype="bf16")])
def test_nothing_is_printed(task: Task, launch_of: Any) -> None:
    """By any task of the launch."""
    assert launch_of(task).all_output() == ""
