"""The optimizer and its learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hpc_gpt.settings.experiment import Train


def learning_rate(train: Train, step: int) -> float:
    """The rate of optimizer step number `step` (from 0), a pure function of the step.

    It rises linearly over `warmup_steps`, the first step already above zero, then stays, or falls as half a cosine
    to `min_lr` at `steps` and stays there.
    """
    if step < train.warmup_steps:
        return train.lr * (step + 1) / train.warmup_steps
    if train.decay == "constant":
        return train.lr
    progress = (step - train.warmup_steps) / max(1, train.steps - train.warmup_steps)
    fall = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return train.min_lr + (train.lr - train.min_lr) * fall


def build_optimizer(train: Train, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW or SGD (no momentum) over the parameters, computed as `train.optimizer_mode` says.

    Fused, as torch's own kernels: no compiler, one pass, no host sync; on the host, where offloaded states are, the
    same. Foreach is one launch for all parameters and operation, for-loop one for each; both make the host wait for
    the gradient's norm, as they cannot be told on the device to leave a step out. Results differ by rounding alone.
    Mode compiled is `one_pass_adamw`, which is built over flat masters.
    """
    mode = train.optimizer_mode or "fused"
    how = {"fused": mode in ("fused", "host"), "foreach": mode == "foreach"}
    groups = [
        {"params": part, "weight_decay": decay}
        for part, decay in zip(by_decay(parameters), (train.weight_decay, 0.0), strict=True)
    ]
    if train.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=train.lr, **how)
    return torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, **how)


def by_decay(parameters: Iterable[nn.Parameter]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those whose weights decay, matrices and embeddings, and the others: biases and norms (one-dimensional)."""
    parameters = list(parameters)
    return [one for one in parameters if _dimensions(one) >= 2], [one for one in parameters if _dimensions(one) < 2]


def _dimensions(parameter: nn.Parameter) -> int:
    """Of the whole parameter: under ZeRO-3 a rank holds but a flat piece of it."""
    return len(getattr(parameter, "ds_shape", parameter.shape))
