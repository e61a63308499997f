"""The choice of the attention kernel: each is tried before the first step; what ran is read from a profile."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
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
# What the kernels' operators are called, with a suffix for a device. (The shorter one is within the other, too.)
_OPERATORS = {
    "flash": "_flash_attention",
    "cudnn": "_scaled_dot_product_cudnn_attention",
    "efficient": "_scaled_dot_product_efficient_attention",
}
_LAST = private_parts.LAST_QUERIES
_TAG = " hpc-gpt attention="
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AttentionKernels:
    """The kernels that SDPA may use in this run. `with kernels():` is the context in which it does.

    `engine.attention = "auto"` is the fastest kernel that this device has; cuDNN's comes first where torch itself puts
    it first, else after flash. Any other value is that kernel alone. That torch accepts a kernel is no proof that it
    runs: it depends on versions and card as well. So the kernel that torch chooses first does a forward and a backward
    pass of the run's own shape; if that fails, it is dropped and torch chooses among the others. The pass changes no
    generator and keeps no memory.

    `chosen` is the kernel's name; `failed` has the reason for each dropped one. Raises ConfigError if none is left.

    `expands`: the kernel takes no grouped queries, so keys and values are repeated for it
    (`trainer.model.attention.mix`). Of a model with grouped queries the kernels that take them are tried first.

    With data.mask_documents the flash kernel is torch's for documents in a row, in 16 bits on a GPU from sm_80 on. If
    it does not run, and elsewhere, a mask is added to the scores, which on a GPU the other kernels take.
    """

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel | None = None) -> None:
        self.failed: dict[str, str] = {}
        self._kernels = _allowed(resolved, device)
        self._dtype = _DTYPES[resolved.train.dtype]
        # Compiled code is for one length, so the longest that there can be.
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
        """The documents of a micro-batch on this device, as the attention that was chosen takes them."""
        if self._packed is None:
            return masked(boundaries, self._rotation, self._dtype, self._part)
        if self._length is not None:
            torch._dynamo.mark_dynamic(boundaries.offsets, 0)
        return packed(boundaries, self._rotation, self._packed, self._length or boundaries.longest, self._part)

    def _pack(self, trial: _Trial, resolved: Resolved, device: torch.device) -> None:
        """Chooses the kernel for documents in a row if it can run, and leaves `flash`, which takes no mask, out if not.

        The kernel of a CPU that has that name takes one. Raises ConfigError if flash alone is allowed.
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
        """The name of the first kernel that computes the pass; drops those that fail."""
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
    """Completes the attention layers of a model that was built: whether they expand keys and values, the kernel for the
    `last` queries, and the tables of their rotation, which are put on the device that computes, wherever the engine
    keeps the weights."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.expands, part.last = expands, last
            part.rotation = part.rotation and part.rotation.to(device)


class _NoKernelError(Exception):
    """None of the allowed kernels can run. The text is the reason."""


class _Trial:
    """One layer's attention for the run's micro-batch, on this rank's heads."""

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel) -> None:
        shape, batch = resolved.model, resolved.batch.micro_batch
        self._heads = context.heads_of(shape.heads // resolved.layout.tp)
        self._key_heads = context.heads_of(max(1, shape.key_heads // resolved.layout.tp))
        self.grouped = self._key_heads < self._heads
        self.expands = False
        width = (self._heads + 2 * self._key_heads) * shape.head_width
        # Other values for each position and channel, drawn from no generator.
        values = torch.linspace(-1, 1, width, device=device)
        values = values + torch.linspace(-1, 1, shape.seq, device=device)[:, None]
        self._qkv = values.to(_DTYPES[resolved.train.dtype]).repeat(batch, 1, 1).requires_grad_()
        self._sizes = batch, shape.seq
        # Fewer than keys, if each rank has some of the queries.
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
        """Query, key and value as `mix` gets them: the last of the queries."""
        query, key, value = split_heads(self._qkv, self._heads, self._key_heads)
        return query[:, -self._queries :], key, value

    def _parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value as the kernel gets them."""
        query, key, value = (part.transpose(1, 2) for part in self._split())
        return (query, *expand_heads(key, value, self._heads)) if self.expands else (query, key, value)

    def choice(self, kernels: list[SDPBackend]) -> SDPBackend:
        """torch's choice among the kernels. Raises _NoKernelError if it takes none."""
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
        # On a GPU torch warns of each condition that a kernel does not meet.
        reasons = [str(warning.message).split(" (Triggered")[0].strip() for warning in warned]
        raise _NoKernelError(" ".join(reasons) or reason or "no viable backend")

    def failure(self, kernel: SDPBackend) -> RuntimeError | None:
        """Why the kernel cannot compute a forward and a backward pass; None if it can."""
        try:
            with warnings.catch_warnings(), sdpa_kernel([kernel]), torch.enable_grad():
                warnings.simplefilter("ignore")
                last = self.last if kernel is SDPBackend.FLASH_ATTENTION else None
                mixed = mix(*self._split(), self.expands, self.documents, last)
                # A scalar: gradients that are given make torch import what only its compiler needs.
                (gradient,) = torch.autograd.grad((mixed * mixed.detach()).sum(), self._qkv)
                # It waits for the device, which is where a kernel fails.
                finite = bool(mixed.isfinite().all()) and bool(gradient.isfinite().all())
        except RuntimeError as failure:
            return failure.with_traceback(None)  # which holds the tensors
        return None if finite else RuntimeError("it computes values that are not finite")

    def runs(self, kernel: SDPBackend) -> bool:
        """Whether torch accepts the kernel and it computes the pass."""
        try:
            return self.failure(self.choice([kernel])) is None
        except _NoKernelError:
            return False


def _why_not_packed(resolved: Resolved, device: torch.device) -> str:
    """Why torch's kernel for documents in a row cannot run on the device; empty if it may."""
    width, (major, minor) = resolved.model.head_width, torch.cuda.get_device_capability(device)
    if resolved.train.dtype == "fp32":
        return "train.dtype is fp32, and it computes in 16 bits"
    if major < 8:
        return f"the GPU has compute capability {major}.{minor}, and it needs 8.0"
    return f"heads are {width} wide, and it takes up to 256" if width > 256 else ""


def _one_line(failure: RuntimeError) -> str:
    text = str(failure).strip() or type(failure).__name__
    # Of a run that ended otherwise, torch's own text in the log would look like the cause.
    return "the GPU has not enough memory for it" if "out of memory" in text else text.splitlines()[0][:300]


def _allowed(resolved: Resolved, device: torch.device) -> list[SDPBackend]:
    """The kernels in the order in which they are tried."""
    name = resolved.engine.attention
    if name != "auto":
        return [_KERNELS[name]]
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    # (Of ranks that gather keys flash alone takes the last of the queries without a mask.)
    gathers_keys = resolved.layout.cp > 1 and resolved.engine.cp_exchange == "keys"
    if device.type == "cuda" and not resolved.train.deterministic and not gathers_keys:
        order.insert(0 if _cudnn_first(device) else 1, SDPBackend.CUDNN_ATTENTION)
    return order


def _cudnn_first(device: torch.device) -> bool:
    """Whether cuDNN's kernel goes before flash: on Hopper and on Blackwell's data centre cards, with a cuDNN that does
    not read out of bounds at lengths that are no multiple of 128 (pytorch#169849).

    Source: `check_prefer_cudnn_attention` of torch 2.13 (ATen/native/transformers/cuda/sdp_utils.cpp).
    """
    version = torch.backends.cudnn.version() or 0  # type: ignore[no-untyped-call]
    return version > 91500 and torch.cuda.get_device_capability(device) in ((9, 0), (10, 0), (10, 3))


def _takes_groups(kernels: list[SDPBackend]) -> list[SDPBackend]:
    """Those of the kernels that take grouped queries and are fast; `math` only if it alone is allowed.

    Source: torch's documentation of scaled_dot_product_attention, `enable_gqa`.
    """
    if kernels == [SDPBackend.MATH]:
        return kernels
    return [kernel for kernel in kernels if kernel in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]


def _key_compile_cache(kernels: Iterable[SDPBackend]) -> None:
    """Keeps what is compiled for other attention kernels apart in torch's caches on disk.

    A graph holds the kernel that was allowed when it was made, but the key of AOTAutograd's cache does not. Seen on
    torch 2.11: after `math` a run with `flash` took the cached graph and ran math.
    """
    config = torch.compiler.config
    users = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = users + _TAG + ",".join(_NAMES[kernel.value] for kernel in kernels)


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
