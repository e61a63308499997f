"""Breaks an engine on purpose: takes out one of the things a right answer needs."""

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.trainer.engines.fsdp import sharded_modules
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.experts import Experts
from hpc_gpt.trainer.model.gpt import Block, PositionEmbedding
from hpc_gpt.trainer.model.linear import RowParallelLinear
from hpc_gpt.trainer.model.norm import Norm
from hpc_gpt.trainer.model.router import Router
from hpc_gpt.trainer.model.sequence_parallel import SequenceParallel
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss


class Deaf(TensorParallel):
    """A group that leaves out one kind of sum."""

    def __init__(self, tp: TensorParallel, forward: bool = False, backward: bool = False, op: object = None) -> None:
        super().__init__(tp.rank, tp.size, tp.group)
        self.deaf_forward, self.deaf_backward, self.deaf_op = forward, backward, op

    def sum_forward(self, partial: Tensor) -> Tensor:
        return partial if self.deaf_forward else super().sum_forward(partial)

    def sum_backward(self, replicated: Tensor) -> Tensor:
        return replicated if self.deaf_backward else super().sum_backward(replicated)

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
        return tensor if op == self.deaf_op else super().all_reduce(tensor, op)


class Lone(SequenceParallel):
    """A group whose parameters between blocks keep the gradient of this rank's positions alone."""

    def shared(self, *parameters: Tensor) -> tuple[Tensor, ...]:
        return parameters


class Displaced(SequenceParallel):
    """A group whose every rank takes the first positions."""

    def positions(self, count: int) -> slice:
        return slice(0, count)


class Unscattered(SequenceParallel):
    """A group that gathers, but sends no gradient back to the positions of others."""

    def scatter(self, partial: Tensor) -> Tensor:
        return partial[:, self.positions(partial.shape[1] // self.size)].contiguous()


def mutate(engine: Any, mutation: str) -> None:
    """Takes out of `engine` what `mutation` names."""
    _MUTATIONS[mutation](engine)


def _first(engine: Any, kind: type[nn.Module]) -> Any:
    return next(module for module in engine.module.modules() if isinstance(module, kind))


def _replace_tp(find: Callable[[Any], Any], **deaf: Any) -> Callable[[Any], None]:
    """Gives the module that `find` finds a group that does not hear."""

    def apply(engine: Any) -> None:
        module = find(engine)
        module.tp = Deaf(module.tp, **deaf)

    return apply


def _norm_by_itself(engine: Any) -> None:
    engine._everyone = None


def _no_mean(engine: Any) -> None:
    engine._accumulation = lambda is_last: engine._replicas.no_sync()


def _sum_for_mean(engine: Any) -> None:
    for module in sharded_modules(engine.module):
        module.set_force_sum_reduction_for_comms(True)  # gloo knows no sum with a factor
        module.set_gradient_divide_factor(1.0)


def _twice_the_gradient(engine: Any) -> None:
    # The same value, twice the gradient: Adam alone would not notice.
    _first(engine, VocabParallelLoss).register_forward_hook(lambda _, inputs, value: 2 * value - value.detach())


def _no_divisor(engine: Any) -> None:
    scale, count = engine._scaler.scale, engine._resolved.batch.micro_batches
    engine._scaler.scale = lambda loss: scale(loss * count)


def _regroup(kind: type[nn.Module], group: type[SequenceParallel]) -> Callable[[Any], None]:
    """Gives the first module of a kind another group."""

    def apply(engine: Any) -> None:
        module = _first(engine, kind)
        module.tp = group(module.tp.rank, module.tp.size, module.tp.group)

    return apply


def _no_experts_sum(engine: Any) -> None:
    _replace_tp(lambda engine: _first(engine, Experts), forward=True)(engine)
    engine.balance._choose_apart = []  # it would end the run in its first step


def _no_marks(engine: Any) -> None:
    for parameter in engine.module.parameters():
        parameter.model_parallel = parameter.tensor_model_parallel = False


def _no_exchange(engine: Any) -> None:
    optimizer = engine._optimizer
    optimizer.send_weights = None
    for matrices in getattr(optimizer, "matrices", ()):

        def send(stack: Any, own: Any, owner: int, one: Any = matrices) -> Any:
            result, work = type(one)._send(one, stack, own, owner)
            return (result if owner == one._rank else torch.zeros_like(result)), work

        matrices._send = send


def _nothing_of_others(engine: Any) -> None:
    for exchange in engine._optimizer.matrices:

        def send(parts: Any, sent: list[int], received: list[int], one: Any = exchange) -> Tensor:
            arrived = list(type(one)._send(one, parts, sent, received).split(received))
            return torch.cat([piece * (rank == one._rank) for rank, piece in enumerate(arrived)])

        exchange._send = send


def _padding_counts(engine: Any) -> None:
    loss = _first(engine, VocabParallelLoss)
    loss.vocab = engine._resolved.model.padded_vocab


def _pad_is_trained(engine: Any) -> None:
    for module in engine.module.modules():
        for name in ("pad", "padding_idx"):  # ours, and torch's own
            if hasattr(module, name):
                setattr(module, name, None)


def _no_tied_sum(engine: Any) -> None:
    engine.module.get_tied_weights_and_groups = list


def _balance_unscaled(engine: Any) -> None:
    engine.balance.begin = lambda scale: type(engine.balance).begin(engine.balance, 1.0)


def _own_positions_counted(engine: Any) -> None:
    router = _first(engine, Router)
    router.tp = copy.copy(router.tp)
    router.tp.context = ContextParallel()


def _own_loads(engine: Any) -> None:
    engine.balance._gpus = 1


# Of the blocks, the first one's.
_MUTATIONS: dict[str, Callable[[Any], None]] = {
    "the embedding's sum": _replace_tp(lambda engine: _first(engine, VocabParallelEmbedding), forward=True),
    "the head's backward sum": _replace_tp(lambda engine: _first(engine, VocabParallelEmbedding), backward=True),
    "qkv's backward sum": _replace_tp(lambda engine: _first(engine, Block).attention.qkv, backward=True),
    "up's backward sum": _replace_tp(lambda engine: _first(engine, Block).feed_forward.up, backward=True),
    "the projection's sum": _replace_tp(lambda engine: _first(engine, Block).attention.projection, forward=True),
    "down's sum": _replace_tp(lambda engine: _first(engine, Block).feed_forward.down, forward=True),
    "the loss's maximum": _replace_tp(lambda engine: _first(engine, VocabParallelLoss), op=dist.ReduceOp.MAX),
    "the loss's sum": _replace_tp(lambda engine: _first(engine, VocabParallelLoss), op=dist.ReduceOp.SUM),
    "the norm's sum": _norm_by_itself,
    "the right gradient scale": _twice_the_gradient,
    "the tied gradients' sum": _no_tied_sum,
    "the data-parallel mean": _no_mean,
    "the mean of the sum": _sum_for_mean,
    "the accumulation's divisor": _no_divisor,
    "the norms' gradient sum": _regroup(Norm, Lone),
    "the biases' gradient sum": _regroup(RowParallelLinear, Lone),
    "the position gradients' sum": _regroup(PositionEmbedding, Lone),
    "the rank's own positions": _regroup(PositionEmbedding, Displaced),
    "the scattered sums": _regroup(RowParallelLinear, Unscattered),
    "the tensor-parallel marks": _no_marks,
    "the exchange of what each rank updated": _no_exchange,
    "the matrices' other pieces": _nothing_of_others,
    "the padding's mask": _padding_counts,
    "the pad token's row": _pad_is_trained,
    "the experts' backward sum": _replace_tp(lambda engine: _first(engine, Experts), backward=True),
    "the experts' sum": _no_experts_sum,
    "the router's gradient sum": _regroup(Router, Lone),
    "the balance's scale": _balance_unscaled,
    "the other positions' counts": _own_positions_counted,
    "the other ranks' loads": _own_loads,
}
