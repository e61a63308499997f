"""The attention kernels that SDPA may use in a run, and which of them torch accepts for it."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines import private_parts, torch_private
from hpc_gpt.trainer.model.attention import Attention, rotation_of
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.documents import Boundaries, Documents, masked, packed, packed_kernel

_FLASH = SDPBackend.FLASH_ATTENTION
_KERNELS = {
    "flash": _FLASH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
_NAMES = {kernel.value: name for name, kernel in _KERNELS.items()}
# Whether torch takes a kernel for inputs on a GPU; it always takes math.
_ACCEPTS = {
    _FLASH: cuda.can_use_flash_attention,
    SDPBackend.CUDNN_ATTENTION: cuda.can_use_cudnn_attention,
    SDPBackend.EFFICIENT_ATTENTION: cuda.can_use_efficient_attention,
}
_TAG = " hpc-gpt attention="
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class AttentionKernels:
    """The kernels that SDPA may use in this run. `with kernels():` is the context in which it uses them.

    `engine.attention = "auto"` means all kernels that this device has, the fastest first; cuDNN's comes first where
    torch itself puts it first, else after flash. Any other value means that kernel only. Torch takes the first kernel
    that it accepts. Raises ConfigError if it accepts none for the run's shape.

    `chosen` is the name of the kernel that torch takes for this shape. A kernel that torch accepts may still fail in
    its first pass, which ends the run; that depends on versions and card as well.

    `expands`: the kernel does not take grouped queries, so keys and values are repeated for it
    (`trainer.model.attention.mix`). If the model has grouped queries, the kernels that take them come first. `last`:
    the kernel for the last queries, for ranks that gather keys.

    With data.mask_documents the flash kernel is torch's kernel for documents in a row, in 16 bits on a GPU from sm_80
    on. On other devices a mask is added to the scores; on a GPU the other kernels take it.
    """

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel | None = None) -> None:
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
        self.expands = False
        self.last: Callable[..., Tensor] | None = None
        if resolved.data.mask_documents:
            self._pack(resolved, device)
        if self._packed is None:
            self._accept(resolved, device, context)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the inputs that torch was asked about
        self.chosen = _NAMES[self._kernels[0].value]
        _key_compile_cache(self._kernels)

    def documents(self, boundaries: Boundaries) -> Documents:
        """The documents of a micro-batch on this device, in the form that the chosen kernel takes."""
        if self._packed is None:
            return masked(boundaries, self._rotation, self._dtype, self._part)
        if self._length is not None:
            torch._dynamo.mark_dynamic(boundaries.offsets, 0)
        return packed(boundaries, self._rotation, self._packed, self._length or boundaries.longest, self._part)

    def _pack(self, resolved: Resolved, device: torch.device) -> None:
        """Takes the kernel for documents in a row if it can run; if not, drops `flash`, which takes no mask on a GPU.

        A CPU's kernel of that name takes a mask, so it stays. Raises ConfigError if only flash is allowed.
        """
        if device.type != "cuda" or _FLASH not in self._kernels:
            return
        if not (reason := _why_not_packed(resolved, device)):
            # Imported here: it imports torch's compiler.
            from torch.nn.attention.varlen import varlen_attn

            options, groups = packed_kernel(inspect.signature(varlen_attn).parameters)
            kernel: Any = functools.partial(varlen_attn, **options)
            self._packed, self._kernels = kernel, [_FLASH]
            self.expands = resolved.model.key_heads < resolved.model.heads and not groups
            return
        self._kernels.remove(_FLASH)
        if not self._kernels:
            raise ConfigError(
                f"engine.attention is flash, but that kernel cannot keep documents apart here: {reason}",
                'use engine.attention = "auto", or data.mask_documents = false',
            )

    def _accept(self, resolved: Resolved, device: torch.device, context: ContextParallel) -> None:
        """Drops the kernels that torch does not accept for a rank's micro-batch. Raises ConfigError if none is left."""
        shape, batch, tp = resolved.model, resolved.batch.micro_batch, resolved.layout.tp
        heads, key_heads = (context.heads_of(max(1, count // tp)) for count in (shape.heads, shape.key_heads))
        # Fewer queries than keys, if each rank has some of the queries.
        queries = context.queries_of(shape.seq)
        mask = None
        if queries < shape.seq or resolved.data.mask_documents:
            mask = torch.empty(1, 1, queries, shape.seq, dtype=self._dtype, device=device).expand(batch, -1, -1, -1)
        may_be_flash = device.type == "cuda" and self._dtype != torch.float32 and _FLASH in self._kernels
        if queries < shape.seq and may_be_flash:
            private_parts.require(private_parts.LAST_QUERIES)
            self._kernels, self.last = [_FLASH], torch_private.flash_of_last
            return

        def why_not(kernel: SDPBackend, expands: bool) -> str:
            counts = (heads, queries), (heads if expands else key_heads, shape.seq)
            query, key = (
                torch.empty(batch, positions, count, shape.head_width, dtype=self._dtype, device=device)
                .transpose(1, 2)
                .requires_grad_()
                for count, positions in counts
            )
            return _why_not(kernel, query, key, mask)

        grouped = key_heads < heads
        taking = [kernel for kernel in _takes_groups(self._kernels) if grouped and not why_not(kernel, expands=False)]
        self.expands = grouped and not taking
        reasons = {kernel: why_not(kernel, self.expands) for kernel in taking or self._kernels}
        self._kernels = [kernel for kernel, reason in reasons.items() if not reason]
        if not self._kernels:
            raise ConfigError(
                f"engine.attention is {resolved.engine.attention}, but that kernel cannot run here: "
                + "; ".join(reasons.values()),
                'use engine.attention = "auto"',
            )

    def __call__(self) -> AbstractContextManager[None]:
        return sdpa_kernel(self._kernels, set_priority=True)


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


def _why_not(kernel: SDPBackend, query: Tensor, key: Tensor, mask: Tensor | None) -> str:
    """The reason why torch does not accept a kernel for these inputs; empty if it does."""
    if kernel is SDPBackend.MATH:
        return ""
    if query.device.type != "cuda":
        return "" if kernel is _FLASH else f"a {query.device.type.upper()} does not have it"
    inputs = cuda.SDPAParams(query, key, key, mask, 0.0, mask is None, key.shape[1] < query.shape[1])
    # Torch warns about each condition that a kernel does not meet.
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if _ACCEPTS[kernel](inputs, debug=True):
            return ""
    return " ".join(str(warning.message).split(" (Triggered")[0].strip() for warning in warned) or "torch refuses it"


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


def _allowed(resolved: Resolved, device: torch.device) -> list[SDPBackend]:
    """The kernels in the order in which torch may take them."""
    name = resolved.engine.attention
    if name != "auto":
        return [_KERNELS[name]]
    order = [_FLASH, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
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
    return [kernel for kernel in kernels if kernel in (SDPBackend.CUDNN_ATTENTION, _FLASH)]


def _key_compile_cache(kernels: Iterable[SDPBackend]) -> None:
    """Adds the allowed kernels to the key of torch's caches of compiled code on disk.

    A graph contains the kernel that was allowed when it was made, but the key of AOTAutograd's cache does not. Seen on
    torch 2.11: after a run with `math`, one with `flash` took the cached graph and ran math.
    """
    config = torch.compiler.config
    users = config.cache_key_tag.partition(_TAG)[0]
    config.cache_key_tag = users + _TAG + ",".join(_NAMES[kernel.value] for kernel in kernels)
