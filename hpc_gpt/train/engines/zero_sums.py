"""ZeRO-3's gradients, summed where its update reads them.

DeepSpeed 0.19.8 sums a rank's share of the gradients in one fp32 buffer. Behind the last micro-batch it makes another
of the same size, for the update to read: for every step anew, or with offloading one that stays beside the first, on
the host. Here the two are one. That saves 4 bytes for each of a rank's parameters and the pass that fills them. With
offloading a sum lies where its group of parameters is updated, and a step's first gradient is sent there once and not
fetched again: DeepSpeed sends it, fetches it back for the norm and sends it a second time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def sum_where_read(wrapped: Any) -> None:
    """Has ZeRO-3's optimizer `wrapped` keep one fp32 buffer for gradients.

    What lies on NVMe, and the gradients of fp16, which are summed in fp16, go DeepSpeed's own way.
    """
    if wrapped.swap_optimizer or wrapped.gradient_accumulation_dtype != wrapped.master_weights_and_grads_dtype:
        return
    if wrapped.offload_optimizer:
        _sum_beside_states(wrapped)
    else:
        _read_sums(wrapped)


def _read_sums(wrapped: Any) -> None:
    """The update of a group reads its part of the buffer."""
    lengths = [flat.numel() for flat in wrapped.fp32_partitioned_groups_flat]
    sums = wrapped.grad_partitions_flat_buffer.split(lengths)

    def hand_over(group: int) -> None:
        wrapped.fp32_partitioned_groups_flat[group].grad = sums[group]
        wrapped.averaged_gradients[group] = None

    wrapped._prepare_fp32_grad_for_sub_group = hand_over


def _sum_beside_states(wrapped: Any) -> None:
    """A sum is a piece of what the update of its group reads, on the host or the device."""
    sums: dict[int, Tensor] = {}
    for parameters, flat in zip(wrapped.fp16_groups, wrapped.fp32_partitioned_groups_flat, strict=True):
        lengths = [parameter.partition_numel() for parameter in parameters]
        sums |= {one.ds_id: piece for one, piece in zip(parameters, flat.grad.split(lengths), strict=True)}
    # The name that Python gives a private attribute.
    wrapped._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = sums
    wrapped.grad_partitions_flat_buffer = None

    def add(parameters: list[Any], gradients: list[Tensor]) -> None:
        """Adds this rank's share of each gradient, on the device, to its sum. Behind the last, notes the sum's norm."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # A parameter may end before this rank's share of it would begin.
            if parameter.partition_numel() * wrapped._get_param_partition_rank(parameter) < parameter.ds_numel:
                add_one(parameter, gradient)
            if parameter.grad is not None and parameter.grad.is_cuda:
                # It was made on another stream than the one that has read it.
                parameter.grad.record_stream(torch.cuda.current_stream())
            parameter.grad = None

    def add_one(parameter: Any, gradient: Tensor) -> None:
        sum_ = sums[parameter.ds_id].narrow(0, 0, gradient.numel())
        if wrapped.micro_step_id == 0:
            sum_.copy_(gradient, non_blocking=True)
        elif sum_.device == gradient.device:
            gradient = sum_.add_(gradient)
        else:
            gradient = sum_.to(gradient.device, non_blocking=True).add_(gradient)
            sum_.copy_(gradient, non_blocking=True)
        if wrapped.is_gradient_accumulation_boundary():
            norm = wrapped._constant_buffered_norm2(gradient)
            wrapped.norm_for_param_grads[wrapped.get_param_id(parameter)] = norm

    wrapped.partition_grads = add
