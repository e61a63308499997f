"""The attention kernels that SDPA may use in a run, and which of them torch accepts for it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn.attention import SDPBackend, sdpa_kernel

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.kernels import check_backend
from hpc_gpt.trainer.model.attention import Attention, rotation_of
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.documents import Boundaries, Documents
from hpc_gpt.trainer.model.sight import Sight, blocks_of, masks_of, packed_kernel

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

    `chosen` is the name of the kernel that torch takes for this shape; with windows also that of theirs. A kernel that
    torch accepts may still fail in its first pass, which ends the run; that depends on versions and card as well.

    `expands`: the kernel does not take grouped queries, so keys and values are repeated for it
    (`model.attention.attention_core`). If the model has grouped queries, the kernels that take them come first. `last`:
    the kernel for the last queries, for ranks that gather keys.

    With data.mask_documents and in layers with a window the flash kernel is torch's kernel for documents in a row, in
    16 bits on a GPU from sm_80 on. Where it cannot run, "auto" takes FlexAttention for windows on such a GPU. Otherwise
    a mask is added to the scores; on a GPU the other kernels take it.
    """

    def __init__(self, resolved: Resolved, device: torch.device, context: ContextParallel | None = None) -> None:
        self._kernels = _allowed(resolved, device)
        self._dtype = _DTYPES[resolved.train.dtype]
        # Compiled code is made for one length, so for the longest possible one.
        self._length = resolved.model.seq if resolved.engine.compile != "none" else None
        rotations = (rotation_of(resolved.model, layer) for layer in range(resolved.model.layers))
        rotation = next((one for one in rotations if one is not None), None)
        self._rotation = rotation and rotation.to(device)
        shape = resolved.model
        self._seq, self._samples = shape.seq, resolved.batch.micro_batch
        self._window = shape.window if shape.windowed else None
        self._full_layers = shape.layers - shape.windowed
        context = context or ContextParallel()
        self._part, self._device = context.part, device
        self.expands = False
        self.last: Callable[..., Tensor] | None = None
        # {window, None for documents: the kernel}; an empty Sight takes masks.
        needed = [None] * resolved.data.mask_documents + [self._window] * (self._window is not None)
        self._forms = {window: self._pack(resolved, device, window) for window in needed}
        self._masks = any(form.kernel is None for form in self._forms.values())
        if resolved.data.mask_documents and not self._masks:
            self._kernels = [_FLASH]
        else:
            self._accept(resolved, device, context)
            if device.type == "cuda":
                torch.cuda.empty_cache()  # the inputs that torch was asked about
        self.chosen = self._name()
        _key_compile_cache(self._kernels)

    def documents(self, boundaries: Boundaries) -> Documents:
        """The documents of a micro-batch on this device, in the form that the chosen kernel takes."""
        in_window = None if self._window is None else self._sight(self._window, boundaries)
        sight = self._sight(None, boundaries) if self._full_layers else None
        return Documents.of(boundaries, self._rotation, sight, in_window, self._part)

    @functools.cached_property
    def in_window(self) -> Sight:
        """The keys that queries see in layers with a window, without documents."""
        return self._sight(self._window, None)

    def _sight(self, window: int | None, boundaries: Boundaries | None) -> Sight:
        """The kernel's form filled in for a micro-batch: for its documents, or for whole samples."""
        form, seq = self._forms[window], self._seq
        starts = None if boundaries is None else boundaries.starts
        if form.kernel is None:
            return Sight(masks_of(seq, window, self._dtype, self._device, starts))
        if form.blocks is not None:
            return replace(form, blocks=blocks_of(seq, window or seq, self._device, starts))
        if boundaries is None:
            offsets = torch.arange(0, (self._samples + 1) * seq, seq, dtype=torch.int32, device=self._device)
            return replace(form, offsets=offsets, longest=seq)
        if self._length is not None:
            torch._dynamo.mark_dynamic(boundaries.offsets, 0)
        return replace(form, offsets=boundaries.offsets, longest=self._length or boundaries.longest)

    def _name(self) -> str:
        """The kernels in words: that of layers that attend to all tokens, and that of layers with a window."""
        usual = _NAMES[self._kernels[0].value]
        full, windows = (
            usual if form is None or form.kernel is None else "flash" if form.blocks is None else "flex"
            for form in map(self._forms.get, (None, self._window))
        )
        if self._window is None or windows == full:
            return full
        return f"{full}, {windows} in windows" if self._full_layers else windows

    def _pack(self, resolved: Resolved, device: torch.device, window: int | None = None) -> Sight:
        """The kernel for documents in a row, or for a window, without its tensors; an empty Sight if it needs masks.
        Then drops `flash`, which takes no mask on a GPU.

        A CPU's kernel of that name takes a mask, so it stays. Raises ConfigError if only flash is allowed.
        """
        if device.type != "cuda" or not engine_named(resolved.engine.name).trains_our_model:
            return Sight()
        name = resolved.engine.attention
        reason = _why_not_packed(resolved, device, window)
        if name in ("auto", "flash") and not reason:
            from torch.nn.attention.varlen import varlen_attn  # it imports torch's compiler

            options, groups = packed_kernel(inspect.signature(varlen_attn).parameters, window)
            expands = resolved.model.is_grouped and not groups
            packed: Any = functools.partial(varlen_attn, **options)
            return Sight(kernel=packed, expands=expands)
        if window is not None and name == "auto" and _can_flex(resolved, device):
            return Sight(kernel=_flex if resolved.engine.compile == "none" else _compiled_flex(), blocks=True)
        if _FLASH in self._kernels:
            self._kernels.remove(_FLASH)
        if not self._kernels:
            what = "keep documents apart" if window is None else f"have a window of {window}"
            instead = "data.mask_documents = false" if window is None else "no model.window"
            raise ConfigError(
                f"engine.attention is flash, but that kernel cannot {what} here: {reason}",
                f'use engine.attention = "auto", or {instead}',
            )
        return Sight()

    def _accept(self, resolved: Resolved, device: torch.device, context: ContextParallel) -> None:
        """Drops the kernels that torch does not accept for a rank's micro-batch. Raises ConfigError if none is left."""
        shape, batch, tp = resolved.model, resolved.batch.micro_batch, resolved.layout.tp
        heads, key_heads = (context.heads_of(max(1, count // tp)) for count in (shape.heads, shape.key_heads))
        # Fewer queries than keys, if each rank has some of the queries.
        queries = context.queries_of(shape.seq)
        mask = None
        if queries < shape.seq or self._masks:
            mask = torch.empty(1, 1, queries, shape.seq, dtype=self._dtype, device=device).expand(batch, -1, -1, -1)
        may_be_flash = device.type == "cuda" and self._dtype != torch.float32 and _FLASH in self._kernels
        if queries < shape.seq and may_be_flash:
            self._kernels, self.last = [_FLASH], flash_of_last
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


def prepare_attention(module: nn.Module, kernels: AttentionKernels, device: torch.device) -> None:
    """Completes the attention layers of a built model: whether they expand keys and values, the kernel for the `last`
    queries, and the keys that queries see in layers with a window. Moves the tables of their rotation to the device
    that computes, wherever the engine keeps the weights."""
    for part in module.modules():
        if isinstance(part, Attention):
            part.expands, part.last = kernels.expands, kernels.last
            part.sight = kernels.in_window if part.window else None
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


@functools.cache
def _compiled_flex() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention  # it imports torch's compiler

    return torch.compile(flex_attention, dynamic=False)


def _flex(*parts: Tensor, **options: Any) -> Any:
    """FlexAttention with a kernel, in a run that compiles nothing else: without one it holds all scores. It is compiled
    at its first call, since such a run's engine is built while torch.compile is the identity (`library_patches`)."""
    return _compiled_flex()(*parts, **options)


def _can_flex(resolved: Resolved, device: torch.device) -> bool:
    """Whether FlexAttention, which Inductor compiles, has kernels for the GPU: with heads of 16 or more."""
    if resolved.model.head_width >= 16 and torch.cuda.get_device_capability(device)[0] >= 8:
        with contextlib.suppress(ConfigError):
            check_backend("inductor", device, "")
            return True
    return False


def _why_not_packed(resolved: Resolved, device: torch.device, window: int | None = None) -> str:
    """The reason why torch's kernel for documents in a row cannot run on the device; empty if it may run."""
    width, (major, minor) = resolved.model.head_width, torch.cuda.get_device_capability(device)
    if find_spec("torch.nn.attention.varlen") is None:
        return f"torch {torch.__version__} does not have it"
    if resolved.train.dtype == "fp32":
        return "it computes in 16 bits, but train.dtype is fp32"
    if major < 8:
        return f"it needs compute capability 8.0, but the GPU has {major}.{minor}"
    if window is not None:
        from torch.nn.attention.varlen import varlen_attn

        if "window_size" not in inspect.signature(varlen_attn).parameters:
            return f"that of torch {torch.__version__} takes no window, which came with 2.11"
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


def flash_of_last(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Causal attention of the last positions to all positions, on CUDA in 16 bits.

    Query [batch, heads, seq, width], key and value [batch, heads of keys, keys, width] -> the query's shape. SDPA takes
    the queries of causal attention for the first positions; its flash kernel takes them for the last ones. (The public
    way, `nn.attention.bias`, does the same, but imports torch's compiler and cannot be compiled.)
    """
    width = query.shape[-1]
    # The kernel takes widths that are multiples of 8. (Padding by zero would copy.)
    if width % 8:
        query, key, value = (nn.functional.pad(part, (0, -width % 8)) for part in (query, key, value))
    mixed: Tensor = torch._scaled_dot_product_flash_attention(query, key, value, is_causal=True, scale=width**-0.5)[0]
    return mixed[..., :width]
