"""AdamW, by torch."""

import torch

from hpc_gpt.trainer.optimizers import Updated


def build(updated: Updated) -> torch.optim.Optimizer:
    train = updated.resolved.train
    betas = train.beta1, train.beta2
    return torch.optim.AdamW(updated.groups, lr=train.lr, betas=betas, eps=train.eps, **updated.kernels)
