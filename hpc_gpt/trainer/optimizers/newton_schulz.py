"""Muon's arithmetic (Jordan 2024, kellerjordan.github.io/posts/muon): what a hidden matrix is, and its update.

A hidden matrix is one of the model's class, not one of our parameters: Q, K and V of all heads are a matrix each, and
so are gate and up, and those of each expert.
"""

import math

import torch
from torch import Tensor, nn

from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, split_of

# The quintic polynomial, and the least norm that divides.
_A, _B, _C, _EPS = 3.4445, -4.7750, 2.0315, 1e-7


def is_hidden(parameter: nn.Parameter) -> bool:
    """Whether it has hidden matrices: those weights of the layers that tensor parallelism can split."""
    return full_name(parameter).startswith("blocks.") and parameter.ndim > 1 and split_of(parameter) is not None


def matrices_in(whole: Tensor, split: Split | None) -> list[Tensor]:
    """The hidden matrices in a whole parameter, as views: each [rows, columns], or of experts one stack, [matrices,
    rows, columns]."""
    assert split is not None
    parts = split.ranges(whole.shape[split.dim], 0, 1)
    if whole.ndim == 3:
        return [whole.view(len(whole) * len(parts), whole.shape[1] // len(parts), whole.shape[2])]
    return [whole.narrow(split.dim, begin, length) for begin, length in parts]


def orthogonal(update: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """A matrix, or each of a stack, after `steps` of Newton-Schulz in `dtype`, which make its singular values about 1.

    May overwrite `update`. A matrix alone has the bits of torch 2.13's `_zeropower_via_newtonschulz`.
    """
    work = update.to(dtype)
    del update
    is_tall, is_stack = work.shape[-2] > work.shape[-1], work.ndim == 3
    work = work.mT if is_tall else work
    work.div_((work.norm(dim=(1, 2), keepdim=True) if is_stack else work.norm()).clamp(min=_EPS))
    multiply_and_add = torch.baddbmm if is_stack else torch.addmm
    for _ in range(steps):
        gram = work @ work.mT
        gram = multiply_and_add(gram, gram, gram, beta=_B, alpha=_C)
        work = multiply_and_add(work, gram, work, beta=_A)
    return work.mT if is_tall else work


def rate_of(lr: float, rows: int, columns: int) -> float:
    """The factor of an orthogonal update, whose root mean square is then that of AdamW's at `lr` (Liu et al. 2025,
    arXiv:2502.16982, section 2.2)."""
    return lr * (0.2 * math.sqrt(max(rows, columns)))
