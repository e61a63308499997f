"""The optimizers: a module each, with `build`, named as its facts in `core.optimizers`."""

import importlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import Share


@dataclass(frozen=True)
class Updated:
    """What the optimizer of a rank updates: `parameters`, of which each is a share of the whole model (DeepSpeed's
    engines give no `shares`)."""

    resolved: Resolved
    parameters: Sequence[nn.Parameter]
    shares: Sequence[Share]

    @property
    def groups(self) -> list[dict[str, Any]]:
        """torch's groups: matrices and embeddings, which decay; biases and norms, of one dimension, which do not."""
        parts: tuple[list[nn.Parameter], list[nn.Parameter]] = ([], [])
        for one in self.parameters:  # under ZeRO-3 a rank holds only a flat piece
            parts[len(getattr(one, "ds_shape", one.shape)) < 2].append(one)
        decays = self.resolved.train.weight_decay, 0.0
        return [{"params": part, "weight_decay": decay} for part, decay in zip(parts, decays, strict=True)]

    @property
    def kernels(self) -> dict[str, bool]:
        """torch's arguments for `train.optimizer_mode`.

        Modes fused and host are torch's fused kernels, on the device or for states offloaded to the host: one pass, no
        compiler, and the host does not wait. Foreach launches one kernel per operation for all parameters, for-loop one
        per operation and parameter. With both the host waits for the gradient norm, because they cannot skip a step on
        the device. Results differ only by rounding.
        """
        mode = self.resolved.train.optimizer_mode or "fused"
        return {"fused": mode in ("fused", "host"), "foreach": mode == "foreach"}


def build_optimizer(
    resolved: Resolved, parameters: Iterable[nn.Parameter], shares: Sequence[Share] = ()
) -> torch.optim.Optimizer:
    """The optimizer that `train.optimizer` names.

    Before each step `Update` sets the `lr` of each group, times the group's `lr_ratio` if it has one. With
    `defaults["fused"]` a step obeys `found_inf` and `grad_scale`, as torch's fused kernels do. States of a parameter's
    size are saved by their names.
    """
    module = importlib.import_module(f"{__name__}.{resolved.train.optimizer.replace('-', '_')}")
    optimizer: torch.optim.Optimizer = module.build(Updated(resolved, list(parameters), shares))
    return optimizer
