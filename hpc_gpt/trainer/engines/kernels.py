"""The use of torch.compile: which parts of a model it compiles, and which compilers it needs."""

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.experiment import Engine
from hpc_gpt.trainer.model.experts import Experts
from hpc_gpt.trainer.model.gpt import Block, Gpt
from hpc_gpt.trainer.model.router import Router
from hpc_gpt.trainer.model.vocab_loss import ChunkedLoss, OnePassLoss, VocabParallelLoss
from hpc_gpt.trainer.node_cache import drop_cut_libraries


def compile_model(module: nn.Module, engine: Engine, blocks: Iterable[nn.Module] = ()) -> None:
    """Compiles the model in place as `engine.compile` says; parameters keep their names, modules their hooks.

    By block: the computation of each layer and the loss, without recomputation and activation offload. Blocks are
    alike, so the first one's code serves all of them. `blocks` are the blocks of a model that is not ours. With edges:
    also embedding and positions together, and the last norm, head and loss together. Whole: the module's forward, and a
    pipeline stage's loss. Hooks on compiled modules run uncompiled, because an engine's hooks cannot be traced. A
    chunked loss is compiled piece by piece: traced as a whole, the logits of all pieces would be in memory at once,
    because the compiler decides what it recomputes and when. A loss in one pass has its own kernels and is not
    compiled, and neither are routers and routed experts.

    Call it before an engine wraps the model, on the device where the model will run.
    """
    if engine.compile == "none":
        return
    if folder := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        drop_cut_libraries(Path(folder))
    how: dict[str, Any] = {"backend": engine.compile_backend, "dynamic": False}
    if engine.keep_residuals:
        how["options"] = _keep_residuals()
    losses: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, (Router, Experts)):
            # The number of an expert's tokens is not known to a compiler, and the backward pass counts them.
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign,no-untyped-call]
        elif isinstance(part, ChunkedLoss):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign,no-untyped-call]
            if not isinstance(part, OnePassLoss):
                part.piece = torch.compile(part.piece, **how)  # type: ignore[method-assign]
        elif isinstance(part, VocabParallelLoss):
            losses.append(part)
    if engine.compile == "whole":
        # Our model calls its loss itself; DeepSpeed calls the loss of a stage.
        forwards = [module] if isinstance(module, Gpt) else [module, *losses]
    else:
        forwards = list(blocks)
        if engine.compile == "edges":
            assert isinstance(module, Gpt)
            for name in ("embed", "finish"):
                setattr(module, name, torch.compile(getattr(module, name), **how))
        else:
            forwards += losses
        for block in module.modules():
            if isinstance(block, Block):
                block.compute = torch.compile(block.compute, **how)  # type: ignore[method-assign]
    for one in forwards:
        one.forward = torch.compile(one.forward, **how)


def compiler(engine: Engine) -> Callable[..., Any]:
    """The compiler for a function outside the model, with tensors of fixed sizes; the identity if compile is none."""
    if engine.compile == "none":
        return lambda function: function
    return partial(torch.compile, backend=engine.compile_backend, dynamic=False, fullgraph=True)


def check_compilers(engine: Engine, device: torch.device, cp: int = 1) -> None:
    """Raises ConfigError if the backend lacks a compiler for the ranks' `device`, a technique lacks Triton, or torch is
    too old for sequence or context parallelism (`cp` ranks).

    `device` is where the computation runs: offloaded parameters are on the host.
    """
    if engine.one_pass_loss:
        check_triton("engine.one_pass_loss is true", device, "or use engine.one_pass_loss = false")
    if engine.compile != "none":
        _check_sequences(engine, cp)
        instead = 'or use engine.compile_backend = "aot_eager" or engine.compile = "none"'
        check_backend(engine.compile_backend, device, instead)


def _check_sequences(engine: Engine, cp: int) -> None:
    """Raises ConfigError for sequence parallelism on torch before 2.13, which compiles it to wrong gradients, and for
    context parallelism, which is compiled in the same way and was not measured there.

    Measured on 2.11.0, with aot_eager as well: gradients are up to 0.08 off in every layer before the last all-gather,
    while the loss is right. With 2.13 they agree to 1e-6. The reason is not known.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if cp > 1 and version < (2, 13):
        raise ConfigError(
            f"layout.cp {cp} with engine.compile = {engine.compile} is not tested on torch {torch.__version__}",
            'use torch 2.13 or newer, or engine.compile = "none"',
        )
    if engine.sequence_parallel and version < (2, 13):
        raise ConfigError(
            f"engine.sequence_parallel with engine.compile = {engine.compile} gives wrong gradients on torch "
            f"{torch.__version__}",
            'use torch 2.13 or newer, engine.compile = "none", or engine.sequence_parallel = false',
        )


def compile_seconds() -> float | None:
    """Seconds of wall time that torch.compile took in this process; None if nothing was compiled."""
    if "torch._dynamo.utils" not in sys.modules:
        return None
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"]) or None


def check_backend(backend: str, device: torch.device, instead: str) -> None:
    """Raises ConfigError if Inductor lacks a C++ compiler on a CPU, or Triton or a C compiler on a GPU.

    `instead` is the end of the hint: what the user may do without a compiler.
    """
    if backend != "inductor":
        return
    if device.type == "cpu":
        wanted, names = "a C++ compiler for a CPU", [os.environ.get("CXX", "g++")]
    else:
        check_triton('engine.compile_backend is "inductor"', device, instead)
        wanted, names = "a C compiler for a GPU", [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f'engine.compile_backend is "inductor", which needs {wanted}, but there is no {" or ".join(names)} on PATH',
            f"put one on PATH or load its module, {instead}",
        )


def check_triton(setting: str, device: torch.device, instead: str) -> None:
    """Raises ConfigError if the setting lacks Triton for a GPU; for `instead` see `check_backend`."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"{setting}, which needs Triton for a GPU, but it is not installed",
            f"install torch's CUDA wheel, which brings it, {instead}",
        )


def _keep_residuals() -> dict[str, Any]:
    """Options of torch.compile that keep the input of a norm, if it is a sum, for the backward pass.

    Without them Inductor keeps the two summands, or the sum in fp32, and computes the sum again.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.utils.checkpoint import CheckpointPolicy

    class KeepResiduals(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            aten = torch.ops.aten
            layer_norms = graph.find_nodes(op="call_function", target=aten.var_mean.correction)
            means = graph.find_nodes(op="call_function", target=aten.mean.dim)
            rms_norms = [mean.args[0] for mean in means if mean.args[0].target is aten.pow.Tensor_Scalar]
            for norm in (*layer_norms, *rms_norms):
                read = norm.args[0]
                while read.target is torch.ops.prims.convert_element_type.default:
                    read = read.args[0]
                if read.target is aten.add.Tensor:
                    read.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> str:
            return "hpc-gpt keep_residuals 2"

    return {"joint_custom_post_pass": KeepResiduals()}
