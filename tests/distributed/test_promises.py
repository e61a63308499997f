"""What every engine promises beyond its steps: a resume to the last digit, also in another layout, stage or engine;
that a step which is not finite leaves no trace; that a checkpoint it cannot take is refused; fp16's loss scale."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.engines.protocol import TorchEngine, read_weights
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss
from tests.distributed.engine_states import are_equal, states_of
from tests.distributed.equality_cases import CLIP, STEPS, Case, zero
from tests.distributed.ranks import Task, each
from tests.distributed.reference import reference
from tests.distributed.trainings import (
    SAVED,
    Figures,
    build,
    complaint,
    everyone,
    new_folder,
    on_its_ranks,
    save_now,
    train,
)
from tests.trainer.checkpoints.test_states import shown_reader

Found = Callable[[Task], Any]
DP1, DP2, DP4, TP2, PP2 = Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 1, 4), Layout(2, 1, 1), Layout(1, 2, 1)
TP2_DP2, TP2_PP2 = Layout(2, 1, 2), Layout(2, 2, 1)
CP2, CP4, TP2_CP2, PP2_CP2 = Layout(1, 1, 1, 2), Layout(1, 1, 1, 4), Layout(2, 1, 1, 2), Layout(1, 2, 1, 2)
HYBRID, TP2_HYBRID = Layout(1, 1, 4, shard=2), Layout(2, 1, 4, shard=2)
DDP, FSDP = Engine(name="ddp"), Engine(name="fsdp")
SHARDED = Engine(name="ddp", sharded_optimizer=True)


def ours(layout: Layout, engine: Engine, dtype: Any = "fp32", micro_batches: int = 2) -> Case:
    """Of ddp or fsdp, on a model whose shards are uneven."""
    return Case(layout, engine, dtype, CLIP, model="uneven", micro_batches=micro_batches)


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
        own += [value for state in engine._update.optimizer.state.values() for value in state.values()]
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
    apply = engine._update.apply

    def with_infinity(lr: float) -> Any:
        if dist.get_rank() == 0 or engine._resolved.engine.name == "ddp":  # whose gradients are the same on all
            _first_gradient(engine).view(-1)[0] = math.inf
        return apply(lr)

    engine._update.apply = with_infinity  # type: ignore[method-assign]
    yield
    engine._update.apply = apply  # type: ignore[method-assign]


def _first_gradient(engine: Any) -> torch.Tensor:
    gradient: torch.Tensor = (getattr(engine, "_shards", None) or engine._parameters)[0].grad
    return gradient


def resume(folder: Path, case: Case) -> dict[str, Any]:
    """STEPS unbroken, against half of them, a save, and the others by an engine that began with other weights; then a
    step that is not finite, and two more by both."""
    resolved = case.resolved
    first = build(resolved)
    train(first, resolved, range(SAVED))
    torch.manual_seed(17)
    kept = save_now(first, new_folder(folder / f"{case.name} resumed"))
    drawn = torch.rand(3).tolist()
    unbroken = train(first, resolved, range(SAVED, STEPS))
    second = build(resolved, seed=2)
    if isinstance(second, TorchEngine):
        train(second, resolved, range(1))  # what it has trained is forgotten
    torch.manual_seed(18)
    second.load(kept)
    found = {"step": second.step, "same_random": all(everyone(torch.rand(3).tolist() == drawn)), "unbroken": unbroken}
    found["resumed"] = train(second, resolved, range(SAVED, STEPS))
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
]
ALWAYS_RESUMED = [
    sharded(DP2, 1, "bf16"),
    sharded(DP2, 3, offload="full"),
    staged(TP2_PP2, dtype="bf16"),
    ours(DP2, SHARDED),
    ours(TP2_DP2, FSDP),
    ours(HYBRID, FSDP),
]
LONG_RESUMED = [
    sharded(DP2, 0),
    sharded(DP2, 2, "bf16", offload="optimizer"),
    staged(DP2, 0),
    staged(TP2_PP2, 1),
    Case(DP1, zero(0), optimizer="sgd"),
    ours(DP1, DDP, "bf16"),
    ours(DP2, replace(FSDP, offload="full")),
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
    assert one["last"] == STEPS + 3
    assert all(math.isfinite(norm) and not skipped for _, norm, skipped in one["after_bad"])
    # The rate is a function of the step, which a skipped one counts in: past the last step it stays what it is.
    assert one["after_bad"] == one["without_bad"] or case.dtype == "fp16"


@each(resume, SHORT_RESUMED[:2], LONG_RESUMED[:2], ALWAYS_RESUMED[:2])
def test_zero_3_and_it_alone_splits_every_matrix_over_the_ranks(task: Task, found: Found) -> None:
    one, case = found(task), task.given[0]
    assert len(one["split"]) >= 14
    assert set(one["split"]) == {case.engine.zero_stage == 3}
    assert set(one["shares"]) <= {1 / case.layout.dp}


def move(folder: Path, before: Case, after: Case) -> dict[str, Any]:
    """Steps from SAVED on: by the engine that did those before, and by one in another layout, with other initial
    weights, that loads what it saved. Each has as many of the ranks as its layout asks for."""
    kept, name = folder / f"{before.name} to {after.name}", f"{before.name} {after.name}"
    unbroken = on_its_ranks(folder, name, before.layout.gpus, lambda: _leave(before, kept))
    taken = on_its_ranks(folder, f"{name} after", after.layout.gpus, lambda: _take(after, kept))
    return {"unbroken": unbroken} | (taken or {})


def _leave(case: Case, kept: Path) -> Figures:
    engine = build(case.resolved)
    train(engine, case.resolved, range(SAVED))
    save_now(engine, new_folder(kept))
    return train(engine, case.resolved, range(SAVED, STEPS))


def _take(case: Case, kept: Path) -> dict[str, Any]:
    engine = build(case.resolved, seed=2)
    engine.load(kept)
    skipped = 0 if isinstance(engine, TorchEngine) else engine._engine.skipped_steps
    step = engine.step
    return {"step": step, "skipped": skipped, "moved": train(engine, case.resolved, range(SAVED, STEPS))}


def of(model: str, before: Case, after: Case) -> tuple[Case, Case]:
    """The move of a model of another shape."""
    return replace(before, model=model), replace(after, model=model)


def of_experts(before: Case, after: Case) -> tuple[Case, ...]:
    """The move of a dense layer and two with experts, whose biases that choose go on, too."""
    return tuple(replace(case, model="glm4_moe", tied=False, balance="bias") for case in (before, after))


def clipped(layout: Layout, engine: Engine) -> Case:
    return Case(layout, engine, clip=CLIP)


TILED = sharded(DP2, 3, tiles=3)
# A move is a save and a load, each of one engine and layout: here is each of them, and each pair of engines.
SHORT_MOVED = [
    (staged(PP2), sharded(DP2, 1)),
    (TILED, staged(TP2, 0)),
    of("llama", hf(3), hf(1)),
    (ours(DP2, SHARDED), ours(DP1, DDP)),
    of_experts(clipped(DP2, FSDP), clipped(TP2, FSDP)),
]
ALWAYS_MOVED = [
    of("smollm3", staged(TP2), staged(PP2)),  # both ranks of tp 2 use its one head of keys
    of("qwen2", sharded(DP2, 3), sharded(TP2, 1)),
    (ours(DP2, DDP), ours(TP2, FSDP)),
    (ours(TP2, FSDP), ours(DP2, SHARDED)),
    (sharded(DP2, 2), staged(TP2_PP2)),
    (TILED, sharded(TP2, 3, tiles=2)),
    (staged(TP2_PP2), staged(DP2)),
    (staged(TP2_PP2, 0), sharded(DP2, 0)),
    (sharded(TP2_DP2, 3), staged(PP2)),
    (staged(PP2), sharded(TP2_DP2, 3)),
    (ours(HYBRID, FSDP), ours(TP2_DP2, FSDP)),
    (ours(TP2_DP2, FSDP), ours(DP1, FSDP)),
    (ours(DP4, FSDP), ours(HYBRID, FSDP)),
]
LONG_MOVED = [
    (ours(TP2_HYBRID, FSDP), ours(DP4, FSDP)),
    (ours(TP2_DP2, FSDP), ours(TP2_HYBRID, FSDP)),
    (ours(DP1, FSDP, "fp16"), ours(HYBRID, FSDP, "fp16")),
    (ours(DP2, DDP, "fp16"), ours(DP2, FSDP, "fp16")),
    (ours(DP2, FSDP, "fp16"), ours(DP1, DDP, "fp16")),
    of("qwen2", staged(PP2), sharded(TP2, 3)),
    of("smollm3", clipped(TP2, FSDP), clipped(DP2, FSDP)),
    of("qwen3", clipped(DP2, FSDP), clipped(TP2, FSDP)),
    of("qwen2", clipped(DP2, FSDP), clipped(CP2, FSDP)),
    of("llama", sharded(TP2, 3), sharded(CP2, 1)),
    # Between parts of the sequences.
    of("qwen3", clipped(CP4, DDP), clipped(Layout(1, 1, 2, 2), replace(DDP, cp_exchange="keys"))),
    of("qwen3", clipped(TP2_CP2, FSDP), clipped(CP4, FSDP)),
    of("qwen3", sharded(CP4, 1), sharded(TP2_CP2, 3)),
    of("qwen3", staged(PP2_CP2), staged(CP4)),
    of_experts(staged(PP2), sharded(TP2, 1)),
    of_experts(sharded(DP2, 3), staged(PP2)),
    of_experts(clipped(DP2, DDP), clipped(CP2, DDP)),
]


@each(move, SHORT_MOVED, LONG_MOVED, ALWAYS_MOVED)
def test_a_checkpoint_goes_on_in_another_layout_stage_or_engine(task: Task, found: Found, launch_of: Any) -> None:
    one, (before, after) = found(task), task.given
    exact = "fp16" not in (before.dtype, after.dtype)
    losses, norms, skipped = zip(*one["moved"], strict=True)
    assert (one["step"], one["skipped"]) == (SAVED, 0)
    assert losses == pytest.approx([step[0] for step in one["unbroken"]], abs=2e-6 if exact else 1e-2, rel=0)
    assert norms == pytest.approx([step[1] for step in one["unbroken"]], rel=1e-5 if exact else 5e-2)
    assert not any(skipped)
    # Whole weights are read without any ranks.
    kept = launch_of(task).folder / f"{before.name} to {after.name}"
    weights = dict(read_weights(kept, before.resolved))
    plain = reference(before.resolved, SAVED).weights
    shown = shown_reader()(kept)
    assert shown.keys() == weights.keys()
    assert all(np.array_equal(shown[name], weight) for name, weight in weights.items())
    assert weights.keys() == plain.keys() | {*before.resolved.model.buffer_names}
    for name, whole in plain.items():
        weight = weights[name]
        assert weight.dtype == torch.float32
        # The K part of a QKV bias has no gradient but rounding, which Adam makes large.
        limit = 1e-2 if not exact else 1e-4 if name.endswith("qkv.bias") else 1e-5
        assert (weight - whole[: len(weight)]).abs().max() <= limit, name


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
