"""The `hpc-gpt submit` that runs a candidate, in words that a shell takes."""

from __future__ import annotations

import shlex
from dataclasses import fields
from typing import Any

from hpc_gpt.cli.experiment_options import Request
from hpc_gpt.cli.topics import toml_value
from hpc_gpt.plan.training import Training
from hpc_gpt.plan.translation import engine_for
from hpc_gpt.settings.experiment import Engine, Experiment

_FLAGS = {"model.preset": "--model", "model.seq": "--seq"}
# Said by flags of the candidate's own.
_SETTLED = ("layout.gpus", "layout.tp", "layout.pp", "layout.dp", "layout.micro_batch", "layout.micro_batches",
            "layout.global_batch")  # fmt: skip


def submit_command(request: Request, base: Experiment, planned: Engine, training: Training) -> str:
    """`base` is the experiment as its file has it, `planned` its `[engine]` with what was asked for laid over."""
    words = ["hpc-gpt", "submit"]
    if request.names_experiment:
        words.append(request.experiment)
    if request.row is not None:
        words += ["--row", request.row]
    if request.cluster is not None:
        words += ["--cluster", request.cluster]
    for key, value in request.given.items():
        if not key.startswith("engine.") and key not in _SETTLED:
            words += _option(key, value)
    words += ["--gpus", str(training.gpus), "--tp", str(training.tp), "--pp", str(training.pp)]
    words += ["--dp", str(training.dp), "--mbs", str(training.micro_batch), "--gbs", str(training.global_batch)]
    engine = engine_for(training, planned)
    for entry in fields(Engine):
        value, stands = getattr(engine, entry.name), getattr(base.engine, entry.name)
        if value != stands:
            words += _option(f"engine.{entry.name}", value)
    return shlex.join(words)


def _option(key: str, value: Any) -> list[str]:
    flags = {**_FLAGS, "engine.name": "--engine", "engine.zero_stage": "--zero-stage"}
    if key == "layout.allow_tp_across_nodes":
        return ["--allow-tp-across-nodes"] if value else []
    if key in flags and value is not None:
        return [flags[key], str(value)]
    if value is None:
        return ["--set", f"{key}="]
    return ["--set", f"{key}={value if isinstance(value, str) else toml_value(value)}"]
