"""The `hpc-gpt submit` to type next, in words that a shell takes: a candidate's, or a user's first."""

from __future__ import annotations

import os
import shlex
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from hpc_gpt.cli.topics import toml_value
from hpc_gpt.errors import UserError

if TYPE_CHECKING:
    from hpc_gpt.launch.prepare import Request
    from hpc_gpt.plan.training import Training
    from hpc_gpt.settings.experiment import Experiment

_FLAGS = {"model.preset": "--model", "model.seq": "--seq"}
# Said by flags of the candidate's own.
_SETTLED = ("layout.gpus", "layout.tp", "layout.pp", "layout.dp", "layout.micro_batch", "layout.micro_batches",
            "layout.global_batch")  # fmt: skip


# The demo's, of bytes.
DEMO_VOCAB = 256
# What the planner may choose beside the engine itself, where no EXPERIMENT names it.
_CHOSEN = ("name", "zero_stage", "recompute")


def first_submit(*settings: str) -> str:
    """The demo, which runs anywhere, with some `--set`: on the user's own cluster, or without one and Slurm, here."""
    from hpc_gpt.launch.slurm import has_sbatch
    from hpc_gpt.settings.cluster import user_default

    try:
        own = os.environ.get("HPC_GPT_CLUSTER") or user_default()
    except UserError:
        own = None
    words = ["hpc-gpt", "submit", "demo", *([] if own or has_sbatch() else ["--cluster", "local"])]
    return shlex.join([*words, *(word for setting in settings for word in ("--set", setting))])


def submit_command(request: Request, base: Experiment, planned: Experiment, training: Training) -> str:
    """`base` is the experiment as its file has it, `planned` the same with what was asked for laid over.

    Without an EXPERIMENT `submit` would choose for itself: engine and dtype are named, and with another engine than the
    default experiment's, the model: the defaults of every key apply then.
    """
    from hpc_gpt.plan.training import engine_for
    from hpc_gpt.settings.experiment import Engine

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
    engine, default = engine_for(training, planned.engine), base.engine
    chosen = () if request.names_experiment else _CHOSEN
    if not request.names_experiment and engine.name != default.name and base.model.preset is not None:
        words += ["--model", str(planned.model.preset)]
        default = Engine()
    for entry in fields(Engine):
        value = getattr(engine, entry.name)
        if value != getattr(default, entry.name) or (entry.name in chosen and value is not None):
            words += _option(f"engine.{entry.name}", value)
    if not request.names_experiment and "train.dtype" not in request.given:
        words += _option("train.dtype", planned.train.dtype)
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
