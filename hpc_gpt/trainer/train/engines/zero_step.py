"""Replaces parts of DeepSpeed's ZeRO optimizers: steps that make the host wait, ZeRO-3's second gradient buffer, the
optimizer of what `engine.offload_ratio` leaves on the GPU.

Every private name used here is listed in `private_parts`. If one is missing, or DeepSpeed is newer than the tested
version, the optimizers do not change; but a missing name of `SPLIT_UPDATE` raises ConfigError.
"""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.train.engines import private_parts
from hpc_gpt.trainer.train.engines.optimizer import clip_divisor, counts, instruct, is_fused, norms_of, whole_norm

# DeepSpeed's functions that read the norm from the device, and their replacements, which do not.
_WITHOUT_HOST: dict[str, Callable[..., Any]] = {
    "is_invalid_grad_norm": lambda norm: False,
    "mask_nan_or_inf_with_val_inplace": lambda norm, device=None, val=-1.0: None,
}
_USES = {
    "BF16_Optimizer": private_parts.STEP_WITHOUT_HOST_BF16,
    "DeepSpeedZeroOptimizer": private_parts.STEP_WITHOUT_HOST_12,
    "DeepSpeedZeroOptimizer_Stage3": private_parts.STEP_WITHOUT_HOST_3,
}


def can_step_without_host(resolved: Resolved, wrapped: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether `StepWithoutHost` works for DeepSpeed's optimizer `wrapped`, which steps `optimizer`.

    The host must know the norm of each step if it holds the gradients (offloading), if it changes the loss scale
    (fp16), and if the optimizer cannot skip a step on the device (not fused). DeepSpeed's own step runs then.
    """
    if resolved.train.dtype == "fp16" or resolved.engine.offload != "none" or not is_fused(optimizer):
        return False
    use = _USES.get(type(wrapped).__name__)
    return use is not None and private_parts.can_use(use)


class StepWithoutHost:
    """Replaces the step of `wrapped`, DeepSpeed's ZeRO optimizer, so that the host does not wait for the norm.

    DeepSpeed 0.19.8 copies the norm to the host in every step, up to five times: to check whether it is finite, to mark
    it if it is not, and again to clip. No key of its configuration prevents that and keeps the norm, so two of its
    functions are replaced during a step. The norm stays on the device. The fused optimizer inside divides by it while
    it reads the gradient, and skips the step if it is not finite. So the host runs ahead of the device from one logging
    step to the next.

    Bytes read and written for an element of the gradient, beside the optimizer's own: 4, for the norm. DeepSpeed's own
    step takes 28: the norm is of copies in fp64 (4 + 8 + 8), and clipping is a pass of its own (4 + 4).

    `norm`, before clipping, and `skipped` are on the device.
    """

    def __init__(self, wrapped: Any, optimizer: torch.optim.Optimizer, clip: float, tp_rank: int) -> None:
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        self._wrapped = wrapped
        self._clip = clip
        self._tp_rank = tp_rank
        self._instructed = False
        self._step = wrapped.step
        self._modules = [sys.modules[type(wrapped).__module__], sys.modules["deepspeed.runtime.utils"]]
        wrapped.step = self._step_without_host
        use = _USES[type(wrapped).__name__]
        if use is private_parts.STEP_WITHOUT_HOST_BF16:
            self._gradients = wrapped.get_grads_for_norm
            wrapped.get_grads_for_norm = self._norms_of_gradients
        else:
            # In ZeRO-3 this is a pass over the gradients even if there is nothing to do.
            wrapped.unscale_and_clip_grads = lambda *_: None
            if use is private_parts.STEP_WITHOUT_HOST_12:
                wrapped.check_grad_overflow = False
                wrapped.scaled_global_norm = self._norm_of_partitions
            else:
                wrapped._get_norm_groups = lambda: [self._norm_of_partitions()]
        optimizer.register_step_pre_hook(self._before_step)

    def _norms_of_gradients(self, for_clipping: bool = False) -> Any:
        """The norms of the gradients that this rank counts; their common norm is that of all these gradients."""
        assert not for_clipping
        dense, of_experts = self._gradients()
        return [norms_of(dense)], of_experts

    def _norm_of_partitions(self, norm_type: int = 2) -> Tensor:
        """The norm of the whole model's gradient, of which each rank has its partition."""
        wrapped, counted = self._wrapped, []
        groups = wrapped.params_in_partition if hasattr(wrapped, "params_in_partition") else wrapped.fp16_groups
        for index, parameters in enumerate(groups):
            own = [one for one in wrapped.averaged_gradients[index] if not getattr(one, "_zero_padding", False)]
            counted += [one for one, of in zip(own, parameters, strict=False) if counts(of, self._tp_rank)]
        group = dist.group.WORLD if dist.get_world_size() > 1 else None
        return whole_norm(norms_of(counted), group, wrapped.device)

    def _step_without_host(self, closure: Any = None) -> None:
        # A checkpoint holds `clip_grad`, so it is put back after the step.
        clip, self._wrapped.clip_grad = self._wrapped.clip_grad, 0.0
        self._instructed = False
        try:
            with _replaced(self._modules):
                self._step(closure)
        finally:
            self._wrapped.clip_grad = clip

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Instructs the optimizer, once a step. A step calls it for each group of parameters."""
        if self._instructed:
            return
        self._instructed = True
        norm = self._wrapped._global_grad_norm.float()
        self.skipped = ~norm.isfinite()
        # Infinity stands for NaN as well, as in ZeRO.
        self.norm = torch.where(self.skipped, math.inf, norm)
        instruct(optimizer, self.skipped, clip_divisor(self.norm, self._clip), norm.device)


@contextlib.contextmanager
def _replaced(modules: list[ModuleType]) -> Iterator[None]:
    """A context with the functions of `_WITHOUT_HOST` in place of those of the same name in the modules."""
    kept = [
        (module, name, getattr(module, name)) for module in modules for name in _WITHOUT_HOST if hasattr(module, name)
    ]
    for module, name, _ in kept:
        setattr(module, name, _WITHOUT_HOST[name])
    try:
        yield
    finally:
        for module, name, own in kept:
            setattr(module, name, own)


def sum_where_read(wrapped: Any) -> None:
    """Makes ZeRO-3's optimizer `wrapped` keep one fp32 buffer for gradients.

    DeepSpeed 0.19.8 sums a rank's share of the gradients in one fp32 buffer. After the last micro-batch it makes
    another one of the same size for the update: in every step a new one, or with offloading one that stays beside the
    first on the host. Here the two are one. That saves 4 bytes for each of a rank's parameters and the pass that fills
    them. With offloading a sum is where its group of parameters is updated, and the first gradient of a step is sent
    there once. DeepSpeed sends it, fetches it for the norm and sends it a second time.

    Not for NVMe, nor for fp16, whose gradients are summed in fp16.
    """
    if not private_parts.can_use(private_parts.ZERO_3_SUMS):
        return
    if wrapped.swap_optimizer or wrapped.gradient_accumulation_dtype != wrapped.master_weights_and_grads_dtype:
        return
    if wrapped.offload_optimizer:
        _sum_beside_states(wrapped)
    else:
        _read_sums(wrapped)


def _read_sums(wrapped: Any) -> None:
    """Makes the update of a group read its part of the first buffer."""
    lengths = [flat.numel() for flat in wrapped.fp32_partitioned_groups_flat]
    sums = wrapped.grad_partitions_flat_buffer.split(lengths)

    def hand_over(group: int) -> None:
        wrapped.fp32_partitioned_groups_flat[group].grad = sums[group]
        wrapped.averaged_gradients[group] = None

    wrapped._prepare_fp32_grad_for_sub_group = hand_over


def _sum_beside_states(wrapped: Any) -> None:
    """Sums gradients in the buffer that the update of their group reads, on the host or the device."""
    sums: dict[int, Tensor] = {}
    for parameters, flat in zip(wrapped.fp16_groups, wrapped.fp32_partitioned_groups_flat, strict=True):
        lengths = [parameter.partition_numel() for parameter in parameters]
        sums |= {one.ds_id: piece for one, piece in zip(parameters, flat.grad.split(lengths), strict=True)}
    # The name that Python gives a private attribute.
    wrapped._DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition = sums
    wrapped.grad_partitions_flat_buffer = None

    def add(parameters: list[Any], gradients: list[Tensor]) -> None:
        """Adds this rank's share of each gradient, on the device, to its sum; after the last one stores its norm."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            # A parameter may end before this rank's share of it would begin.
            if parameter.partition_numel() * wrapped._get_param_partition_rank(parameter) < parameter.ds_numel:
                add_one(parameter, gradient)
            if parameter.grad is not None and parameter.grad.is_cuda:
                # Another stream than the one that has read it made it.
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


class DeviceAdamW:
    """Updates the groups that `engine.offload_ratio` leaves on the GPU, in place of ZeRO-3's `backup_optimizer`.

    DeepSpeed 0.19.8's own has a first parameter group of its own, so the schedule never sets the rate of the matrices,
    and states of its own, which no checkpoint has. Here parameter groups and states are those of `host`, DeepSpeed's
    CPU Adam, which updates the other groups. A state has CPU Adam's form wherever it is, so a checkpoint can be loaded
    with any ratio.
    """

    def __init__(self, host: torch.optim.Optimizer) -> None:
        self._host = host

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of `host`. DeepSpeed puts the tensor to update into one of them and calls `step`."""
        return self._host.param_groups

    @torch.no_grad()
    def step(self) -> None:
        """Updates the tensors in the groups by torch's fused kernel, which needs no temporaries."""
        for group in self.param_groups:
            for flat in group["params"]:
                state = self._host.state[flat]
                if not state:
                    state.update(step=0, exp_avg=torch.zeros_like(flat), exp_avg_sq=torch.zeros_like(flat))
                adamw(
                    [flat],
                    [flat.grad],
                    [state["exp_avg"]],
                    [state["exp_avg_sq"]],
                    [],
                    [torch.full((), float(state["step"]), device=flat.device)],
                    fused=True,
                    amsgrad=False,
                    beta1=group["betas"][0],
                    beta2=group["betas"][1],
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    eps=group["eps"],
                    maximize=False,
                )
                state["step"] += 1


def share_states(wrapped: Any) -> None:
    """Makes ZeRO-3's optimizer `wrapped` update what stays on the GPU with the rates and states of the other groups."""
    private_parts.require(private_parts.SPLIT_UPDATE)
    wrapped.backup_optimizer = DeviceAdamW(wrapped.optimizer)
