"""The router of a mixture of experts: it sends each token to some of the experts, and spreads the tokens over all.

Balance enters by gradients. `_Balance` passes the router's scores through; its backward pass, which runs once for each
micro-batch whatever is recomputed, counts the tokens of each expert and adds the gradients of the balance loss and of
the z-loss. So no stage of a pipeline carries a loss, and an evaluation counts nothing.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.model.collectives import apply
from hpc_gpt.trainer.model.dispatch import RoutingChoice
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel

_PLACES = 65521  # the weights of the places in a checksum; their number is prime
_TINY = 1e-20  # added to a sum of sigmoids (DeepSeek-V3)


class Router(nn.Module):
    """Chooses `experts_per_token` experts for each token, and the weights of their outputs.

    softmax: the probabilities of all experts; topk-softmax: those of the chosen ones alone, which sum to 1; sigmoid:
    DeepSeek-V3's (arXiv:2412.19437, section 2.1.2), whose product is fp32, as the others' is with `router_dtype`. The
    arithmetic is that of transformers' classes. `choice_bias` is added to the scores for the choice only; it is a
    buffer in fp32, which no optimizer knows.
    With `expert_groups` a token uses the groups whose two best scores have the largest sum.

    `scale` is the factor of a micro-batch's loss before its backward pass, which an engine sets for each step. `sums`
    has the tokens of each expert since the engine read them, and the sum of the balance losses: float64,
    [experts + 1]. Each tensor-parallel and context-parallel rank counts the tokens of all ranks of its group. If the
    engine sets `choices`, a number, the backward passes add the choices to it, each with a weight by its place.
    """

    choice_bias: Tensor | None

    def __init__(
        self, name: str, shape: ModelShape, tp: TensorParallel, initial: InitialWeights, techniques: Techniques
    ) -> None:
        super().__init__()
        assert shape.experts is not None
        assert shape.experts_per_token is not None
        self.name = name
        self.layer = int(name.split(".")[1])
        self.tp = tp
        self.kind, self.experts, self.used = shape.router, shape.experts, shape.experts_per_token
        self.norms, self.factor = shape.norm_topk or shape.router == "topk-softmax", shape.router_scale
        self.in_fp32 = shape.router == "sigmoid" or shape.router_dtype == "fp32"
        self.groups, self.groups_used = shape.expert_groups or 1, shape.groups_per_token or 1
        self.balance_coef, self.z_loss = techniques.balance_coef, techniques.z_loss
        self.weight = tp.parameter(f"{name}.weight", initial.normal(f"{name}.weight", (self.experts, shape.hidden)))
        bias = tp.whole(f"{name}.choice_bias", torch.zeros(self.experts)) if shape.router_bias else None
        self.register_buffer("choice_bias", bias)
        self.scale: Tensor | float = 1.0
        self.sums: Tensor | None = None
        self.choices: Tensor | None = None

    def _apply(self, function: Any, recurse: bool = True) -> nn.Module:
        """Moves and casts the parameters as torch does; only moves `choice_bias`, whose steps 16 bits would lose."""
        bias = self.choice_bias
        super()._apply(function, recurse)  # type: ignore[no-untyped-call]
        if bias is not None and self.choice_bias is not None:
            self.choice_bias = bias.to(self.choice_bias.device)
        return self

    def forward(self, hidden: Tensor, kept: RoutingChoice | None = None) -> tuple[Tensor, Tensor]:
        """[batch, positions, hidden] -> (weights, numbers of the chosen experts), each [batch, positions, used]."""
        (weight,) = self.tp.shared(self.weight)
        logits = F.linear(hidden.float(), weight.float()) if self.in_fp32 else F.linear(hidden, weight)
        scores = logits.sigmoid() if self.kind == "sigmoid" else logits.softmax(-1, dtype=torch.float32)
        kept = kept or RoutingChoice()
        chosen = kept.chosen = self._choose(scores.detach()) if kept.chosen is None else kept.chosen
        if torch.is_grad_enabled():
            scores = apply(_Balance, scores, logits if self.z_loss else None, chosen, self)
        weights = scores.gather(-1, chosen)
        if self.norms:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + _TINY if self.kind == "sigmoid" else total)
        if self.factor != 1:
            weights = weights * self.factor
        return weights if self.kind == "sigmoid" else weights.to(hidden.dtype), chosen

    def _choose(self, scores: Tensor) -> Tensor:
        """The experts of each token, from the scores of all, [..., experts]."""
        if self.choice_bias is not None:
            scores = scores + self.choice_bias
        if self.groups > 1:
            grouped = scores.view(*scores.shape[:-1], self.groups, -1)
            best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
            used = torch.zeros_like(best, dtype=torch.bool).scatter_(-1, best.topk(self.groups_used, -1).indices, True)
            scores = grouped.masked_fill(~used.unsqueeze(-1), -torch.inf).flatten(-2)
        return scores.topk(self.used, -1).indices

    def probabilities(self, scores: Tensor) -> Tensor:
        """Shares of the experts, 1 in sum, from the scores, [..., experts]."""
        return scores / (scores.sum(-1, keepdim=True) + _TINY) if self.kind == "sigmoid" else scores

    def count(self, chosen: Tensor) -> Tensor:
        """Counts the tokens of each sample for each expert, [batch, experts], int64, over all ranks that have
        positions of the samples."""
        samples, experts = chosen.shape[0], self.experts
        places = chosen.flatten(1) + experts * torch.arange(samples, device=chosen.device).unsqueeze(1)
        counts = torch.zeros(samples * experts, dtype=torch.int64, device=chosen.device)
        counts.scatter_add_(0, places.flatten(), torch.ones_like(places).flatten())
        if self.tp.parts > 1:
            self.tp.all_reduce(counts)
        if self.tp.context.size > 1:
            dist.all_reduce(counts, group=self.tp.context.group)
        return counts.view(samples, experts)


class _Balance(torch.autograd.Function):
    """Returns the scores unchanged; adds the gradients of the balance loss to theirs, and of the z-loss to the logits'.

    The balance loss of a layer is the mean over the samples of E sum_e f_e p_e (Fedus et al. 2021, arXiv:2101.03961,
    section 2.2): f_e is the share of a sample's assignments to expert e, p_e the mean of its probabilities. By sample
    (Megatron's seq_aux_loss) it depends on neither micro-batch nor layout. The z-loss is the mean over the tokens of
    logsumexp(logits)^2 (Zoph et al. 2022, arXiv:2202.08906, section 3.3).

    An engine averages gradients over context-parallel ranks, so each rank divides by its positions; the tensor-parallel
    ranks' are summed, so each divides by those of the group.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, logits: Tensor | None, chosen: Tensor, router: Router) -> Tensor:
        ctx.save_for_backward(scores, chosen, *([] if logits is None else [logits]))
        ctx.router = router
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        router: Router = ctx.router
        scores, chosen, *logits = ctx.saved_tensors
        counts = router.count(chosen)
        tokens = scores.shape[0] * scores.shape[1]
        # [batch, 1, experts]: E f_e
        pull = (counts * (router.experts / counts.sum(1, keepdim=True))).float().unsqueeze(1)
        probabilities = router.probabilities(scores)
        mean = (pull * probabilities).sum(-1, keepdim=True)
        sums = torch.cat([counts.sum(0), mean.mean().view(1)]).double()
        router.sums = sums if router.sums is None else router.sums + sums
        if router.choices is not None:
            flat = chosen.flatten()
            router.choices += ((flat + 1) * (torch.arange(len(flat), device=flat.device) % _PLACES + 1)).sum()
        gradient, factor = gradients[0], router.scale / (tokens * router.tp.parts)
        if router.balance_coef:
            slope = pull
            if router.kind == "sigmoid":
                slope = (pull - mean) / (scores.sum(-1, keepdim=True) + _TINY)
            gradient = gradient + slope * (factor * router.balance_coef)
        of_logits = None
        if logits:
            raised = logits[0].float()
            size = raised.logsumexp(-1, keepdim=True)
            of_logits = (raised.softmax(-1) * size * (2 * router.z_loss * factor)).to(logits[0].dtype)
        return gradient, of_logits, None, None


def routers_of(module: nn.Module) -> list[Router]:
    """The routers of a model or stage, in the order of their layers."""
    return [part for part in module.modules() if isinstance(part, Router)]
