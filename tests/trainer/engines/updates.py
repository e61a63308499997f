"""The end of a step of ddp and fsdp, on parameters of a test."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines.torch_engine import LossScaler, gradients_of, norms_of, set_rates, update, whole_norm

CPU = torch.device("cpu")


class Update:
    """The norm of the `counted` parameters over the group, then the optimizer's step."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        counted: Sequence[nn.Parameter],
        group: dist.ProcessGroup | None,
        clip: float,
        scaler: LossScaler,
    ) -> None:
        self.optimizer, self.counted, self.group, self.clip, self.scaler = optimizer, counted, group, clip, scaler

    def apply(self, lr: float) -> tuple[Tensor, Tensor]:
        """(norm without the loss scale, whether the step was skipped)."""
        norm = whole_norm(norms_of(gradients_of(self.counted)), self.group, CPU)
        if self.scaler.factor is not None:
            norm = norm / self.scaler.factor
        set_rates(self.optimizer, lr, 1.0)
        return norm, update(self.optimizer, norm, self.clip, self.scaler, CPU)
