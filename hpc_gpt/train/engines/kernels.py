"""How the forward pass is computed: the choice of the attention kernel, and what torch.compile compiles."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.errors import ConfigError
from hpc_gpt.model.gpt import Block, Gpt
from hpc_gpt.model.techniques import OnePassLoss
from hpc_gpt.model.tensor_parallel import VocabParallelLoss
from hpc_gpt.settings.experiment import Engine
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.engines import private_parts

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {kernel.value: name for name, kernel in _KERNELS.items()}
# What the kernels' operators are called, with a suffix for a device.
_OPERATORS = {
    "flash": "_scaled_dot_product_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
_TAG = " hpc-gpt attention="
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def attention_kernels(resolved: Resolved, device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """A function that makes the context in which SDPA uses the kernel of `engine.attention`.

    `auto` is the fastest kernel that this device has; cuDNN's comes first, unlike torch's own default. Any other value
    is that kernel alone, and raises ConfigError if it cannot compute this model's attention here.
    """
    kernels = _allowed(resolved, device)
    try:
        _choose(resolved, device, kernels)
    except _NoKernelError as failure:
        name = resolved.engine.attention
        usable = [other for other, kernel in _KERNELS.items() if _runs(resolved, device, kernel)]
        raise ConfigError(
            f"engine.attention is {name}, but that kernel cannot run here: {failure}",
            f'use engine.attention = "auto", or {" or ".join(usable)}',
        ) from None
    _key_compile_cache(kernels)
    return lambda: sdpa_kernel(kernels, set_priority=True)


def attention_chosen(resolved: Resolved, device: torch.device) -> str:
    """The kernel that SDPA chooses under `attention_kernels`: flash, cudnn, efficient or math.

    torch's own answer for tensors of the model's shape, layout and dtype on this device. `AttentionRead` says what ran.
    """
    return _NAMES[_choose(resolved, device, _allowed(resolved, device))]


class AttentionRead:
    """Reads from a profile which attention kernel a model runs in its second training forward pass.

    A compiled graph runs the kernel that was chosen when the graph was made, perhaps by an earlier process. So torch's
    choice in this process is no proof, and neither is the first forward pass, in which a compiler tries operators. The
    second one, of one micro-batch, comes before any step is timed.

    `kernel` is flash, cudnn, efficient or math; None before that pass.
    """

    def __init__(self, module: nn.Module) -> None:
        self.kernel: str | None = None
        self._passes = 0
        self._profile: torch.autograd.profiler.profile | None = None
        self._hooks = [
            module.register_forward_pre_hook(self._begin),
            module.register_forward_hook(self._end, always_call=True),
        ]

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._passes += torch.is_grad_enabled()
        if torch.is_grad_enabled() and self._passes == 2:
            # Only operators on the host: they name the kernel, on a GPU as well.
            self._profile = torch.autograd.profiler.profile(use_kineto=False)
            with _without_kinetos_notes():
                self._profile.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._profile is None:
            return
        profile, self._profile = self._profile, None
        with _without_kinetos_notes():
            profile.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        operators = {event.name for event in profile.function_events or ()}
        ran = (name for name, operator in _OPERATORS.items() if any(operator in each for each in operators))
        # The math kernel is no operator of its own: compiled, it is fused with its neighbours.
        self.kernel = next(ran, "math")


@contextlib.contextmanager
def _without_kinetos_notes() -> Iterator[None]:
    """Leaves the lines of torch 2.13's profiler on its start and stop out of stderr; no setting does."""
    sys.stderr.flush()
    stderr = os.dup(2)
    # In memory: a full disk must not end the training.
    with os.fdopen(os.memfd_create("stderr"), "r+b") if hasattr(os, "memfd_create") else TemporaryFile() as said:
        os.dup2(said.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            said.seek(0)
            for line in said:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)


def _key_compile_cache(kernels: Iterable[SDPBackend]) -> None:
    """Keeps what is compiled for other attention kernels apart in torch's caches on disk.

    A graph holds the kernel that was allowed when it was made, but the key of AOTAutograd's cache does not. Seen on
    torch 2.11: after `math` a run with `flash` took the cached graph and ran math.
    """
    config = torch.compiler.config
    users = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = users + _TAG + ",".join(_NAMES[kernel.value] for kernel in kernels)


def _allowed(resolved: Resolved, device: torch.device) -> list[SDPBackend]:
    """The kernels in the order in which they are tried."""
    name = resolved.engine.attention
    if name != "auto":
        return [_KERNELS[name]]
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if device.type == "cuda" and not resolved.train.deterministic:
        order.insert(0, SDPBackend.CUDNN_ATTENTION)
    return order


class _NoKernelError(Exception):
    """None of the allowed kernels can run. The text is torch's reason."""


def _runs(resolved: Resolved, device: torch.device, kernel: SDPBackend) -> bool:
    try:
        _choose(resolved, device, [kernel])
    except _NoKernelError:
        return False
    return True


def _choose(resolved: Resolved, device: torch.device, kernels: list[SDPBackend]) -> int:
    """torch's choice among the kernels for a forward pass of `Attention` in training."""
    shape, tp = resolved.model, resolved.layout.tp
    # Two rows at most: the choice depends on shape, strides and dtype, and a batch of one has other strides.
    batch = min(2, resolved.batch.micro_batch)
    qkv = torch.empty(
        (batch, shape.seq, 3, shape.heads // tp, shape.head_dim),
        dtype=_DTYPES[resolved.train.dtype],
        device=device,
        requires_grad=True,
    )
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    reason = "no viable backend"
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            if private_parts.can_use(private_parts.ATTENTION):
                with sdpa_kernel(kernels, set_priority=True):
                    choice = private_parts.chosen_attention(query, key, value)
            else:
                choice = _first_that_runs(kernels, query, key, value)
        except RuntimeError as failure:
            choice, reason = SDPBackend.ERROR.value, str(failure)
    if choice not in _NAMES:
        # On a GPU torch warns of each condition that a kernel does not meet.
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in said]
        raise _NoKernelError(" ".join(reasons) or reason.splitlines()[0])
    return choice


def _first_that_runs(kernels: list[SDPBackend], query: Tensor, key: Tensor, value: Tensor) -> int:
    """The first kernel that computes this attention. Raises the RuntimeError of the last kernel if none does."""
    for kernel in kernels:
        try:
            with sdpa_kernel([kernel]):
                F.scaled_dot_product_attention(query, key, value, is_causal=True)
        except RuntimeError:
            if kernel is kernels[-1]:
                raise
        else:
            return int(kernel.value)
    return int(SDPBackend.ERROR.value)


def compile_model(module: nn.Module, engine: Engine, blocks: Iterable[nn.Module] = ()) -> None:
    """Compiles the model in place as `engine.compile` says; parameters keep their names, modules their hooks.

    By block: each layer's own computation and the loss, without recomputation and activation offload. Blocks are
    alike, so the first one's code serves all of them. `blocks` are those of a model that is not ours. With edges: also
    embedding and positions together, and the last norm, head and loss together. Whole: the module's forward, and a
    pipeline stage's loss. Hooks on compiled modules run uncompiled, because an engine's hooks cannot be traced. So does
    a loss in one pass, which has kernels of its own.

    Call it before an engine wraps the model, on the device it will run on. Raises ConfigError if the backend lacks a
    compiler, a technique lacks Triton, or torch is too old for sequence parallelism.
    """
    for key in ("one_pass_loss", "fused_bias_gradients"):
        if getattr(engine, key):
            device = next(module.parameters()).device
            check_triton(f"engine.{key} is true", device, f"or use engine.{key} = false")
    if engine.compile == "none":
        return
    _check_sequences(engine)
    private_parts.can_use(private_parts.COMPILE_TIME)  # prints its line now, not at the end
    device = next(module.parameters()).device
    check_backend(
        engine.compile_backend, device, 'or use engine.compile_backend = "aot_eager" or engine.compile = "none"'
    )
    how: dict[str, Any] = {"backend": engine.compile_backend, "dynamic": False}
    if engine.keep_residuals and private_parts.can_use(private_parts.KEPT_RESIDUALS):
        how["options"] = private_parts.keep_residuals()
    losses: list[nn.Module] = []
    for part in module.modules():
        if isinstance(part, OnePassLoss):
            part.forward = torch.compiler.disable(part.forward)  # type: ignore[method-assign,no-untyped-call]
        elif isinstance(part, VocabParallelLoss):
            losses.append(part)
    if engine.compile == "whole":
        # A model of ours calls its loss itself; the loss of a stage is called by DeepSpeed.
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


def _check_sequences(engine: Engine) -> None:
    """Raises ConfigError for sequence parallelism, which torch before 2.13 compiles to wrong gradients.

    Measured on 2.11.0, with aot_eager as well: up to 0.08 off in every layer before the last all-gather, while the loss
    is right. 2.13 agrees to 1e-6. The reason is not known.
    """
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if engine.sequence_parallel and version < (2, 13):
        raise ConfigError(
            f"engine.sequence_parallel with engine.compile = {engine.compile} gives wrong gradients on torch "
            f"{torch.__version__}",
            'use torch 2.13 or newer, engine.compile = "none", or engine.sequence_parallel = false',
        )


def compile_seconds() -> float | None:
    """Seconds of wall time that torch.compile took in this process; None if nothing was compiled."""
    if "torch._dynamo.utils" not in sys.modules or not private_parts.can_use(private_parts.COMPILE_TIME):
        return None
    return private_parts.compile_seconds() or None


def check_backend(backend: str, device: torch.device, instead: str) -> None:
    """Raises ConfigError if Inductor lacks a C++ compiler on a CPU, or Triton or a C compiler on a GPU.

    `instead` is the end of the hint: what the user may do without one.
    """
    if backend != "inductor":
        return
    if device.type == "cpu":
        wanted, names = "a C++ compiler", [os.environ.get("CXX", "g++")]
    else:
        check_triton('engine.compile_backend is "inductor"', device, instead)
        wanted, names = "a C compiler", [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f'engine.compile_backend is "inductor", which needs {wanted} for a {device.type.upper()}, but there '
            f"is no {' or '.join(names)} on PATH",
            f"put one on PATH or load its module, {instead}",
        )


def check_triton(setting: str, device: torch.device, instead: str) -> None:
    """Raises ConfigError if the setting lacks Triton for a GPU; `instead` as of `check_backend`."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            f"{setting}, which needs Triton for a GPU, but it is not installed",
            f"install torch's CUDA wheel, which brings it, {instead}",
        )
