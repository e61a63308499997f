"""A step of the engines without DeepSpeed from top to bottom, and its parts: norm, update, fp16's loss scale."""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import learning_rate, schedule_share
from hpc_gpt.trainer.checkpoints.states import SavedStates
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates
from hpc_gpt.trainer.engines.protocol import MicroBatches, StepResult, TrainingEngine
from hpc_gpt.trainer.model.tensor_parallel import split_of
from hpc_gpt.trainer.model.vocab_loss import OnePassLoss


class TorchEngine(TrainingEngine):
    """The base of the engines without DeepSpeed: a step, saving and loading.

    A subclass sets `module`; `_model`, which wraps it for training; and the attributes without a value below. It says
    how a micro-batch's gradient is added to the others', what completes the sum, and what follows the update.
    """

    _model: nn.Module
    _parameters: list[Any]
    _counted: list[nn.Parameter]  # those in the norm: each element of the model on one rank
    _optimizer: torch.optim.Optimizer
    _states: TorchStates

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        self._step = 0
        self._scaler = LossScaler(resolved.train.dtype, device)
        self._everyone = dist.group.WORLD if resolved.layout.gpus > 1 else None

    @property
    def step(self) -> int:
        return self._step

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        train, count = self._resolved.train, self._resolved.batch.micro_batches
        factor = self._scaler.factor
        total = torch.zeros((), device=self.device)
        if isinstance(module_loss := getattr(self.module, "loss", None), OnePassLoss):
            module_loss.unscaled = count == 1 and factor is None
        self.balance.begin(1 / count if factor is None else factor / count)
        with self.attention():
            for number, micro_batch in enumerate(islice(micro_batches, count), 1):
                with self._accumulation(is_last=number == count):
                    loss = self._model(*self._inputs(micro_batch))
                    self._scaler.scale(loss / count).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        self._complete_gradients()
        norm = whole_norm(norms_of(gradients_of(self._counted)), self._everyone, self.device)
        if factor is not None:
            norm = norm / factor
        lr = learning_rate(train, self._step)
        set_rates(self._optimizer, lr, schedule_share(train, self._step))
        skipped = update(self._optimizer, norm, train.clip, self._scaler, self.device)
        self._finish_update()
        self._step += 1
        return StepResult(self._mean(total / count), norm, lr, skipped, self.balance.finish(skipped))

    def _accumulation(self, is_last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch. It decides whether the gradient is reduced over the ranks or only added up."""
        raise NotImplementedError

    def _complete_gradients(self) -> None:
        """Makes the gradients of the optimizer's parameters those of the whole batch, but for the loss scale."""

    def _finish_update(self) -> None:
        """Drops the gradients, and gives the model its new weights if the optimizer has others."""
        raise NotImplementedError

    def _weights_are_loaded(self) -> None:
        """Called after a checkpoint is loaded."""

    def _read_scale(self) -> dict[str, float]:
        return self._scaler.read()

    def _restore(self, saved: SavedStates) -> None:
        self._step = int(saved.about["step"])
        self._scaler.restore(saved.about["loss_scale"])
        self._weights_are_loaded()


def for_each(operation: str, tensors: list[Tensor], other: Any = None) -> Any:
    """Applies an `operation` of Tensor to all tensors, if there are any, in one kernel. `other`: a list of operands, or
    one for all."""
    operands = () if other is None else (other,)
    if not tensors:
        return []
    return getattr(torch, f"_foreach_{operation}")(tensors, *operands)


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
    return torch.stack(for_each("norm", gradients)) if gradients else torch.zeros(0)


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


def set_rates(optimizer: torch.optim.Optimizer, lr: float, share: float) -> None:
    """Sets the learning rate of a step: `lr`, or `share`, the height of the schedule from 0 to 1, times a rate of the
    group's own."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak_lr"] * share if "peak_lr" in group else lr


@torch.no_grad()
def update(
    optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, scaler: "LossScaler", device: torch.device
) -> Tensor:
    """Steps the optimizer with complete gradients, which are scaled by the loss scale; `norm` is without it. Returns
    whether the step was skipped, because the norm is not finite; on the device, as is `norm`.

    `clip` 0 does not clip. Loss scale and clipping are one division, which torch's fused kernels do while they read the
    gradient. They can also skip the step. So nothing waits for the device, unless the optimizer is not fused: then, as
    in torch's GradScaler, the host must know whether to call it. The gradients are not valid afterwards.
    """
    factor, divisor = scaler.factor, clip_divisor(norm, clip)
    if factor is not None:
        divisor = factor if divisor is None else divisor * factor
    skipped = ~norm.isfinite()
    owners = [one for group in optimizer.param_groups for one in group["params"]]
    if is_fused(optimizer):
        clip_and_skip_on_device(optimizer, skipped, divisor, owners[0].device if owners else device)
        is_due = True
    else:
        is_due = not skipped
        if is_due and divisor is not None:
            for_each("div_", gradients_of(owners), divisor)
    if is_due:
        optimizer.step()
        if (send_weights := getattr(optimizer, "send_weights", None)) is not None:
            send_weights()
    scaler.follow(skipped)
    return skipped


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
