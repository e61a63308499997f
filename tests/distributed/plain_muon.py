"""The reference's Muon: the matrices of a plain model by torch.optim.Muon, or by a few lines of its own in fp32; the
rest by AdamW. It takes from hpc_gpt the numbers of an experiment alone."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.settings.experiment import Train


def matrices_of(name: str, weight: Tensor) -> list[Tensor]:
    """The hidden matrices in a parameter of `PlainGpt`, or of a class of transformers."""
    if weight.ndim == 3:  # of all experts
        return [one for expert in weight for one in expert.chunk(2 if "gate_up" in name else 1)]
    is_hidden = weight.ndim == 2 and ("blocks." in name or "layers." in name)
    if not is_hidden or name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):
        return []
    return list(weight.chunk(3 if "qkv" in name else 1))


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Newton-Schulz in fp32."""
    x = matrix / max(float(matrix.norm()), 1e-7)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(steps):
        product = x @ x.T
        x = 3.4445 * x + (-4.7750 * product + 2.0315 * product @ product) @ x
    return x.T if len(matrix) > matrix.shape[1] else x


class MuonInFp32:
    """torch.optim.Muon with `match_rms_adamw`, but for the products' type."""

    def __init__(self, matrices: list[Tensor], train: Train) -> None:
        self.train, self.matrices = train, matrices
        self.momenta = [torch.zeros_like(one) for one in matrices]
        self.param_groups: list[dict[str, Any]] = [{}]

    def step(self) -> None:
        lr, momentum = self.param_groups[0]["lr"], self.train.muon_momentum
        for one, kept in zip(self.matrices, self.momenta, strict=True):
            assert one.grad is not None
            kept.mul_(momentum).add_(one.grad, alpha=1 - momentum)
            update = orthogonal((1 - momentum) * one.grad + momentum * kept, self.train.muon_steps)
            one.mul_(1 - lr * self.train.weight_decay)
            one.sub_(lr * 0.2 * math.sqrt(max(one.shape)) * update)


class PlainMuon:
    """Both optimizers of a model. Gradients of the matrices are views of the model's own."""

    def __init__(self, model: nn.Module, train: Train) -> None:
        named = dict(model.named_parameters())
        self.matrices = {name: matrices_of(name, one.detach()) for name, one in named.items()}
        self.named, views = named, [one for matrices in self.matrices.values() for one in matrices]
        others = [one for name, one in named.items() if not self.matrices[name]]
        groups = [
            {"params": [one for one in others if one.dim() > 1], "weight_decay": train.weight_decay},
            {"params": [one for one in others if one.dim() == 1], "weight_decay": 0.0},
        ]
        self.others = torch.optim.AdamW(groups, betas=(train.beta1, train.beta2), eps=train.eps, foreach=False)
        self.hidden: Any = MuonInFp32(views, train)
        if train.muon_dtype == "bf16":
            how = {"momentum": train.muon_momentum, "ns_steps": train.muon_steps, "adjust_lr_fn": "match_rms_adamw"}
            self.hidden = torch.optim.Muon(views, weight_decay=train.weight_decay, **how)  # type: ignore[arg-type]
        self.ratio = 1.0 if train.muon_lr is None else train.muon_lr / train.lr
        self.param_groups = self.others.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for name, matrices in self.matrices.items():
            gradient = self.named[name].grad
            assert gradient is not None
            for matrix, of_matrix in zip(matrices, matrices_of(name, gradient), strict=True):
                matrix.grad = of_matrix
        self.hidden.param_groups[0]["lr"] = self.ratio * self.param_groups[0]["lr"]
        self.hidden.step()
        self.others.step()

    def zero_grad(self) -> None:
        for one in self.named.values():
            one.grad = None
