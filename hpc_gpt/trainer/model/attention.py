"""Causal self-attention with grouped queries, in which each tensor-parallel rank has some of the heads; and rotary
positions: queries and keys are rotated by angles that grow with the position (Su et al. 2021).

The first half of a head's channels is rotated with the second one, as in transformers and in files of its format, so
that weights need no permutation. (Meta's own files pair neighbours.) Angles, their cosines and sines are fp32 whatever
the model's dtype. They are not parameters, and no checkpoint has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from hpc_gpt.core.settings.model_keys import RopeScaling
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.context_parallel import WHOLE, SequencePart
from hpc_gpt.trainer.model.documents import Documents
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.linear import ColumnParallelLinear, RowParallelLinear
from hpc_gpt.trainer.model.norm import HeadNorm, Norm, WidthNorm
from hpc_gpt.trainer.model.sight import Sight, masks_of
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel


class Rotation:
    """Cosines and sines of `seq` positions for heads of `width`, each [seq, width] in fp32 on one device.

    The sines of the first half are negative. A compiled block only reads the two tables: to make them or to look them
    up by device within its forward pass would break its graph, or compile it twice.
    """

    def __init__(self, width: int, seq: int, theta: float, scaling: RopeScaling | None) -> None:
        with torch.device("cpu"):  # a model may be built on the meta device
            angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies(width, theta, scaling))
        cosines, sines = angles.cos(), angles.sin()
        self._set(torch.cat([cosines, cosines], 1), torch.cat([-sines, sines], 1))

    def _set(self, cosines: Tensor, sines: Tensor) -> None:
        self.cosines, self.sines = cosines, sines
        self._elsewhere: dict[torch.device, Rotation] = {}

    def to(self, device: torch.device) -> Rotation:
        """The rotation on the device that computes: one copy for all layers."""
        if device == self.cosines.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._of(self.cosines.to(device), self.sines.to(device))
        return self._elsewhere[device]

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of inputs at these positions, [seq], or [batch, seq] if each row has its own."""
        return self._of(self.cosines[positions], self.sines[positions])

    @staticmethod
    def _of(cosines: Tensor, sines: Tensor) -> Rotation:
        made = Rotation.__new__(Rotation)
        made._set(cosines, sines)
        return made

    def rotate(self, heads: Tensor, by_halves: bool = False) -> Tensor:
        """[batch, seq, heads, width] at the first `seq` positions -> the same, rotated, in the same dtype.

        A rotation of fewer channels leaves the others as they are. Both ways give the same bits. Written for whole
        heads, the backward pass compiles into the kernel that joins the gradients of query, key and value. After a norm
        of the heads, whose backward pass reads the gradient twice, it is better computed once, `by_halves`, which moves
        fewer bytes than computing it again.
        """
        if (width := self.cosines.shape[-1]) < heads.shape[-1]:
            return torch.cat([self.rotate(heads[..., :width], by_halves), heads[..., width:]], -1)
        cosines, sines = (table[..., : heads.shape[1], None, :] for table in (self.cosines, self.sines))
        if by_halves:
            pairs = zip(heads.chunk(2, -1), reversed(heads.chunk(2, -1)), strict=True)
            tables = zip(cosines.chunk(2, -1), sines.chunk(2, -1), strict=True)
            halves = [half * cosine + other * sine for (half, other), (cosine, sine) in zip(pairs, tables, strict=True)]
            return torch.cat(halves, -1).to(heads.dtype)
        return (heads * cosines + heads.roll(heads.shape[-1] // 2, -1) * sines).to(heads.dtype)


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians per position for each pair of channels: [width / 2] in fp32, from 1 down to about 1 / theta.

    Scaled as Llama 3.1 does it: a frequency whose wavelength is above original / low_freq_factor is divided by
    `factor`, one below original / high_freq_factor stays, and in between the two are mixed.
    Source: Grattafiori et al. 2024 (arXiv:2407.21783), section 3.4.3, and Meta's llama-models, `apply_scaling`.
    """
    plain = 1.0 / (theta ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width))
    if scaling is None:
        return plain
    low, high, original = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    wavelengths = 2 * math.pi / plain
    share = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain


@lru_cache(maxsize=8)
def _rotation(width: int, seq: int, theta: float, scaling: RopeScaling | None, part: SequencePart) -> Rotation:
    whole = Rotation(width, seq, theta, scaling)
    return whole if part.size == 1 else whole.at(part.of(torch.arange(seq, device="cpu")))


def rotation_of(shape: ModelShape, layer: int, part: SequencePart = WHOLE) -> Rotation | None:
    """The rotation of a layer at a part of the positions, one for all layers of equal shape, on the CPU; None if the
    layer does not rotate."""
    if not shape.rotates(layer):
        return None
    return _rotation(round(shape.rotated * shape.head_width), shape.seq, shape.rope_theta, shape.rope_scaling, part)


class Attention(nn.Module):
    """Causal self-attention; each tensor-parallel rank computes heads / tp of the heads. `ContextParallel` does the
    exchange between ranks with parts of the same sequence.

    With selective recomputation the core, everything between the two linear layers, is computed again in the backward
    pass (Korthikanti et al. 2022, section 5): it has few FLOPs, and without a fused kernel most of the memory.

    `expands`: the attention kernel does not take grouped queries, so each query gets a copy of its keys and values.
    `last`: the kernel for fewer queries than keys, each [batch, heads, positions, width]; None: SDPA with a mask.
    `window`: keys that a query sees; None: all before it. `sight`: these keys, as the window's kernel takes them, if
    there are no documents.
    """

    def __init__(
        self, layer: int, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        name = f"blocks.{layer}.attention"
        self.heads = shape.heads // tp.size
        self.key_heads = max(1, shape.key_heads // tp.size)
        self.expands = False
        self.last: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
        self.window = shape.window_of(layer)
        self.sight: Sight | None = None
        self.recompute = techniques.recompute == "selective"
        self.is_recomputed = techniques.recompute != "none"
        self.context = tp.context
        self.rotation = rotation_of(shape, layer, tp.context.part)
        self.qkv = QkvLinear(f"{name}.qkv", shape, tp, initial, techniques)
        has_bias = shape.bias == "all"
        self.projection = ProjectionLinear(
            f"{name}.projection", (shape.hidden, shape.query_width), tp, initial, techniques.tiles, has_bias
        )
        self.query_norm: Norm | None = None
        self.key_norm: Norm | None = None
        if shape.qk_norm == "width":
            self.query_norm = WidthNorm(f"{name}.query_norm", shape, tp, shape.heads)
            self.key_norm = WidthNorm(f"{name}.key_norm", shape, tp, shape.key_heads)
        elif shape.qk_norm:
            self.query_norm = HeadNorm(f"{name}.query_norm", shape, tp, shape.head_width)
            self.key_norm = HeadNorm(f"{name}.key_norm", shape, tp, shape.head_width)

    def forward(self, hidden: Tensor, documents: Documents | None = None) -> Tensor:
        """[batch, seq, hidden] -> the same shape; attention stays within `documents`, if there are any."""
        qkv = self.qkv(hidden)
        if self.recompute and torch.is_grad_enabled():
            mixed = checkpoint(self._mix, qkv, documents, use_reentrant=False, preserve_rng_state=False)
        else:
            mixed = self._mix(qkv, documents)
        projected: Tensor = self.projection(mixed)
        return projected

    def _mix(self, qkv: Tensor, documents: Documents | None) -> Tensor:
        """`attention_core` of this rank's heads, after the shape's norm and rotation."""
        # Positions come before heads in memory up to the kernel, whose output is then joined without a copy.
        query, key, value = split_heads(qkv, self.heads, self.key_heads)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotation is not None:
            is_normed = self.query_norm is not None
            rotation = self.rotation if documents is None else documents.rotation
            assert rotation is not None
            query, key = rotation.rotate(query, is_normed), rotation.rotate(key, is_normed)
        sight = self.sight
        if documents is not None:
            sight = documents.in_window if self.window else documents.sight
        elif sight is None and self.window:  # a model without an engine
            sight = Sight(masks_of(query.shape[1], self.window, query.dtype, query.device))
        core = partial(attention_core, expands=self.expands, sight=sight, last=self.last)
        return self.context.attend(query, key, value, core, self.is_recomputed)


class ProjectionLinear(RowParallelLinear):
    """The layer after attention: `ContextParallel.attend`'s output -> [batch, seq / cp, hidden]."""

    def product(self, mixed: Tensor) -> Tensor:
        context = self.tp.context
        # (An FP8 product keeps its own copy of its input.)
        if self.tiles is None and self.multiply is F.linear:
            return context.linear(mixed, self.weight)
        return super().product(context.to_positions(mixed))


class QkvLinear(ColumnParallelLinear):
    """Query, key and value in one product: [..., hidden] -> [..., (heads + 2 kv_heads) x width / tp].

    A rank's outputs are its queries, then its keys, then its values. If there are fewer heads of keys than ranks, a
    head's rows are divided over the ranks that use it: before the product they gather it, and its gradient is summed
    over them. So each number has one owner, as in every other weight.
    """

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        width, keys = shape.query_width, shape.key_heads * shape.head_width
        parts = 3 if keys == width else (width, keys, keys)
        has_bias = shape.bias in ("all", "qkv")
        super().__init__(name, (width + 2 * keys, shape.hidden), tp, initial, parts, techniques.tiles, has_bias)
        self.sharers = max(1, tp.size // shape.key_heads)  # ranks that use a head of keys

    def rows_used(self, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        if self.sharers == 1:
            return weight, bias
        return self._with_whole_heads(weight), None if bias is None else self._with_whole_heads(bias)

    def _with_whole_heads(self, share: Tensor) -> Tensor:
        """[rows of the share, ...] -> the rows of its queries, and all rows of the key and the value that they use."""
        assert isinstance(self.split.parts, tuple)
        keys = self.split.parts[1] // self.tp.size  # rows in this rank's share
        query, key_value = torch.split(share, [len(share) - 2 * keys, 2 * keys])
        return torch.cat([query, apply(_GatherHead, key_value, self.tp, self.sharers)])


class _GatherHead(torch.autograd.Function):
    """This rank's rows of key and value, one after the other -> the rows of all ranks that use the same head."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, tp: TensorParallel, sharers: int) -> Tensor:
        ctx.tp, ctx.sharers = tp, sharers
        first = tp.rank // sharers * sharers
        by_rank = tp.gather_rows(rows).view(tp.size, 2, len(rows) // 2, *rows.shape[1:])[first : first + sharers]
        return by_rank.transpose(0, 1).flatten(0, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        tp, sharers = ctx.tp, ctx.sharers
        first = tp.rank // sharers * sharers
        gradient = gradients[0]
        mine = gradient.view(2, sharers, len(gradient) // (2 * sharers), *gradient.shape[1:]).transpose(0, 1)
        of_all = mine.new_zeros(tp.size, *mine.shape[1:])
        of_all[first : first + sharers] = mine
        return tp.scatter_rows(of_all.flatten(0, 2)), None, None


def split_heads(qkv: Tensor, heads: int, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[batch, seq, (heads + 2 key_heads) x width] -> query [batch, seq, heads, width], key and value
    [batch, seq, key_heads, width]. They are views.
    """
    counts = (heads, key_heads, key_heads)
    # Split, because one copy concatenates the gradients of its parts. A stack of three takes two copies, and when
    # compiled, each of its elements reads all three.
    width = qkv.shape[-1] // sum(counts)
    parts = torch.split(qkv, [count * width for count in counts], -1)
    query, key, value = (part.view(*part.shape[:2], count, -1) for part, count in zip(parts, counts, strict=True))
    return query, key, value


def attention_core(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    expands: bool = False,
    sight: Sight | None = None,
    last: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The core of attention: queries [batch, seq, heads, width], keys and values [batch, keys, key heads, width] ->
    [batch, seq, heads x width]. The queries belong to the last positions of the keys. `expands`, `last`: see
    `Attention`. `sight`: the keys that a query sees; None: all before it."""
    batch, seq, heads, _ = query.shape
    if sight is not None and sight.kernel is not None:
        return sight.attend(query, key, value).reshape(batch, seq, -1)
    mask = None
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    groups = heads // key.shape[1]
    options: dict[str, Any] = {"enable_gqa": True} if groups > 1 and not expands else {}
    if groups > 1 and expands:
        key, value = expand_heads(key, value, heads)
    if seq < key.shape[2]:
        if last is not None:
            return last(query, key, value).transpose(1, 2).reshape(batch, seq, -1)
        # (For SDPA `is_causal` means that the queries belong to the first positions.)
        mask = last_mask(query, key)
    if sight is not None:
        mixed = sight.attend_by_masks(query, key, value, **options)
    else:
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, **options)
    return mixed.transpose(1, 2).reshape(batch, seq, -1)


def last_mask(query: Tensor, key: Tensor) -> Tensor:
    """[..., seq, width], [..., keys, width] -> the mask to add to the scores, [seq, keys]: -inf if a query, at one of
    the last positions, does not see a key."""
    seq, keys = query.shape[-2], key.shape[-2]
    hidden = torch.ones(seq, keys, dtype=torch.bool, device=query.device).triu(keys - seq + 1)
    return torch.zeros(seq, keys, dtype=query.dtype, device=query.device).masked_fill(hidden, -torch.inf)


def expand_heads(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Repeats each head of keys and of values for the queries that use it: [batch, key heads, seq, width] -> [batch,
    heads, seq, width]."""
    groups = heads // key.shape[1]
    return key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
