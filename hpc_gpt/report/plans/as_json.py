"""A search as JSON: every figure, its unit in its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_gpt.plan.figures import Figures
from hpc_gpt.plan.search import KEPT, Candidate, Searched
from hpc_gpt.report.plans.words import PARTS, does_not_fit, loses

SCHEMA = 1


def candidate_tables(candidate: Candidate, figures: Figures | None, against: str) -> dict[str, Any]:
    """One candidate. Memory is of one GPU of each stage, first to last, in GiB; time is of one step, in seconds."""
    run, step = candidate.training, candidate.step
    stages = candidate.memory.stages
    return {
        "layout": str(candidate.split),
        "engine": run.engine,
        "tp": run.tp,
        "pp": run.pp,
        "dp": run.dp,
        "micro_batch": run.micro_batch,
        "micro_batches": run.micro_batches,
        "global_batch": run.global_batch,
        "zero_stage": run.zero_stage,
        "recompute": run.recompute,
        "offload": run.offload,
        "sequence_parallel": run.sequence_parallel,
        "sharded_optimizer": run.distributed_optimizer,
        "chunks": run.vp,
        "fits": step is not None,
        "tight": candidate.is_tight,
        "memory_gib": candidate.need_gib,
        "deciding_stage": candidate.memory.deciding,
        "stages": [
            {f"{name}_gib": value for name, value in asdict(stage).items()} | {"allocated_gib": stage.allocated}
            for stage in stages
        ],
        "time": {part.field: getattr(step, part.field) for part in PARTS} if step else None,
        "band": step.band if step else None,
        "figures": asdict(figures) if figures else None,
        "against_best": against,
    }


def as_tables(
    searched: Searched, figures: Sequence[Figures], model: dict[str, Any], command: str, constants: dict[str, Any]
) -> dict[str, Any]:
    """The whole search. `figures` are of its candidates, in order; `command` is the next one, `constants` those
    that times were predicted with."""
    best = searched.candidates[0] if searched.candidates else None
    question = searched.question
    return {
        "schema": SCHEMA,
        "model": model,
        "machine": asdict(searched.machine),
        "constants": constants,
        "gpus": question.gpus,
        "dtype": question.dtype,
        "global_batch": question.global_batch,
        "engines": list(question.engines),
        "settled": dict(question.settled),
        "candidates": [
            candidate_tables(candidate, figures[place], loses(candidate, best or candidate))
            for place, candidate in enumerate(searched.candidates)
        ],
        "too_large": [
            candidate_tables(candidate, None, does_not_fit(candidate)) for candidate in searched.too_large
        ],
        "left_out": dict(searched.left_out),
        "kept_per_layout": KEPT,
        "settings_fitting": searched.fitting,
        "settings_not_fitting": searched.not_fitting,
        "next": command,
    }  # fmt: skip
