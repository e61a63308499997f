"""SGD without momentum, by torch."""

import torch

from hpc_gpt.trainer.optimizers import Updated


def build(updated: Updated) -> torch.optim.Optimizer:
    return torch.optim.SGD(updated.groups, lr=updated.resolved.train.lr, **updated.kernels)
