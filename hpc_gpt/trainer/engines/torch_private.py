"""The functions of the trainer that use private names of torch; `library_patches` replaces some."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


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


def time_spent_compiling() -> float:
    """Seconds of wall time that torch.compile took in this process."""
    return float(torch._dynamo.utils.calculate_time_spent()["total_wall_time"])


def keep_residuals() -> dict[str, Any]:
    """Options of torch.compile that keep the input of a norm, if it is a sum, for the backward pass.

    Without them Inductor keeps the two summands, or the sum in fp32, and computes the sum again.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass
    from torch.utils.checkpoint import CheckpointPolicy

    class KeepResiduals(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            aten = torch.ops.aten
            layer_norms = graph.find_nodes(op="call_function", target=aten.var_mean.correction)
            means = graph.find_nodes(op="call_function", target=aten.mean.dim)
            rms_norms = [mean.args[0] for mean in means if mean.args[0].target is aten.pow.Tensor_Scalar]
            for norm in (*layer_norms, *rms_norms):
                read = norm.args[0]
                while read.target is torch.ops.prims.convert_element_type.default:
                    read = read.args[0]
                if read.target is aten.add.Tensor:
                    read.meta["recompute"] = CheckpointPolicy.MUST_SAVE

        def uuid(self) -> str:
            return "hpc-gpt keep_residuals 2"

    return {"joint_custom_post_pass": KeepResiduals()}


def for_each(operation: str, tensors: list[Tensor], other: Any = None) -> Any:
    """Applies an `operation` of Tensor to all tensors, if there are any, in one kernel. `other`: a list of operands, or
    one for all."""
    operands = () if other is None else (other,)
    if not tensors:
        return []
    return getattr(torch, f"_foreach_{operation}")(tensors, *operands)


def all_reduce_each(tensors: list[Tensor], group: dist.ProcessGroup | None = None) -> torch.futures.Future[Any]:
    """Begins an all-reduce of every tensor over the group, by default all ranks, a sum in place; returns a future."""
    group = group or dist.group.WORLD
    assert group is not None
    coalesced: torch.futures.Future[Any] = group.allreduce_coalesced(tensors).get_future()
    return coalesced
