"""A published row as a user asks `plan` about it: an experiment of engine `command` with `[plan]`, a profile of the
machine, and settings; and the answer of what the verb calls."""

import tempfile
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from bench.published.rows import LeftOut, PublishedRow
from bench.published.scores import Predicted
from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.engines.base.programs import KINDS
from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.errors import UserError
from hpc_gpt.core.settings.model_keys import Model
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.services import Plan
from hpc_gpt.core.tables import toml_value
from hpc_gpt.launcher.plan_question import read_plan_request, search_plan
from hpc_gpt.launcher.request import Request, completed
from hpc_gpt.planner.search import Searched
from hpc_gpt.planner.step_time import predict_step

# Keys of [plan] that are no field of a Training under the same name, and how a Training states them.
_OTHERWISE = {"like": "engine", "kind": "program_states", "chunks": "vp"}
_TRAINED = tuple(entry.name for entry in fields(Plan) if entry.name not in _OTHERWISE)


def predict_by_plan(row: PublishedRow) -> Predicted | LeftOut:
    """The row as `plan` predicts it: the best candidate for its layout and batch, the nearest to fitting if none fits.
    A row that is refused is left out, with the refusal."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            searched = ask_plan(row, Path(folder))
    except UserError as fault:
        return LeftOut(row.id, row.source, row.cluster, " ".join(str(fault).split()))
    candidates = searched.candidates or searched.too_large
    if not candidates:
        return LeftOut(row.id, row.source, row.cluster, "; ".join(searched.left_out))
    best = candidates[0]
    step = best.step or predict_step(best.training, searched.machine)
    return Predicted(row, step, best.memory, bool(searched.candidates))


def ask_plan(row: PublishedRow, folder: Path) -> Searched:
    """Asks `plan` about the row's layout and batch. Writes row.toml and site.toml in the folder. Raises UserError."""
    experiment, site = folder / "row.toml", folder / "site.toml"
    experiment.write_text(_toml(experiment_of(row.training)))
    profile = {"device": row.machine.device, "scheduler": "slurm", "fabric": row.fabric or None}
    profile["gpus_per_node"] = row.gpus_per_node
    site.write_text(_toml({"": profile}))
    keys = completed(settings_of(row.training), True)
    request = Request(str(experiment), str(site), None, keys, given=keys)
    return search_plan(read_plan_request(request, 300e9, None), must_fit=False)


def experiment_of(training: Training) -> dict[str, dict[str, Any]]:
    """The tables of an experiment."""
    return {
        "model": _model_of(training.shape),
        "engine": {"name": "command", "partition": training.stage_layers},
        "command": {"run": "torchrun train.py"},
        "plan": plan_of(training),
        "layout": {"gpus": training.gpus},
        "train": {"dtype": training.dtype},
    }


def plan_of(training: Training) -> dict[str, Any]:
    """The keys of [plan] in which the training differs from a plain one."""
    plain = Training.__dataclass_fields__
    kind = next((kind for (_, kind), states in KINDS.items() if states is training.program_states), None)
    table: dict[str, Any] = {"like": training.engine, "kind": kind, "chunks": training.vp if training.pp > 1 else None}
    for name in _TRAINED:
        value = getattr(training, name)
        if name == "attention":
            value = value if training.flash else "unfused"
        elif value == plain[name].default:
            continue
        table[name] = value
    return table


def _model_of(shape: ModelShape) -> dict[str, Any]:
    """Every key of [model] that has a value."""
    table = {}
    for name in (entry.name for entry in fields(Model) if entry.name not in ("preset", "hf", "rope_scaling")):
        value = getattr(shape, name, None)
        if value is None or value == "" or (value == 0 and name != "tied"):
            continue
        table[name] = value
    return table


def settings_of(training: Training) -> dict[str, Any]:
    """The degrees, the batch, and what the engine that it is like has keys for, by dotted key."""
    settings: dict[str, Any] = {
        "layout.tp": training.tp,
        "layout.pp": training.pp,
        "layout.cp": training.cp,
        "layout.dp": training.layout.dp,
        "layout.micro_batch": training.micro_batch,
        "layout.global_batch": training.global_batch,
        "layout.allow_tp_across_nodes": True,
        "engine.recompute": training.recompute,
    }
    if training.shape.experts:
        settings["layout.ep"] = training.ep
    facts = engine_named(training.engine)
    switches = {
        "sharded_optimizer": training.sharded_optimizer if training.data_ranks > 1 else None,
        "offload": training.offload,
        "compile": "block" if training.compiled else "none",
        "loss_chunks": training.loss_chunks,
        "activation_offload": training.activations_on_host,
    }
    optional = {
        "layout.etp": training.etp,
        "layout.shard": (training.shard or training.data_ranks) if facts.has_replicas else training.shard,
        "train.matmul": training.matmul if training.matmul != "none" else None,
        "engine.zero_stage": training.zero_stage if facts.has_zero else None,
        "engine.sequence_parallel": training.sequence_parallel if training.tp > 1 else None,
        "engine.cp_exchange": training.cp_exchange if training.cp > 1 else None,
        **{f"engine.{name}": value for name, value in switches.items() if name in facts.switches},
    }
    return settings | {key: value for key, value in optional.items() if value is not None}


def _toml(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """The tables as TOML; the table without a name comes at the top."""
    lines = []
    for name, table in tables.items():
        lines += [f"[{name}]"] if name else []
        lines += [f"{key} = {toml_value(value)}" for key, value in table.items() if value is not None]
    return "\n".join(lines) + "\n"
