"""torch.compile, by block or whole, and what it has cost so far."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from hpc_gpt.errors import ConfigError
from hpc_gpt.model.gpt import Block, Gpt
from hpc_gpt.model.tensor_parallel import VocabParallelLoss
from hpc_gpt.settings.experiment import Engine


def compile_model(module: nn.Module, engine: Engine, blocks: Iterable[nn.Module] = ()) -> None:
    """Compiles the model in place as `engine.compile` says; parameters keep their names, modules their hooks.

    By block: each layer's own computation and the loss; recomputation and activation offload stay outside. Blocks are
    alike, so the first one's code serves all of them. `blocks` names those of a model that is not ours. Whole: the
    module's forward, and a pipeline stage's loss. Hooks on what is compiled run before and after it, uncompiled: an
    engine's cannot be traced.

    Call it before an engine wraps the model, on the device it will run on. ConfigError where the backend lacks a
    compiler, or torch is too old for sequence parallelism.
    """
    if engine.compile == "none":
        return
    _check_sequences(engine)
    device = next(module.parameters()).device
    check_backend(
        engine.compile_backend, device, 'or use engine.compile_backend = "aot_eager" or engine.compile = "none"'
    )
    how: dict[str, Any] = {"backend": engine.compile_backend, "dynamic": False}
    losses = [part for part in module.modules() if isinstance(part, VocabParallelLoss)]
    if engine.compile == "whole":
        # A model of ours calls its loss itself; the loss of a stage is called by DeepSpeed.
        forwards = [module] if isinstance(module, Gpt) else [module, *losses]
    else:
        forwards = [*losses, *blocks]
        for block in module.modules():
            if isinstance(block, Block):
                block.compute = torch.compile(block.compute, **how)  # type: ignore[method-assign]
    for one in forwards:
        one.forward = torch.compile(one.forward, **how)


def _check_sequences(engine: Engine) -> None:
    """Refuses what torch before 2.13 compiles to wrong gradients (measured on 2.11.0, with aot_eager, too: up to 0.08
    off in every layer before the last exchange, the loss being right; 2.13 agrees to 1e-6; why is not known)."""
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if engine.sequence_parallel and version < (2, 13):
        raise ConfigError(
            f"engine.sequence_parallel with engine.compile = {engine.compile} gives wrong gradients on torch "
            f"{torch.__version__}",
            'use torch 2.13 or newer, engine.compile = "none", or engine.sequence_parallel = false',
        )


def compile_seconds() -> float | None:
    """Wall time torch.compile has taken in this process so far; None where nothing was compiled."""
    if "torch._dynamo.utils" not in sys.modules:
        return None
    seconds: float = torch._dynamo.utils.calculate_time_spent()["total_wall_time"]
    return seconds or None


def check_backend(backend: str, device: torch.device, instead: str) -> None:
    """Refuses Inductor where what it calls is missing: a C++ compiler on a CPU, Triton and a C compiler on a GPU.

    `instead` is what the user may do without one, the end of the ConfigError's hint.
    """
    if backend != "inductor":
        return
    if device.type == "cpu":
        wanted, names = "a C++ compiler", [os.environ.get("CXX", "g++")]
    else:
        if importlib.util.find_spec("triton") is None:
            raise ConfigError(
                'engine.compile_backend is "inductor", which needs Triton for a GPU, but it is not installed',
                f"install torch's CUDA wheel, which brings it, {instead}",
            )
        wanted, names = "a C compiler", [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f'engine.compile_backend is "inductor", which needs {wanted} for a {device.type.upper()}, but there '
            f"is no {' or '.join(names)} on PATH",
            f"put one on PATH or load its module, {instead}",
        )
