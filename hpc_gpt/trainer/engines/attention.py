"""The choice of the attention kernel: kernels are tried before the first step; a profile shows which one has run."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from tempfile import TemporaryFile
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines import private_parts, torch_private
from hpc_gpt.trainer.model.attention import Attention, expand_heads, last_mask, mix, rotation_of, split_heads
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.documents import Boundaries, Documents, masked, packed, packed_kernel

_KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {kernel.value: name for name, kernel in _KERNELS.items()}
# The names of the kernels' operators, without the suffix for a device. (The shorter name is part of the longer one.)
_OPERATORS = {
    "flash": "_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
_LAST = private_parts.LAST_QUERIES
_TAG = " hpc-gpt attention="
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AttentionKernels:
    """The kernels that SDPA may use in this run. `with kernels():` is the context in which it uses them.

    `engine.attention = "auto"` means the fastest kernel that this device has; cuDNN's comes first where torch itself
    puts it first, else after flash. Any other value means that kernel only. A kernel that torch accepts may still fail:
    that depends on versions and card as well. So the kernel that torch chooses first does a forward and a backward pass
    of the run's shape; if that fails, it is dropped and torch chooses among the others. The pass changes no generator
    and keeps no memory.

    `chosen` is the kernel's name; `failed` has the reason for each dropped kernel. Raises ConfigError if none is left.

    `expands`: the kernel does not take grouped queries, so keys and values are repeated for it
    (`trainer.model.attention.mix`). If the model has grouped queries, the kernels that take them are tried first.

    With data.mask_documents the flash kernel is torch's kernel for documents in a row, in 16 bits on a GPU from sm_80
    on. If that does not run, and on other devices, a mask is added to the scores; on a GPU the other kernels take it.
    """

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel | None = None) -> None:
        self.failed: dict[str, str] = {}
        self._kernels = _allowed(resolved, device)
        self._dtype = _DTYPES[resolved.train.dtype]
        # Compiled code is made for one length, so for the longest possible one.
        self._length = resolved.model.seq if resolved.engine.compile != "none" else None
        rotations = (rotation_of(resolved.model, layer) for layer in range(resolved.model.layers))
        rotation = next((one for one in rotations if one is not None), None)
        self._rotation = rotation and rotation.to(device)
        self._packed: Callable[..., Tensor] | None = None
        context = context or ContextParallel()
        self._part = context.part
        trial = _Trial(resolved, device, context)
        if resolved.data.mask_documents:
            self._pack(trial, resolved, device)
        if self._packed is None:
            if resolved.data.mask_documents:
                trial.documents = masked(trial.boundaries(), None, self._dtype)
            self.expands = trial.grouped and not any(map(trial.runs, _takes_groups(self._kernels)))
            trial.expands = self.expands
            if trial.grouped and not self.expands:
                self._kernels = _takes_groups(self._kernels)
        try:
            with torch.random.fork_rng([device] if device.type == "cuda" else []):
                self.chosen = self._first_that_runs(trial)
            self.last = trial.last if self.chosen == "flash" else None
        except _NoKernelError as failure:
            name, reason = resolved.engine.attention, str(failure)
            if name == "auto":
                raise ConfigError(
                    f"engine.attention is auto, but no kernel computes this model's attention here: {reason}",
                    "compare the versions of driver and cuDNN with those that torch was built for",
                ) from None
            usable = [other for other, kernel in _KERNELS.items() if trial.runs(kernel)]
            raise ConfigError(
                f"engine.attention is {name}, but that kernel cannot run here: {reason}",
                'use engine.attention = "auto"' + (f", or {' or '.join(usable)}" if usable else ""),
            ) from None
        finally:
            del trial
            if device.type == "cuda":
                torch.cuda.empty_cache()
        _key_compile_cache(self._kernels)

    def documents(self, boundaries: Boundaries) -> Documents:
        """The documents of a micro-batch on this device, in the form that the chosen kernel takes."""
        if self._packed is None:
            return masked(boundaries, self._rotation, self._dtype, self._part)
        if self._length is not None:
            torch._dynamo.mark_dynamic(boundaries.offsets, 0)
        return packed(boundaries, self._rotation, self._packed, self._length or boundaries.longest, self._part)

    def _pack(self, trial: _Trial, resolved: Resolved, device: torch.device) -> None:
        """Chooses the kernel for documents in a row if it can run; if not, drops `flash`, which takes no mask on a GPU.

        A CPU's kernel of that name takes a mask, so it stays. Raises ConfigError if only flash is allowed.
        """
        if device.type != "cuda" or SDPBackend.FLASH_ATTENTION not in self._kernels:
            return
        reason = _why_not_packed(resolved, device)
        if not reason:
            # Imported here: it imports torch's compiler.
            from torch.nn.attention.varlen import varlen_attn

            options, groups = packed_kernel(inspect.signature(varlen_attn).parameters)
            kernel: Any = functools.partial(varlen_attn, **options)
            self.expands = trial.expands = trial.grouped and not groups
            trial.documents = packed(trial.boundaries(), None, kernel, resolved.model.seq)
            failure = trial.failure(SDPBackend.FLASH_ATTENTION)
            if failure is None:
                self._packed, self._kernels = kernel, [SDPBackend.FLASH_ATTENTION]
                return
            reason = _one_line(failure)
            self.failed["flash"] = reason
        self._kernels.remove(SDPBackend.FLASH_ATTENTION)
        if not self._kernels:
            raise ConfigError(
                f"engine.attention is flash, but that kernel cannot keep documents apart here: {reason}",
                'use engine.attention = "auto", or data.mask_documents = false',
            )

    def __call__(self) -> AbstractContextManager[None]:
        return sdpa_kernel(self._kernels, set_priority=True)

    def _first_that_runs(self, trial: _Trial) -> str:
        """Returns the name of the first kernel that computes the pass, and drops the kernels that fail before it."""
        if self._packed is not None:
            return "flash"
        failure: RuntimeError | None = None
        while self._kernels:
            try:
                kernel = trial.choice(self._kernels)
            except _NoKernelError:
                if failure is None:
                    raise
                break
            failure = trial.failure(kernel)
            if failure is None:
                return _NAMES[kernel.value]
            self._kernels.remove(kernel)
            self.failed[_NAMES[kernel.value]] = _one_line(failure)
        if isinstance(failure, torch.OutOfMemoryError):
            raise failure  # the attempt's end names the cause
        raise _NoKernelError("; ".join(f"{name} failed in a trial: {reason}" for name, reason in self.failed.items()))


def prepare_attention(
    module: nn.Module, expands: bool, device: torch.device, last: Callable[..., Tensor] | None = None
) -> None:
    """Completes the attention layers of a built model: whether they expand keys and values, and the kernel for the
    `last` queries. Moves the tables of their rotation to the device that computes, wherever the engine keeps the
    weights."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.expands, part.last = expands, last
            part.rotation = part.rotation and part.rotation.to(device)


class _NoKernelError(Exception):
    """Raised if none of the allowed kernels can run. The text is the reason."""


class _Trial:
    """A trial of one layer's attention for the run's micro-batch, on this rank's heads."""

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel) -> None:
        shape, batch = resolved.model, resolved.batch.micro_batch
        self._heads = context.heads_of(shape.heads // resolved.layout.tp)
        self._key_heads = context.heads_of(max(1, shape.key_heads // resolved.layout.tp))
        self.grouped = self._key_heads < self._heads
        self.expands = False
        width = (self._heads + 2 * self._key_heads) * shape.head_width
        # Values that differ by position and channel, without a random generator.
        values = torch.linspace(-1, 1, width, device=device)
        values = values + torch.linspace(-1, 1, shape.seq, device=device)[:, None]
        self._qkv = values.to(_DTYPES[resolved.train.dtype]).repeat(batch, 1, 1).requires_grad_()
        self._sizes = batch, shape.seq
        # Fewer queries than keys, if each rank has some of the queries.
        self._queries = context.queries_of(shape.seq)
        calls_flash = self._queries < shape.seq and device.type == "cuda" and resolved.train.dtype != "fp32"
        self.last = torch_private.flash_of_last if calls_flash and private_parts.can_use(_LAST) else None
        self.documents: Documents | None = None

    def boundaries(self) -> Boundaries:
        """Two documents in each sample, the first of one token."""
        tokens = torch.zeros(self._sizes, dtype=torch.int64)
        tokens[:, 0] = 1
        return Boundaries.of(tokens, 1).to(self._qkv.device)

    def _split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as `mix` gets them, with the last queries only."""
        query, key, value = split_heads(self._qkv, self._heads, self._key_heads)
        return query[:, -self._queries :], key, value

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as the kernel gets them."""
        query, key, value = (part.transpose(1, 2) for part in self._split())
        return (query, *expand_heads(key, value, self._heads)) if self.expands else (query, key, value)

    def choice(self, kernels: list[SDPBackend]) -> SDPBackend:
        """The kernel that torch chooses among `kernels`. Raises _NoKernelError if it accepts none."""
        if not private_parts.can_use(private_parts.ATTENTION):
            return kernels[0]
        parts = self._parts()
        mask = None if self.documents is None else self.documents.mask
        if self._queries < self._sizes[1]:
            if SDPBackend.FLASH_ATTENTION in kernels and self.last is not None:
                return SDPBackend.FLASH_ATTENTION
            mask = last_mask(*parts[:2])
        with warnings.catch_warnings(record=True) as warned, sdpa_kernel(kernels, set_priority=True):
            warnings.simplefilter("always")
            try:
                choice, reason = (torch_private.chosen_attention(*parts, self.grouped and not self.expands, mask), "")
            except RuntimeError as failure:
                choice, reason = SDPBackend.ERROR.value, _one_line(failure)
        if choice in _NAMES:
            return _KERNELS[_NAMES[choice]]
        # On a GPU torch warns about each condition that a kernel does not meet.
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in warned]
        raise _NoKernelError(" ".join(reasons) or reason or "no viable backend")

    def failure(self, kernel: SDPBackend) -> RuntimeError | None:
        """The error of a forward and a backward pass by the kernel; None if it computes both."""
        try:
            with warnings.catch_warnings(), sdpa_kernel([kernel]), torch.enable_grad():
                warnings.simplefilter("ignore")
                last = self.last if kernel is SDPBackend.FLASH_ATTENTION else None
                mixed = mix(*self._split(), self.expands, self.documents, last)
                # Of a scalar: for gradients that are passed, torch imports modules that only its compiler needs.
                (gradient,) = torch.autograd.grad((mixed * mixed.detach()).sum(), self._qkv)
                # Waits for the device, where a kernel fails.
                finite = bool(mixed.isfinite().all()) and bool(gradient.isfinite().all())
        except RuntimeError as failure:
            return failure.with_traceback(None)  # the traceback holds the tensors
        return None if finite else RuntimeError("it computes values that are not finite")

    def runs(self, kernel: SDPBackend) -> bool:
        """Whether torch accepts the kernel and it computes the pass."""
        try:
            return self.failure(self.choice([kernel])) is None
        except _NoKernelError:
            return False


def _why_not_packed(resolved: Resolved, device: torch.device) -> str:
    """The reason why torch's kernel for documents in a row cannot run on the device; empty if it may run."""
    width, (major, minor) = resolved.model.head_width, torch.cuda.get_device_capability(device)
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} does not have it"
    if resolved.train.dtype == "fp32":
        return "it computes in 16 bits, but train.dtype is fp32"
    if major < 8:
        return f"it needs compute capability 8.0, but the GPU has {major}.{minor}"
    return f"it takes heads up to 256 wide, but they are {width} wide" if width > 256 else ""


def _one_line(failure: RuntimeError) -> str:
    text = str(failure).strip() or type(failure).__name__
    # If the run later ends for another reason, torch's text in the log would look like the cause.
    return "the GPU has not enough memory for it" if "out of memory" in text else text.splitlines()[0][:300]


def _allowed(resolved: Resolved, device: torch.device) -> list[SDPBackend]:
    """The kernels in the order in which they are tried."""
    name = resolved.engine.attention
    if name != "auto":
        return [_KERNELS[name]]
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    # (For ranks that gather keys, only flash takes the last queries without a mask.)
    gathers_keys = resolved.layout.cp > 1 and resolved.engine.cp_exchange == "keys"
    if device.type == "cuda" and not resolved.train.deterministic and not gathers_keys:
        order.insert(0 if _cudnn_first(device) else 1, SDPBackend.CUDNN_ATTENTION)
    return order


def _cudnn_first(device: torch.device) -> bool:
    """Whether cuDNN's kernel goes before flash: on Hopper and on Blackwell's data centre cards, with a cuDNN that does
    not read out of bounds at lengths that are not a multiple of 128 (pytorch#169849).

    Source: `check_prefer_cudnn_attention` of torch 2.13 (ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return version > 91500 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def _takes_groups(kernels: list[SDPBackend]) -> list[SDPBackend]:
    """The fast ones of the kernels that take grouped queries; `math` only if it is the only one allowed.

    Source: torch's documentation of scaled_dot_product_attention, `enable_gqa`.
    """
    if kernels == [SDPBackend.MATH]:
        return kernels
    return [kernel for kernel in kernels if kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]


def _key_compile_cache(kernels: Iterable[SDPBackend]) -> None:
    """Adds the allowed kernels to the key of torch's caches of compiled code on disk.

    A graph contains the kernel that was allowed when it was made, but the key of AOTAutograd's cache does not. Seen on
    torch 2.11: after a run with `math`, one with `flash` took the cached graph and ran math.
    """
    config = torch.compiler.config
    users = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = users + _TAG + ",".join(_NAMES[kernel.value] for kernel in kernels)


class AttentionRead:
    """Reads from a profile which attention kernel a model runs in its second training forward pass.

    A compiled graph runs the kernel that was chosen when the graph was made, perhaps by an earlier process. So torch's
    choice in this process proves nothing. Neither does the first forward pass, in which a compiler tries operators. The
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
            # Only the operators on the host are profiled: they name the kernel, on a GPU as well.
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
        names = {event.name for event in profile.function_events or ()}
        ran = (kernel for kernel, operator in _OPERATORS.items() if any(operator in name for name in names))
        # The math kernel is not one operator: compiled, it is fused with its neighbours.
        self.kernel = next(ran, "math")


@contextlib.contextmanager
def _without_kinetos_notes() -> Iterator[None]:
    """Keeps the lines that torch 2.13's profiler prints on its start and stop out of stderr; no setting can."""
    sys.stderr.flush()
    stderr = os.dup(2)
    # In memory: a full disk must not end the training.
    with os.fdopen(os.memfd_create("stderr"), "r+b") if hasattr(os, "memfd_create") else TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            printed.seek(0)
            for line in printed:
                if not line.startswith(b"USDT:"):
                    os.write(2, line)
