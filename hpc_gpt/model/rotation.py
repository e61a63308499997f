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
    """Cosines and sines of `seq` positions for heads of `width`, on each device that asks."""

    def __init__(self, width: int, seq: int, theta: float, scaling: RopeScaling | None) -> None:
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies(width, theta, scaling))
        self._tables = {torch.device("cpu"): (angles.cos(), angles.sin())}

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """(cosines, sines), each [seq, width / 2] in fp32."""
        if device not in self._tables:
            cosines, sines = self._tables[torch.device("cpu")]
            self._tables[device] = cosines.to(device), sines.to(device)
        return self._tables[device]

    def at(self, positions: Tensor) -> Rotation:
        """The rotation of inputs at these positions, one after the other."""
        made = Rotation.__new__(Rotation)
        made._tables = {device: (cos[positions], sin[positions]) for device, (cos, sin) in self._tables.items()}
        return made

    def rotate(self, heads: Tensor) -> Tensor:
        """[batch, seq, heads, width], which starts at position 0 -> the same shape and dtype."""
        cosines, sines = (table[: heads.shape[1], None] for table in self.on(heads.device))
        first, second = heads.chunk(2, -1)
        rotated = torch.cat([first * cosines - second * sines, second * cosines + first * sines], -1)
        return rotated.to(heads.dtype)


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
    """The rotation of a layer, one for all layers of equal shape; None if the layer does not rotate."""
    if not shape.rotates(layer):
        return None
    return _rotation(shape.head_width, shape.seq, shape.rope_theta, shape.rope_scaling)
