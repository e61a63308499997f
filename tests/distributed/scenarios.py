"""What else a launch of ranks runs: resumes, gradients that are not finite, fp16's loss scale; plain JSON each."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss
from hpc_gpt.trainer.train.engines.deepspeed_3d import Deepspeed3D
from tests.distributed.equality_cases import CLIP, STEPS, Case, zero
from tests.distributed.save_now import save_now
from tests.distributed.trainings import SAVED, Figures, build, complaint, new_folder, resume, train

Scenario = Callable[[Path], Any]


def scenarios_of(world: int) -> dict[str, Scenario]:
    """The scenarios of a launch, by name."""
    layout = {1: Layout(1, 1, 1), 2: Layout(1, 1, 2), 3: Layout(1, 3, 1), 4: Layout(2, 2, 1), 8: Layout(2, 2, 2)}[world]
    cases = {
        "fp32 zero0": Case(layout, zero(0), clip=CLIP),
        "fp32 zero1": Case(layout, zero(1), clip=CLIP),
        "bf16": Case(layout, dtype="bf16", clip=CLIP),
    }
    found: dict[str, Scenario] = {}
    if world in (1, 2, 4):
        fp16 = Case(layout, dtype="fp16", clip=CLIP)
        found |= {"fp16": partial(train_in_fp16, fp16), "fp16 overflow": partial(overflow_in_fp16, fp16)}
        found |= {f"resume {name}": partial(resume_all, case) for name, case in cases.items()}
        found |= {f"not finite {name}": partial(not_finite, case) for name, case in cases.items()}
    if world == 1:
        found["not finite sgd"] = partial(not_finite, Case(layout, zero(0), optimizer="sgd"))
        found["deterministic"] = partial(deterministic, cases["fp32 zero1"])
    found |= {f"parts {move}": partial(moved, "qwen3", move) for move in part_moves(world)}
    if world == 2:
        found["padding"] = all_padding
        found |= {f"{model} {move}": partial(moved, model, move) for model in MOVED_MODELS for move in MOVES}
    if world == 4:
        found["other checkpoints"] = partial(other_checkpoints, cases["fp32 zero1"])
    return found


def _digest(engine: Deepspeed3D) -> list[float]:
    return [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]


def resume_all(case: Case, folder: Path) -> dict[str, Any]:
    first, second, found = resume(case.resolved, folder / f"resume {case.name}")
    return found | {"same_weights": _digest(first) == _digest(second)}


# Shapes other than GPT-2's, each saved in the first layout and resumed in the second. Both ranks of SmolLM3's tp 2 use
# one head of keys.
MOVED_MODELS = ("llama", "qwen2", "qwen3", "smollm3")
_ZERO = partial(Engine, name="deepspeed-zero")
MOVES = {
    "tp2 to pp2": ((Layout(2, 1, 1), zero(1)), (Layout(1, 2, 1), zero(1))),
    "pp2 to tp2 of ZeRO-3": ((Layout(1, 2, 1), zero(1)), (Layout(2, 1, 1), _ZERO(zero_stage=3))),
    "ZeRO-3 dp2 to ZeRO-1 tp2": ((Layout(1, 1, 2), _ZERO(zero_stage=3)), (Layout(2, 1, 1), _ZERO(zero_stage=1))),
    "fsdp tp2 to dp2": ((Layout(2, 1, 1), Engine(name="fsdp")), (Layout(1, 1, 2), Engine(name="fsdp"))),
    "fsdp dp2 to tp2": ((Layout(1, 1, 2), Engine(name="fsdp")), (Layout(2, 1, 1), Engine(name="fsdp"))),
    "hf ZeRO-3 to ZeRO-1": (
        (Layout(1, 1, 2), Engine(name="hf-deepspeed", zero_stage=3)),
        (Layout(1, 1, 2), Engine(name="hf-deepspeed", zero_stage=1)),
    ),
    "fsdp dp2 to cp2": ((Layout(1, 1, 2), Engine(name="fsdp")), (Layout(1, 1, 1, 2), Engine(name="fsdp"))),
    "ZeRO-3 tp2 to ZeRO-1 cp2": ((Layout(2, 1, 1), _ZERO(zero_stage=3)), (Layout(1, 1, 1, 2), _ZERO(zero_stage=1))),
}
# One of each engine, for `make test`.
SHORT_MOVES = ("tp2 to pp2", "ZeRO-3 dp2 to ZeRO-1 tp2", "fsdp dp2 to tp2", "hf ZeRO-3 to ZeRO-1")
# Between parts of the sequences, on two ranks or four.
PART_MOVES = {
    "ddp cp2 to dp2": ((Layout(1, 1, 1, 2), Engine(name="ddp")), (Layout(1, 1, 2), Engine(name="ddp"))),
    "ddp cp2 of heads to keys": (
        (Layout(1, 1, 1, 2), Engine(name="ddp")),
        (Layout(1, 1, 1, 2), Engine(name="ddp", cp_exchange="keys")),
    ),
    "cp2 to pp2": ((Layout(1, 1, 1, 2), zero(1)), (Layout(1, 2, 1), zero(1))),
    "ddp cp4 to cp2-dp2": ((Layout(1, 1, 1, 4), Engine(name="ddp")), (Layout(1, 1, 2, 2), Engine(name="ddp"))),
    "fsdp tp2-cp2 to cp4": ((Layout(2, 1, 1, 2), Engine(name="fsdp")), (Layout(1, 1, 1, 4), Engine(name="fsdp"))),
    "cp4 of ZeRO-1 to tp2-cp2 of ZeRO-3": (
        (Layout(1, 1, 1, 4), _ZERO(zero_stage=1)),
        (Layout(2, 1, 1, 2), _ZERO(zero_stage=3)),
    ),
    "pp2-cp2 to cp4": ((Layout(1, 2, 1, 2), zero(1)), (Layout(1, 1, 1, 4), zero(1))),
}


def part_moves(world: int) -> list[str]:
    """Those of `PART_MOVES` on so many ranks."""
    return [move for move, (_, (layout, _)) in PART_MOVES.items() if layout.gpus == world]


def moved(model: str, move: str, folder: Path) -> dict[str, Figures]:
    """Losses and norms from step SAVED on: by the engine that did those before, and by one in another layout, with
    other initial weights, that loads what it saved."""
    before, after = (MOVES | PART_MOVES)[move]
    kept = new_folder(folder / f"{model} {move}")
    first, then = (Case(layout, engine, clip=CLIP, model=model).resolved for layout, engine in (before, after))
    saved = build(first)
    train(saved, first, range(SAVED))
    save_now(saved, kept)
    dist.barrier()
    unbroken = train(saved, first, range(SAVED, STEPS))
    loaded = build(then, seed=2)
    loaded.load(kept)
    return {"unbroken": unbroken, "moved": train(loaded, then, range(SAVED, STEPS))}


def not_finite(case: Case, folder: Path) -> dict[str, Any]:
    """One step whose gradient is infinite, between good ones."""
    resolved = case.resolved
    engine = build(resolved)
    good = train(engine, resolved, range(2))
    before = _digest(engine)
    hook = engine.module.loss_fn.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
    bad = train(engine, resolved, range(2, 3))
    hook.remove()
    after = _digest(engine)
    return {
        "good": good,
        "bad": bad,
        "weights_kept": before == after,
        "then": train(engine, resolved, range(3, 5)),
        "step": engine.step,
    }


@contextlib.contextmanager
def fp16_on_cpu() -> Iterator[None]:
    """DeepSpeed refuses fp16 on a CPU, and so do we; here it is told otherwise. torch computes it rightly."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    supported = kind.is_fp16_supported
    kind.is_fp16_supported = lambda self: True
    try:
        yield
    finally:
        kind.is_fp16_supported = supported


def train_in_fp16(case: Case, folder: Path) -> list[tuple[float, float, bool]]:
    """The table's steps."""
    with fp16_on_cpu():
        return train(Deepspeed3D(case.resolved, torch.device("cpu")), case.resolved, range(STEPS))


def overflow_in_fp16(case: Case, folder: Path) -> dict[str, Any]:
    """The loss scale over two overflows, in DeepSpeed's own bookkeeping."""
    resolved = case.resolved
    with fp16_on_cpu():
        engine = Deepspeed3D(resolved, torch.device("cpu"))
        scales, results = [engine._engine.optimizer.loss_scale], []
        for step in range(STEPS):
            hook = None
            if step in (1, 2):
                hook = engine.module.loss_fn.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
            before = _digest(engine)
            results += train(engine, resolved, range(step, step + 1))
            if hook is not None:
                hook.remove()
            results[-1] = (*results[-1], before == _digest(engine))
            scales.append(engine._engine.optimizer.loss_scale)
    return {"scales": scales, "results": results, "step": engine.step, "skipped": engine._engine.skipped_steps}


def deterministic(case: Case, folder: Path) -> dict[str, Any]:
    """The same training with and without deterministic kernels."""
    resolved = case.resolved
    usual = train(build(resolved), resolved, range(3))
    asked = replace(resolved, train=replace(resolved.train, deterministic=True))
    engine = build(asked)
    on = torch.are_deterministic_algorithms_enabled()
    exact = train(engine, asked, range(3))
    torch.use_deterministic_algorithms(False)
    return {"usual": usual, "exact": exact, "on": on}


def other_checkpoints(case: Case, folder: Path) -> dict[str, Any]:
    """What loading says of a checkpoint of another model, another dtype, another optimizer, and of a damaged one."""
    resolved, kept = case.resolved, new_folder(folder / "other")
    engine = build(resolved)
    save_now(engine, kept)
    dist.barrier()
    others = {
        "same": resolved,
        "model": replace(resolved, model=replace(resolved.model, hidden=64)),
        "dtype": replace(resolved, train=replace(resolved.train, dtype="bf16")),
        "optimizer": replace(resolved, train=replace(resolved.train, optimizer="sgd")),
    }
    said = {name: complaint(engine, kept, other) for name, other in others.items()}
    said["missing"] = complaint(engine, folder / "nowhere")
    dist.barrier()
    if dist.get_rank() == 0:
        (kept / "deepspeed").rename(kept / "lost")
    dist.barrier()
    return said | {"lost": complaint(engine, kept)}


def all_padding(folder: Path) -> dict[str, Any]:
    """The loss where one rank's whole share of the vocabulary is padding."""
    tp = TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(2, 5, 64, generator=generator)
    tokens = torch.randint(0, 30, (2, 5), generator=generator)
    own = Split(2).shard(logits, tp.rank, tp.size).requires_grad_()
    loss = VocabParallelLoss(30, 64, tp)(own, tokens)
    loss.backward()
    assert own.grad is not None
    padding = own.grad.abs().max().reshape(1) if tp.rank == 1 else torch.zeros(1)
    dist.all_reduce(padding, dist.ReduceOp.MAX)
    plain = F.cross_entropy(logits[..., :30].flatten(0, 1), tokens.flatten())
    return {"loss": float(loss), "plain": float(plain), "padding_gradient": float(padding)}
