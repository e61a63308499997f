"""signSGD: the update of a rank's parameters."""

from typing import Any

import torch

from hpc_gpt.trainer.optimizers import Updated


class SignSgd(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for weight in (one for one in group["params"] if one.grad is not None):
                weight.sub_(weight.grad.sign().add_(weight, alpha=group["weight_decay"]), alpha=group["lr"])


def build(updated: Updated) -> torch.optim.Optimizer:
    return SignSgd(updated.groups, {"lr": updated.resolved.train.lr})
