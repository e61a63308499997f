"""A search for layouts as JSON."""

from dataclasses import asdict
from typing import Any

from hpc_gpt.planner.figures import figures_in
from hpc_gpt.planner.search import KEPT, Candidate, Searched
from hpc_gpt.planner.table import PARTS, does_not_fit, why_slower

SCHEMA = 1
_JSON_NAMES = {"sharded_optimizer": "distributed_optimizer"}  # the JSON has had this other name since its first version
# Fields of a Training by their names in the JSON; two differ.
_JSON_FIELDS = ("tp", "pp", "dp", "micro_batch", "micro_batches", "global_batch", "zero_stage", "recompute", "offload",
                "sequence_parallel", "sharded_optimizer", "chunks", "cp", "cp_exchange", "compiled", "loss_chunks",
                "compiled_head", "one_pass_loss", "keep_residuals", "activation_offload",
                "matmul", "shard", "ep", "etp")  # fmt: skip
_FIELD_OF = {"etp": "expert_tp", "chunks": "vp", "activation_offload": "activations_on_host"}


def _candidate_tables(searched: Searched, candidate: Candidate, budget_tokens: float) -> dict[str, Any]:
    """One candidate: memory of one GPU of each stage, first to last, in GiB; time of one step, in seconds."""
    run, step, figures = candidate.training, candidate.step, figures_in(searched, candidate, budget_tokens)
    return {
        "layout": str(candidate.layout),
        "engine": run.engine,
        **{name: getattr(run, _FIELD_OF.get(name, name)) for name in _JSON_FIELDS},
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
        "against_best": why_slower(candidate, searched.candidates[0], searched.fastest)
        if step
        else does_not_fit(candidate),
    }


def search_tables(
    searched: Searched, budget_tokens: float, model: dict[str, Any], command: str, constants: dict[str, Any]
) -> dict[str, Any]:
    """The JSON of a whole search. `command` is the next command; `constants` are the ones of the prediction."""
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
        "candidates": [_candidate_tables(searched, candidate, budget_tokens) for candidate in searched.candidates],
        "too_large": [_candidate_tables(searched, candidate, budget_tokens) for candidate in searched.too_large],
        "left_out": dict(searched.left_out),
        "kept_per_layout": KEPT,
        "settings_fitting": searched.fitting,
        "settings_not_fitting": searched.not_fitting,
        "next": command,
    }  # fmt: skip
