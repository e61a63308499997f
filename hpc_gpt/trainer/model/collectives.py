"""torch's collectives under the names that this torch has, and a typed call of autograd functions that communicate."""

from typing import Any

import torch.distributed as dist
from torch import Tensor

# torch 2.13 renamed them, and warns about the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def apply(function: Any, *arguments: Any) -> Tensor:
    """Calls an autograd function that returns one tensor; torch's own call has no types."""
    result = function.apply(*arguments)
    assert isinstance(result, Tensor)
    return result
