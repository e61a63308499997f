"""What ranks do with an engine, whichever it is: steps, resumes, loads that are refused.

What they give is plain JSON. Assertions stay in the tests: a rank that fails alone would leave the others waiting.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines.protocol import build_engine
from tests.distributed.equality_cases import STEPS, micro_batches
from tests.distributed.save_now import save_now

SAVED = STEPS // 2  # checkpoints are of this step
Figures = list[tuple[float, float, bool]]


def build(resolved: Resolved, seed: int | None = None) -> Any:
    """Its engine, with the first weights of another seed if one is given."""
    if seed is not None:
        resolved = replace(resolved, train=replace(resolved.train, seed=seed))
    return build_engine(resolved, torch.device("cpu"))


def train(engine: Any, resolved: Resolved, steps: range) -> Figures:
    """(loss, norm, skipped) of each step."""
    results = []
    for step in steps:
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step, engine.context.part)))
        results.append((float(result.loss), float(result.grad_norm), bool(result.skipped)))
    return results


def new_folder(path: Path) -> Path:
    if dist.get_rank() == 0:
        path.mkdir(parents=True)
    dist.barrier()
    return path


def everyone(own: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, own)
    return values


def resume(resolved: Resolved, kept: Path, before: range = range(0)) -> tuple[Any, Any, dict[str, Any]]:
    """STEPS unbroken, against half of them, a save, and the others by an engine that began with other weights.

    Gives both engines and the figures. `before`: steps that the second one has trained when it loads.
    """
    first = build(resolved)
    train(first, resolved, range(SAVED))
    torch.manual_seed(17)
    save_now(first, new_folder(kept))
    drawn = torch.rand(3).tolist()
    unbroken = train(first, resolved, range(SAVED, STEPS))
    second = build(resolved, seed=2)
    train(second, resolved, before)
    torch.manual_seed(18)
    second.load(kept)
    step, same_random = second.step, all(everyone(torch.rand(3).tolist() == drawn))
    resumed = train(second, resolved, range(SAVED, STEPS))
    return first, second, {"step": step, "same_random": same_random, "unbroken": unbroken, "resumed": resumed}


def complaint(engine: Any, folder: Path, resolved: Resolved | None = None) -> str:
    """What loading says of a checkpoint, to an engine that has these settings."""
    own = engine._resolved
    engine._resolved = resolved or own
    try:
        engine.load(folder)
    except CheckpointError as fault:
        return str(fault)
    finally:
        engine._resolved = own
    return ""
