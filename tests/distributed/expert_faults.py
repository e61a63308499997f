"""Faults that other programs had with experts over several ranks, put into an engine or a layer one at a time."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.trainer.engines.torch_engine import gradients_of
from hpc_gpt.trainer.model.dispatch import ExpertParallel, Routed
from hpc_gpt.trainer.model.gpt import Block
from hpc_gpt.trainer.model.router import Router, routers_of
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, is_of_experts, split_of
from tests.distributed.mutation import mutate

Fault = Callable[[Any], None]


def _no_divisor(engine: Any) -> None:
    """The gradient of experts is divided by their replicas alone."""
    if hasattr(engine, "_of_experts"):
        reduce, ep = engine._complete_gradients, engine.experts.size
        engine._complete_gradients = lambda: (reduce(), [one.mul_(ep) for one in gradients_of(engine._of_experts)])
    else:
        engine.experts = ExpertParallel()


def _norm_of(counts: Callable[[Any, Tensor], bool]) -> Fault:
    """The norm has only the parameters that `counts_in_norm` names on this rank."""

    def apply(engine: Any) -> None:
        ours = engine._shards if hasattr(engine, "_shards") else engine._parameters
        engine._counted = [one for one in ours if counts(engine, one)]

    return apply


def _once(engine: Any, one: Tensor) -> bool:
    """Whether a rank counts a parameter that is not of experts. Shards over tp are equal where nothing is split."""
    if hasattr(engine, "_shards"):
        return engine.tp_rank == 0 or split_of(one) is not None  # type: ignore[arg-type]
    return dist.get_rank() == 0


def _own_replica(engine: Any) -> None:
    engine._same_experts = None


def _same_draw(engine: Any) -> None:
    """Each rank draws its experts as if they were the first."""
    with torch.no_grad():
        for one in engine._of_experts:
            dist.broadcast(one, 0)


def _of_routers(change: Callable[[Router, Any], None]) -> Fault:
    def apply(engine: Any) -> None:
        for router in routers_of(engine.module):
            change(router, engine._resolved.layout)

    return apply


class _Summed(TensorParallel):
    """Adds up over tp what each of its ranks has whole."""

    def shared(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return tuple(self.sum_backward(one) for one in parameters)


def _sum_over_tp(router: Router, layout: Any) -> None:
    router.tp = _Summed(router.tp.rank, router.tp.size, router.tp.group)


def _balance_times(factor: Callable[[Any], float]) -> Fault:
    return _of_routers(lambda router, layout: setattr(router, "balance_coef", router.balance_coef * factor(layout)))


OF_ENGINES: dict[str, Fault] = {
    "divisor": _no_divisor,  # pytorch#160285, Megatron-LM#5956, DeepSpeed#5259, VeOmni#185
    "norm without experts": _norm_of(  # Megatron-LM#5916
        lambda engine, one: not is_of_experts(one) and _once(engine, one)
    ),
    "norm of one rank's experts": _norm_of(lambda engine, one: dist.get_rank() == 0),
    "norm of each copy": _norm_of(
        lambda engine, one: is_of_experts(one) or hasattr(engine, "_shards") or dist.get_rank() == 0
    ),
    "replicas": _own_replica,
    "same draw": _same_draw,
    "no balance": _balance_times(lambda layout: 0),  # Automodel#1408
    "balance of each micro-batch": lambda engine: mutate(engine, "the balance's scale"),  # Automodel#1408
    "balance by ranks of ep": _balance_times(lambda layout: 1 / layout.ep),  # Megatron-LM#3672
    "balance of own positions": lambda engine: mutate(engine, "the other positions' counts"),
    "balance by ranks of tp": _balance_times(lambda layout: layout.tp),  # Megatron-LM#3768
    "router summed over tp": _of_routers(_sum_over_tp),
    "z-loss by ranks of cp": _of_routers(  # OLMo-core's loss_div_factor, Megatron-LM#3768
        lambda router, layout: setattr(router, "z_loss", router.z_loss / layout.cp)
    ),
    "own loads": lambda engine: mutate(engine, "the other ranks' loads"),
}


def short(routed: Routed) -> Routed:
    """The last row is past the last offset, as padding is."""
    return routed._replace(ends=routed.ends.clamp(max=len(routed.order) - 1))


def compute_anew(block: Block, hidden: Tensor, documents: Any = None, kept: Any = None) -> Tensor:
    """A block's `compute` that chooses and exchanges counts again."""
    return COMPUTE(block, hidden, documents)


def count_forward(router: Router, hidden: Tensor, kept: Any = None) -> tuple[Tensor, Tensor]:
    """A router that counts the loads of each forward pass, a recomputation's, too."""
    weights, chosen = FORWARD(router, hidden, kept)
    sums = torch.cat([router.count(chosen).sum(0), torch.zeros(1)]).double()
    router.sums = sums if router.sums is None else router.sums + sums
    return weights, chosen


COMPUTE, FORWARD = Block.compute, Router.forward
# {fault of a recomputation: the class, its method, and what is put there}
OF_RECOMPUTATION: dict[str, tuple[Any, str, Any]] = {
    "chosen anew": (Block, "compute", compute_anew),
    "counted in each pass": (Router, "forward", count_forward),
}
