"""One rank of a launch: every case and scenario of its world size; rank 0 writes figures and weights.

Run as a module with RANK, WORLD_SIZE, LOCAL_RANK and the results' folder as argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.model.tensor_parallel import full_name, split_of
from hpc_gpt.train.deepspeed_3d import Deepspeed3D
from hpc_gpt.train.engine import build_engine
from tests.distributed.equality_cases import EVALUATION, STEPS, Case, cases_of, micro_batches
from tests.distributed.mutation import mutate
from tests.distributed.scenarios import scenarios_of


def run(case: Case) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(figures, merged weights) of one case; the same on every rank."""
    resolved = case.resolved
    started = time.monotonic()
    engine = build_engine(resolved, torch.device("cpu"))
    assert isinstance(engine, Deepspeed3D)
    initial, _ = merged_weights(engine)
    if case.mutation:
        mutate(engine, case.mutation)
    results, kept = [], 0
    for step in range(STEPS):
        result = engine.train_step(iter(micro_batches(resolved, engine.dp_rank, step)))
        results.append((float(result.loss), float(result.grad_norm), result.lr, bool(result.skipped)))
        kept += kept_outputs(engine)
    losses, norms, lrs, skipped = zip(*results, strict=True)
    pairs = micro_batches(resolved, engine.dp_rank, EVALUATION)
    loss_eval = float(engine.evaluate(iter(pairs), len(pairs)))
    kept += kept_outputs(engine)
    weights, apart = merged_weights(engine)
    figures = {
        "losses": losses,
        "norms": norms,
        "lrs": lrs,
        "skipped": skipped,
        "loss_eval": loss_eval,
        "step": engine.step,
        "parameters": engine.parameter_count(),
        "initial": {name: float(weight.double().sum()) for name, weight in initial.items()},
        "replicas_apart": apart,
        "kept_outputs": kept,
        "seconds": time.monotonic() - started,
    }
    return figures, weights


def kept_outputs(engine: Deepspeed3D) -> int:
    """Micro-batches whose stage output, logits on the last, still takes memory."""
    return sum(output is not None for output in engine._engine.pipe_buffers["outputs"])


def merged_weights(engine: Deepspeed3D) -> tuple[dict[str, Tensor], float]:
    """(the whole model's weights by name in fp32, the largest difference between what should be copies)."""
    own = [
        (full_name(parameter), split_of(parameter), parameter.detach().float())
        for parameter in engine.module.parameters()
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.pp_rank, engine.dp_rank, engine.tp_rank, own))
    shards: dict[str, dict[tuple[int, int], dict[int, Tensor]]] = {}
    splits = {}
    for pp, dp, tp, parameters in everyone:
        for name, split, share in parameters:
            shards.setdefault(name, {}).setdefault((pp, dp), {})[tp] = share
            splits[name] = split
    merged, apart = {}, 0.0
    for name, copies in shards.items():
        split = splits[name]
        wholes = []
        for by_rank in copies.values():
            ranked = [by_rank[tp] for tp in sorted(by_rank)]
            wholes += ranked if split is None else [split.merge(ranked)]
        merged[name] = wholes[0]
        apart = max([apart, *(float((whole - wholes[0]).abs().max()) for whole in wholes[1:])])
    return merged, apart


def main(folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    everything: dict[str, Any] = {}
    weights: dict[str, dict[str, Tensor]] = {}
    for case in cases_of(world):
        everything[case.name], weights[case.name] = run(case)
    scenarios = {name: scenario(folder) for name, scenario in scenarios_of(world).items()}
    if rank == 0:
        (folder / "scenarios.json").write_text(json.dumps(scenarios))
        torch.save(weights, folder / "weights.pt")
        (folder / "figures.json").write_text(json.dumps(everything))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads abort now and then when the interpreter ends in the usual way


if __name__ == "__main__":
    main(Path(sys.argv[1]))
