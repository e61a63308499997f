"""AdamW over flat buffers, in one pass that a compiler makes: gradient to moments, master and half weight.

Bytes read and written for a parameter in a step, by counting, as `master_weights` counts 48:

    one micro-batch on one rank, half gradients     copy 2 + 2, norm 2, update 2 + 12 and 12 + 2                     34
    more, fp32 sums                                 copy 2 + 4, norm 4, update 4 + 12 and 12 + 2                     40
    each micro-batch more                           2 + 4 + 4                                                        10

The copy is of a gradient that its layer's backward pass has just written. With more ranks the bucket's average comes to
it, 4 + 4 for the division and the collective, as in every mode. Held: weight 2, master 4, moments 8; from the first
gradient of a step to its end 2, or 4 for sums.

That is with Inductor, which makes one loop a group, without a temporary: seen in the C++ that it writes for a CPU, not
yet in what it writes for a GPU. Backend aot_eager runs the same
formula operation by operation: right, but slow, and with temporaries as large as the model's fp32 weights.

Time on a GPU: not measured (tests/benchmarks/update.py does it). On one core of a CPU, 124M parameters: 1.2 times
fused's. The pass takes as long as torch's own kernel, which writes no halves, but torch's norm of halves makes an fp32
copy there first, which takes longer than the pass; on a GPU it converts as it reads.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpc_gpt.settings.experiment import Engine, Train
from hpc_gpt.train.engines.compilation import check_backend
from hpc_gpt.train.engines.flat_masters import FlatGroup, FlatMasters


class _Buffers(NamedTuple):
    """A group's, all flat and equally long: gradients half or fp32, masters and moments fp32, halves."""

    gradients: Tensor
    masters: Tensor
    first: Tensor
    second: Tensor
    halves: Tensor


class OnePassAdamW(torch.optim.Optimizer):
    """torch.optim.AdamW (Loshchilov and Hutter 2019, algorithm 2) over the groups of `masters`, which writes the halves
    too. Rates are read from its groups at each step, all the same.

    It is told as torch's fused kernels are (`fused_step.instruct`) to divide the gradient or to leave everything as it
    is, and waits for nothing. Its state is torch's, parameter by parameter: "step", "exp_avg", "exp_avg_sq", views of
    its own buffers. ConfigError where `engine.compile_backend` lacks its compiler.
    """

    def __init__(self, train: Train, masters: FlatMasters, engine: Engine) -> None:
        device = masters.weights[0].device
        check_backend(engine.compile_backend, device, "or leave train.optimizer_mode out")
        self._flat = masters
        self._betas, self._eps = (train.beta1, train.beta2), train.eps
        groups = [
            {"params": masters.masters_of(group), "weight_decay": train.weight_decay if group.decays else 0.0}
            for group in masters.groups
        ]
        # `fused` says that it takes instructions on the device.
        super().__init__(groups, {"lr": train.lr, "betas": self._betas, "eps": self._eps, "fused": True})
        self.found_inf: Tensor | None = None
        self.grad_scale: Tensor | None = None
        self._moments = [(torch.zeros_like(one.masters), torch.zeros_like(one.masters)) for one in masters.groups]
        # A number for each parameter, as torch has it, though all are the same.
        self._steps = torch.zeros(len(masters.weights), device=device)
        self._one, self._never = torch.ones((), device=device), torch.zeros((), dtype=torch.bool, device=device)
        steps = iter(self._steps)
        for group, settings, (first, second) in zip(masters.groups, self.param_groups, self._moments, strict=True):
            for owner, *moments in zip(settings["params"], group.views(first), group.views(second), strict=True):
                self.state[owner] = {"step": next(steps), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
        self._update = torch.compile(_update, backend=engine.compile_backend, dynamic=False, fullgraph=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step over the gradients that `masters` has collected."""
        assert closure is None
        skipped = self._never if self.found_inf is None else self.found_inf.bool()
        self._steps += ~skipped
        # Of the bias corrections fp32 would lose digits: 1 - 0.999.
        count = self._steps[0].double()
        lr = self.param_groups[0]["lr"]
        beta1, beta2 = self._betas
        self._update(
            [self._buffers(*pair) for pair in zip(self._flat.groups, self._moments, strict=True)],
            [torch.full_like(self._one, group["lr"] * group["weight_decay"]) for group in self.param_groups],
            (torch.full_like(count, lr) / (1 - beta1**count)).float(),
            (1 - beta2**count).sqrt().float(),
            self._one if self.grad_scale is None else self.grad_scale,
            skipped,
            self._betas,
            self._eps,
        )

    @staticmethod
    def _buffers(group: FlatGroup, moments: tuple[Tensor, Tensor]) -> _Buffers:
        assert group.gradients is not None, "no gradient came"
        return _Buffers(group.gradients, group.masters, *moments, group.halves)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the state, number by number as torch counts parameters, into the buffers; none begins anew."""
        owners = [owner for group in self.param_groups for owner in group["params"]]
        for number, owner in enumerate(owners):
            kept = state_dict["state"].get(number)
            for key, place in self.state[owner].items():
                if kept is None:
                    place.zero_()
                else:
                    place.copy_(kept[key])


def _update(
    groups: list[_Buffers],
    decays: list[Tensor],
    step_size: Tensor,
    root: Tensor,
    divisor: Tensor,
    skipped: Tensor,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """A step of every group, in place. `decays`: rate x weight decay of each; `step_size`: rate / (1 - beta1^step);
    `root`: sqrt(1 - beta2^step); these, `divisor` and `skipped` are tensors without dimensions."""
    beta1, beta2 = betas
    for (gradients, masters, first, second, halves), decay in zip(groups, decays, strict=True):
        gradient = gradients.float() / divisor
        mean = beta1 * first + (1 - beta1) * gradient
        square = beta2 * second + (1 - beta2) * gradient * gradient
        moved = masters - decay * masters - step_size * mean / (square.sqrt() / root + eps)
        # What is left out may be no number: it must not be multiplied by anything.
        moved = torch.where(skipped, masters, moved)
        first.copy_(torch.where(skipped, first, mean))
        second.copy_(torch.where(skipped, second, square))
        masters.copy_(moved)
        halves.copy_(moved)
