"""Rotary positions: queries and keys are rotated by angles that grow with the position (Su et al. 2021).

The first half of a head's channels is rotated with the second one, as in transformers and in files of its format, so
that weights need no permutation. (Meta's own files pair neighbours.) Angles, their cosines and sines are fp32 whatever
the model's dtype. They are no parameters and in no checkpoint.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from hpc_gpt.settings.experiment import RopeScaling
from hpc_gpt.settings.model_shape import ModelShape


class Rotation:
    """Cosines and sines of `seq` positions for heads of `width`, each [seq, width] in fp32 on one device.

    The sines of the first half are negative. A compiled block only reads the two: made or looked up by device within
    its forward pass, they would break its graph, or have it compiled twice.
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
        """The same on the device that computes, one for all layers."""
        if device == self.cosines.device:
            return self
        if device not in self._elsewhere:
            self._elsewhere[device] = self._of(self.cosines.to(device), self.sines.to(device))
        return self._elsewhere[device]

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of inputs at these positions, one after the other."""
        return self._of(self.cosines[positions], self.sines[positions])

    @staticmethod
    def _of(cosines: Tensor, sines: Tensor) -> Rotation:
        made = Rotation.__new__(Rotation)
        made._set(cosines, sines)
        return made

    def rotate(self, heads: Tensor, by_halves: bool = False) -> Tensor:
        """[batch, seq, heads, width], which starts at position 0 -> the same shape and dtype.

        Both ways give the same bits. Written for whole heads, the backward pass compiles to the one kernel that joins
        the gradients of query, key and value. After a norm of the heads, whose backward pass reads the gradient twice,
        it is better computed once, `by_halves`: less is moved than by computing it again.
        """
        cosines, sines = (table[: heads.shape[1], None] for table in (self.cosines, self.sines))
        if by_halves:
            pairs = zip(heads.chunk(2, -1), reversed(heads.chunk(2, -1)), strict=True)
            tables = zip(cosines.chunk(2, -1), sines.chunk(2, -1), strict=True)
            halves = [own * cosine + other * sine for (own, other), (cosine, sine) in zip(pairs, tables, strict=True)]
            return torch.cat(halves, -1).to(heads.dtype)
        return (heads * cosines + heads.roll(heads.shape[-1] // 2, -1) * sines).to(heads.dtype)


def frequencies(width: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """Radians a position of each pair of channels: [width / 2] in fp32, from 1 down to about 1 / theta.

    Scaled as Llama 3.1 does it: a frequency whose wavelength is above original / low_freq_factor is divided by
    `factor`, one below original / high_freq_factor stays, and between them the two are mixed.
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
def _rotation(width: int, seq: int, theta: float, scaling: RopeScaling | None) -> Rotation:
    return Rotation(width, seq, theta, scaling)


def rotation_of(shape: ModelShape, layer: int) -> Rotation | None:
    """The rotation of a layer, one for all layers of equal shape, on the CPU; None if the layer does not rotate."""
    if not shape.rotates(layer):
        return None
    return _rotation(shape.head_width, shape.seq, shape.rope_theta, shape.rope_scaling)
