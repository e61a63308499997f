"""A search for layouts as JSON."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from hpc_gpt.plan.search import KEPT, Candidate, Figures, Searched
from hpc_gpt.plan.table import PARTS, does_not_fit, loses

SCHEMA = 1
_JSON_NAMES = {"sharded_optimizer": "distributed_optimizer"}  # "settled" has always had this name
# Fields of a Training that the JSON has under their own names.
_JSON_FIELDS = ("tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "zero_stage", "recompute", "offload")


def _candidate_tables(candidate: Candidate, figures: Figures | None, against: str) -> dict[str, Any]:
    """One candidate: memory of one GPU of each stage, first to last, in GiB; time of one step, in seconds."""
    run, step = candidate.training, candidate.step
    return {
        "layout": str(candidate.layout),
        "engine": run.engine,
        **{name: getattr(run, name) for name in _JSON_FIELDS},
        "sequence_parallel": run.sequence_parallel,
        "sharded_optimizer": run.sharded_optimizer,
        "chunks": run.vp,
        "cp": run.cp,
        "cp_exchange": run.cp_exchange,
        "compiled": run.compiled,
        "loss_chunks": run.loss_chunks,
        "compiled_head": run.compiled_head,
        "one_pass_loss": run.one_pass_loss,
        "keep_residuals": run.keep_residuals,
        "fused_bias_gradients": run.fused_bias_gradients,
        "activation_offload": run.activations_on_host,
        "matmul": run.matmul,
        "fits": step is not None,
        "tight": candidate.is_tight,
        "memory_gib": candidate.need_gib,
        "host_memory_gib": candidate.host_gib,
        "deciding_stage": candidate.memory.deciding,
        "stages": [
            {f"{name}_gib": value for name, value in asdict(stage).items() if name != "moment"}
            | {"allocated_gib": stage.allocated, "peak_in": stage.moment}
            for stage in candidate.memory.stages
        ],
        "time": {part.field: getattr(step, part.field) for part in PARTS} if step else None,
        "band": step.band if step else None,
        "figures": asdict(figures) if figures else None,
        "against_best": against,
    }


def search_tables(
    searched: Searched, figures: Sequence[Figures], model: dict[str, Any], command: str, constants: dict[str, Any]
) -> dict[str, Any]:
    """The whole search. `figures` are of its candidates, in order; `command` is the next one; `constants` are those of
    the prediction."""
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
        "settled": {_JSON_NAMES.get(name, name): value for name, value in question.fixed.items()},
        "candidates": [
            _candidate_tables(candidate, figures[place], loses(candidate, best or candidate))
            for place, candidate in enumerate(searched.candidates)
        ],
        "too_large": [
            _candidate_tables(candidate, None, does_not_fit(candidate)) for candidate in searched.too_large
        ],
        "left_out": dict(searched.left_out),
        "kept_per_layout": KEPT,
        "settings_fitting": searched.fitting,
        "settings_not_fitting": searched.not_fitting,
        "next": command,
    }  # fmt: skip
