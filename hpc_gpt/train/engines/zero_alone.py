"""ZeRO over one data-parallel rank: what it would exchange with itself stays where it is.

DeepSpeed 0.19.8 goes the whole way for one rank, too. At every micro-batch a gradient is copied into a bucket, on to
the dtype of communication, divided by 1, reduced with nobody, and copied back. ZeRO-3 beside that hands every layer its
weights and takes them away again, with a wait for the device each time. All of it is the identity here, and left out:
a gradient goes from autograd into the buffer it is summed in, and weights stay where they are. ZeRO-3's buffers may be
on the host, with the states (zero_sums.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def keep_to_itself(wrapped: Any) -> None:
    """Has DeepSpeed's ZeRO optimizer `wrapped` exchange nothing; `ds_config` leaves its buckets out."""
    if hasattr(wrapped, "persistent_parameters"):
        _keep_weights(wrapped)
        # The name that Python gives a private method.
        wrapped._DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads = _whole_gradients
    elif hasattr(wrapped, "averaged_gradients"):

        def add_to_partition(grads: list[Tensor], of: list[tuple[int, int, Any]], dtype: torch.dtype) -> None:
            """Every gradient to the fp32 buffer that it is summed in."""
            for gradient, (group, _, parameter) in zip(grads, of, strict=True):
                sum_ = wrapped._get_compact_grad_partition_slice(group, 0, parameter, gradient.numel())
                if sum_ is not None:
                    sum_.add_(gradient.view(-1))

        wrapped._allreduce_noncontiguous_bucket_preserving_fp32 = add_to_partition
        wrapped.buffered_reduce_fallback = lambda *_, **__: None


def _whole_gradients(parameters: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """This rank's share of each gradient is all of it."""
    return [parameter.grad.view(-1) for parameter in parameters if parameter.grad is not None]


def _keep_weights(wrapped: Any) -> None:
    """Every rank's share of a weight is all of it: whole from the start, and through every step.

    So nothing is to be fetched before a layer's call or taken away behind it, and DeepSpeed's hooks on every layer go.
    """
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus

    parameters = wrapped.persistent_parameters
    step = wrapped.step

    def gather(asked: list[Any] | None = None, **_: Any) -> None:
        for parameter in parameters if asked is None else asked:
            if parameter.ds_status == ZeroParamStatus.NOT_AVAILABLE:
                parameter.data = parameter.ds_tensor.data.view(parameter.ds_shape)
                parameter.ds_status = ZeroParamStatus.AVAILABLE

    def step_whole(closure: Any = None) -> None:
        # The update writes to the memory that the whole weight lies in. Checkpoints do take weights apart.
        wrapped._partition_all_parameters = lambda: None
        try:
            step(closure)
        finally:
            del wrapped._partition_all_parameters

    if parameters:
        parameters[0].all_gather = gather
        gather()
        wrapped.parameter_offload._remove_module_hooks()
        wrapped.step = step_whole
