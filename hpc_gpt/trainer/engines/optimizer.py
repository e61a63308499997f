"""The end of a step: gradient norm and clipping, the update, and fp16's loss scale."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines import torch_private
from hpc_gpt.trainer.model.tensor_parallel import split_of


def counts_in_norm(parameter: nn.Parameter, tp_rank: int) -> bool:
    """Whether this rank counts the parameter in the norm, so that a model replica counts each element once.

    A split parameter counts on every tensor-parallel rank, a whole one on the first rank. The later stage's copy of a
    tied parameter, which DeepSpeed marks, does not count.
    """
    return (tp_rank == 0 or split_of(parameter) is not None) and not getattr(parameter, "ds_pipe_replicated", False)


def counted_parameters(parameters: Iterable[nn.Parameter], tp_rank: int) -> list[nn.Parameter]:
    """The parameters that this rank counts in the norm."""
    return [parameter for parameter in parameters if counts_in_norm(parameter, tp_rank)]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients of those parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def norms_of(gradients: list[Tensor]) -> Tensor:
    """The norm of each gradient, in one tensor."""
    return torch.stack(torch_private.for_each("norm", gradients)) if gradients else torch.zeros(0)


def whole_norm(norms: Tensor, group: dist.ProcessGroup | None, device: torch.device) -> Tensor:
    """The norm over all ranks of `group` (None: this rank alone), on `device`, from the norms of this rank's pieces."""
    square = torch.zeros((), dtype=torch.float64, device=device)
    if norms.numel():
        square += norms.double().square().sum().to(device)
    if group is not None:
        dist.all_reduce(square, group=group)
    return square.sqrt().float()


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `clip_and_skip_on_device` works on the optimizer: with torch's fused kernels, on which torch sets a mark.

    Without the mark, under another name in a later torch, a step would neither clip nor skip, so the host does it.
    """
    return bool(optimizer.defaults.get("fused")) and hasattr(optimizer, "_step_supports_amp_scaling")


def clip_and_skip_on_device(
    optimizer: torch.optim.Optimizer, skipped: Tensor, divisor: Tensor | None, device: torch.device
) -> None:
    """Tells the next step of a fused `optimizer`, whose parameters are on `device`, to skip or clip. Nothing waits.

    If `skipped`, a bool tensor, is true, weights and moments do not change. Otherwise every gradient is divided by
    `divisor`.
    """
    optimizer.found_inf = skipped.float().to(device)  # type: ignore[attr-defined]
    optimizer.grad_scale = None if divisor is None else divisor.to(device)  # type: ignore[attr-defined]


def clip_divisor(norm: Tensor, clip: float) -> Tensor | None:
    """The divisor that reduces a gradient of this norm to at most `clip`; None if `clip` is 0."""
    return ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else None


class GradientNorm:
    """Measures the norm before each step of `optimizer`, clips, and skips a step whose gradient is not finite.

    For an optimizer that DeepSpeed does not wrap: DeepSpeed 0.19.8 without ZeRO computes the norm over the first
    pipeline stage only. `clip` 0 does not clip. `group` has the ranks of one model replica (all stages, all
    tensor-parallel ranks). `norm` and `skipped` are tensors on the device. With a fused optimizer the host never waits
    for the device; with any other one it must know whether to drop the gradients.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        tp_rank: int,
        group: dist.ProcessGroup | None,
        clip: float,
    ) -> None:
        self.parameters = list(parameters)
        self.owned = counted_parameters(self.parameters, tp_rank)
        self.group = group
        self.clip = clip
        self.norm: Tensor | None = None
        self.skipped: Tensor | None = None
        optimizer.register_step_pre_hook(self._before_step)

    @torch.no_grad()
    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        counted = gradients_of(self.owned)
        device = self.parameters[0].device
        self.norm = whole_norm(norms_of(counted), self.group, device)
        self.skipped = ~self.norm.isfinite()
        divisor = clip_divisor(self.norm, self.clip)
        if is_fused(optimizer):
            clip_and_skip_on_device(optimizer, self.skipped, divisor, device)
        elif self.skipped:
            for parameter in self.parameters:
                parameter.grad = None  # the optimizer skips a parameter that has no gradient
        elif divisor is not None:
            torch_private.for_each("div_", gradients_of(self.parameters), divisor)


class LossScaler:
    """fp16's loss scale: torch.amp.GradScaler with its defaults. For fp32 and bf16 it does nothing.

    The scale is 65536 at first, is halved after a skipped step, and doubled after 2000 steps in a row without one.
    torch's scaler inspects the gradients that one rank holds, so with sharded gradients the ranks would get different
    scales. Here it inspects one number instead, made from the norm of the whole model's gradient. Only `read` waits for
    the device.
    """

    def __init__(self, dtype: str, device: torch.device) -> None:
        self._scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")
        self._one = torch.ones((), device=device)
        self._verdict = torch.zeros((), device=device)
        self._stand_in = torch.optim.SGD([self._verdict])
        self._scaler.scale(self._one)  # the first use makes the scale

    def scale(self, loss: Tensor) -> Tensor:
        """The scaled loss, from which the backward pass begins."""
        return self._scaler.scale(loss)

    @property
    def factor(self) -> Tensor | None:
        """The scale as a tensor on the device; None if nothing is scaled."""
        return self._scaler.scale(self._one) if self._scaler.is_enabled() else None

    def follow(self, skipped: Tensor) -> None:
        """Updates the scale after a step."""
        if self._scaler.is_enabled():
            self._verdict.grad = torch.where(skipped, math.inf, 0.0)
            self._scaler.unscale_(self._stand_in)
            self._scaler.update()

    def read(self) -> dict[str, Any]:
        """The scale, and the steps since it has changed; empty if nothing is scaled. Waits for the device."""
        state = self._scaler.state_dict()
        return {"scale": state["scale"], "good_steps": state["_growth_tracker"]} if state else {}

    def restore(self, state: dict[str, Any]) -> None:
        """Restores a state that `read` returned."""
        if state:
            own = {"scale": state["scale"], "_growth_tracker": state["good_steps"]}
            self._scaler.load_state_dict(self._scaler.state_dict() | own)


class Update:
    """Steps an optimizer with complete gradients. A step whose gradient is not finite is skipped.

    `norms` returns the norms of the gradient's pieces that this rank counts; each element of the model counts on one
    rank of `group` (None: this rank alone). `clip` 0 does not clip. Loss scale and clipping are one division, which
    torch's fused kernels do while they read the gradient. They can also skip the step. So nothing waits for the device,
    unless the optimizer is not fused: then, as in torch's GradScaler, the host must know whether to call it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        norms: Callable[[], Tensor],
        group: dist.ProcessGroup | None,
        clip: float,
        scaler: LossScaler,
        device: torch.device,
    ) -> None:
        self.optimizer = optimizer
        self._norms = norms
        self._group = group
        self._clip = clip
        self._scaler = scaler
        self._device = device
        # The height of the schedule, from 0 to 1, for groups of parameters with a rate of their own.
        self.schedule_share = 1.0

    @torch.no_grad()
    def apply(self, lr: float) -> tuple[Tensor, Tensor]:
        """Does one step; returns (norm before clipping, whether it was skipped), both on the device.

        The gradients are not valid afterwards.
        """
        factor = self._scaler.factor
        norm = self._norm() if factor is None else self._norm() / factor
        skipped = ~norm.isfinite()
        divisor = clip_divisor(norm, self._clip)
        if factor is not None:
            divisor = factor if divisor is None else divisor * factor
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * self.schedule_share if "peak_lr" in group else lr
        owners = [one for group in self.optimizer.param_groups for one in group["params"]]
        if is_fused(self.optimizer):
            device = owners[0].device if owners else self._device
            clip_and_skip_on_device(self.optimizer, skipped, divisor, device)
            self._step_and_send()
        elif not skipped:
            if divisor is not None:
                torch_private.for_each("div_", gradients_of(owners), divisor)
            self._step_and_send()
        self._scaler.follow(skipped)
        return norm, skipped

    def _step_and_send(self) -> None:
        self.optimizer.step()
        if (send_weights := getattr(self.optimizer, "send_weights", None)) is not None:
            send_weights()

    def _norm(self) -> Tensor:
        return whole_norm(self._norms(), self._group, self._device)
