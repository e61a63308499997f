"""What else a launch of ranks runs: resumes, gradients that are not finite, single layers. Each returns plain JSON.

Assertions stay in the tests: a rank that fails alone would leave the others waiting.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.initial_weights import InitialWeights
from hpc_gpt.model.linear import ColumnParallelLinear, RowParallelLinear
from hpc_gpt.model.tensor_parallel import Split, TensorParallel, VocabParallelEmbedding
from hpc_gpt.model.vocab_loss import VocabParallelLoss
from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.engines.deepspeed_3d import Deepspeed3D
from hpc_gpt.train.engines.protocol import build_engine
from tests.distributed.equality_cases import CLIP, STEPS, Case, micro_batches, zero
from tests.distributed.save_now import save_now

Scenario = Callable[[Path], Any]
Figures = list[tuple[float, float, bool]]


def scenarios_of(world: int) -> dict[str, Scenario]:
    """The scenarios of a launch, by name."""
    layout = {1: Layout(1, 1, 1), 2: Layout(1, 1, 2), 4: Layout(2, 2, 1), 8: Layout(2, 2, 2)}[world]
    cases = {
        "fp32 zero0": Case(layout, zero(0), clip=CLIP),
        "fp32 zero1": Case(layout, zero(1), clip=CLIP),
        "bf16": Case(layout, dtype="bf16", clip=CLIP),
    }
    found: dict[str, Scenario] = {}
    if world in (1, 2, 4):
        fp16 = Case(layout, dtype="fp16", clip=CLIP)
        found |= {"fp16": partial(train_in_fp16, fp16), "fp16 overflow": partial(overflow_in_fp16, fp16)}
        found |= {f"resume {name}": partial(resume, case) for name, case in cases.items()}
        found |= {f"not finite {name}": partial(not_finite, case) for name, case in cases.items()}
    if world == 1:
        found["not finite sgd"] = partial(not_finite, Case(layout, zero(0), optimizer="sgd"))
        found["deterministic"] = partial(deterministic, cases["fp32 zero1"])
    if world == 2:
        found["layers"] = layers
        found["padding"] = all_padding
        found |= {f"{model} {move}": partial(moved, model, move) for model in MOVED_MODELS for move in MOVES}
    if world == 4:
        found["other checkpoints"] = partial(other_checkpoints, cases["fp32 zero1"])
    return found


def _build(resolved: Resolved) -> Deepspeed3D:
    engine = build_engine(resolved, torch.device("cpu"))
    assert isinstance(engine, Deepspeed3D)
    return engine


def _train(engine: Any, resolved: Resolved, steps: range) -> Figures:
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


def _digest(engine: Deepspeed3D) -> list[float]:
    return [float(parameter.detach().double().sum()) for parameter in engine.module.parameters()]


def resume(case: Case, folder: Path) -> dict[str, Any]:
    """Six steps unbroken, against three, a save, and three more by an engine that began with other weights."""
    resolved = case.resolved
    kept = folder / f"resume {case.name}"
    if dist.get_rank() == 0:
        kept.mkdir()
    dist.barrier()
    first = _build(resolved)
    _train(first, resolved, range(3))
    torch.manual_seed(17)
    save_now(first, kept)
    drawn = torch.rand(3).tolist()
    unbroken = _train(first, resolved, range(3, 6))
    second = _build(replace(resolved, train=replace(resolved.train, seed=2)))
    torch.manual_seed(18)
    second.load(kept)
    step = second.step
    return {
        "step": step,
        "same_random": torch.rand(3).tolist() == drawn,
        "unbroken": unbroken,
        "resumed": _train(second, resolved, range(3, 6)),
        "same_weights": _digest(first) == _digest(second),
    }


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
}


def moved(model: str, move: str, folder: Path) -> dict[str, Figures]:
    """Losses and norms of steps 4 to 6: by the engine that did the first three, and by one in another layout, with
    other initial weights, that loads what it saved."""
    before, after = MOVES[move]
    kept = folder / f"{model} {move}"
    if dist.get_rank() == 0:
        kept.mkdir()
    dist.barrier()
    first, then = (Case(layout, engine, clip=CLIP, model=model).resolved for layout, engine in (before, after))
    saved = build_engine(first, torch.device("cpu"))
    _train(saved, first, range(3))
    save_now(saved, kept)
    dist.barrier()
    unbroken = _train(saved, first, range(3, 6))
    loaded = build_engine(replace(then, train=replace(then.train, seed=2)), torch.device("cpu"))
    loaded.load(kept)
    return {"unbroken": unbroken, "moved": _train(loaded, then, range(3, 6))}


def not_finite(case: Case, folder: Path) -> dict[str, Any]:
    """One step whose gradient is infinite, between good ones."""
    resolved = case.resolved
    engine = _build(resolved)
    good = _train(engine, resolved, range(2))
    before = _digest(engine)
    hook = engine.module.loss_fn.register_forward_hook(lambda _, inputs, loss: loss * math.inf)
    bad = _train(engine, resolved, range(2, 3))
    hook.remove()
    after = _digest(engine)
    return {
        "good": good,
        "bad": bad,
        "weights_kept": before == after,
        "then": _train(engine, resolved, range(3, 5)),
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
    """The table's six steps."""
    with fp16_on_cpu():
        return _train(Deepspeed3D(case.resolved, torch.device("cpu")), case.resolved, range(STEPS))


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
            results += _train(engine, resolved, range(step, step + 1))
            if hook is not None:
                hook.remove()
            results[-1] = (*results[-1], before == _digest(engine))
            scales.append(engine._engine.optimizer.loss_scale)
    return {"scales": scales, "results": results, "step": engine.step, "skipped": engine._engine.skipped_steps}


def deterministic(case: Case, folder: Path) -> dict[str, Any]:
    """The same training with and without deterministic kernels."""
    resolved = case.resolved
    usual = _train(_build(resolved), resolved, range(3))
    asked = replace(resolved, train=replace(resolved.train, deterministic=True))
    engine = _build(asked)
    on = torch.are_deterministic_algorithms_enabled()
    exact = _train(engine, asked, range(3))
    torch.use_deterministic_algorithms(False)
    return {"usual": usual, "exact": exact, "on": on}


def other_checkpoints(case: Case, folder: Path) -> dict[str, Any]:
    """What loading says of a checkpoint of another model, another dtype, another optimizer, and of a damaged one."""
    resolved = case.resolved
    kept = folder / "other"
    if dist.get_rank() == 0:
        kept.mkdir()
    dist.barrier()
    engine = _build(resolved)
    save_now(engine, kept)
    dist.barrier()
    others = {
        "model": replace(resolved, model=replace(resolved.model, hidden=64)),
        "dtype": replace(resolved, train=replace(resolved.train, dtype="bf16")),
        "optimizer": replace(resolved, train=replace(resolved.train, optimizer="sgd")),
    }
    said = {}
    for name, other in others.items():
        engine._resolved = other
        said[name] = _complaint(engine, kept)
    engine._resolved = resolved
    said["same"] = _complaint(engine, kept)
    said["missing"] = _complaint(engine, folder / "nowhere")
    dist.barrier()
    if dist.get_rank() == 0:
        (kept / "deepspeed").rename(kept / "lost")
    dist.barrier()
    said["lost"] = _complaint(engine, kept)
    return said


def _complaint(engine: Deepspeed3D, folder: Path) -> str:
    try:
        engine.load(folder)
    except CheckpointError as fault:
        return str(fault)
    return ""


def _tensor_parallel() -> TensorParallel:
    return TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD)


def layers(folder: Path) -> dict[str, float]:
    """Each split layer against torch's own: the largest difference of outputs and of gradients, relative."""
    tp, initial = _tensor_parallel(), InitialWeights(5, 1)
    far: dict[str, float] = {}
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(2, 5, 16, generator=generator)

    column = ColumnParallelLinear("c", 16, 24, tp, initial, parts=3)
    weight = initial.normal("c.weight", (24, 16)).requires_grad_()
    far |= _apart("column", tp, column, F.linear, inputs, weight, Split(0, 3), out=Split(2, 3))

    row = RowParallelLinear("r", 16, 24, tp, initial)
    weight = initial.residual("r.weight", (24, 16)).requires_grad_()
    far |= _apart("row", tp, row, F.linear, inputs, weight, Split(1), into=Split(2))

    tokens = torch.randint(0, 61, (2, 5), generator=generator)
    embedding = VocabParallelEmbedding("e", 64, 16, tp, initial)
    weight = initial.normal("e.weight", (64, 16)).requires_grad_()
    far |= _apart("embedding", tp, embedding, lambda at, by: F.embedding(at, by), tokens, weight, Split(0))

    # Large logits overflow an exponential that was not shifted by the maximum of all ranks.
    for name, scale in (("loss", 1.0), ("loss of large logits", 1e4)):
        logits = (scale * torch.randn(2, 5, 64, generator=generator)).requires_grad_()
        own = Split(2).shard(logits.detach(), tp.rank, tp.size).requires_grad_()
        loss = VocabParallelLoss(61, 64, tp)(own, tokens)
        plain = F.cross_entropy(logits[..., :61].flatten(0, 1), tokens.flatten())
        loss.backward()
        plain.backward()
        assert logits.grad is not None
        assert own.grad is not None
        far[name] = _relative(loss.detach(), plain.detach())
        far[f"{name}, gradient"] = _relative(own.grad, Split(2).shard(logits.grad, tp.rank, tp.size))
    return far


def _apart(
    name: str,
    tp: TensorParallel,
    layer: nn.Module,
    plain: Callable[[Tensor, Tensor], Tensor],
    inputs: Tensor,
    weight: Tensor,
    split: Split,
    into: Split | None = None,
    out: Split | None = None,
) -> dict[str, float]:
    """Differences of one layer from `plain`; `into` and `out` are the splits of its input and output."""
    own = (into.shard(inputs, tp.rank, tp.size) if into else inputs).clone()
    whole = inputs.clone()
    if inputs.is_floating_point():
        own.requires_grad_()
        whole.requires_grad_()
    # A layer's output is what some further matmul made, never a leaf: sums happen in place.
    result, expected = layer(own), plain(whole, weight)
    slope = torch.randn(expected.shape, generator=torch.Generator().manual_seed(4))
    result.backward(out.shard(slope, tp.rank, tp.size) if out else slope)
    expected.backward(slope)
    parameter = layer.weight
    assert isinstance(parameter, nn.Parameter)
    assert parameter.grad is not None
    assert weight.grad is not None
    far = {
        f"{name}, output": _relative(
            result.detach(), out.shard(expected.detach(), tp.rank, tp.size) if out else expected.detach()
        ),
        f"{name}, weight's gradient": _relative(parameter.grad, split.shard(weight.grad, tp.rank, tp.size)),
    }
    if own.grad is not None and whole.grad is not None:
        expected_grad = into.shard(whole.grad, tp.rank, tp.size) if into else whole.grad
        far[f"{name}, input's gradient"] = _relative(own.grad, expected_grad)
    return far


def _relative(ours: Tensor, theirs: Tensor) -> float:
    worst = ((ours - theirs).abs().max() / theirs.abs().max()).reshape(1)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst)


def all_padding(folder: Path) -> dict[str, Any]:
    """The loss where one rank's whole share of the vocabulary is padding."""
    tp = _tensor_parallel()
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
