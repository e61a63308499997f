"""Breaks an engine on purpose: takes out one of the collectives a right answer needs."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.model.gpt import Block
from hpc_gpt.model.tensor_parallel import TensorParallel, VocabParallelEmbedding
from hpc_gpt.train.deepspeed_3d import Deepspeed3D


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


def _first(engine: Deepspeed3D, kind: type[nn.Module]) -> nn.Module:
    return next(module for module in engine.module.modules() if isinstance(module, kind))


def mutate(engine: Deepspeed3D, mutation: str) -> None:
    """Takes out of `engine` what `mutation` names; of the blocks, the first one's."""
    module, deepspeed = engine.module, engine._engine
    block = _first(engine, Block)
    assert isinstance(block, Block)
    embedding, loss = _first(engine, VocabParallelEmbedding), module.loss_fn
    if mutation == "the embedding's sum":
        embedding.tp = Deaf(embedding.tp, forward=True)
    elif mutation == "the head's backward sum":
        embedding.tp = Deaf(embedding.tp, backward=True)
    elif mutation == "qkv's backward sum":
        block.attention.qkv.tp = Deaf(block.attention.qkv.tp, backward=True)
    elif mutation == "up's backward sum":
        block.feed_forward.up.tp = Deaf(block.feed_forward.up.tp, backward=True)
    elif mutation == "the projection's sum":
        block.attention.projection.tp = Deaf(block.attention.projection.tp, forward=True)
    elif mutation == "down's sum":
        block.feed_forward.down.tp = Deaf(block.feed_forward.down.tp, forward=True)
    elif mutation == "the loss's maximum":
        loss.tp = Deaf(loss.tp, op=dist.ReduceOp.MAX)
    elif mutation == "the loss's sum":
        loss.tp = Deaf(loss.tp, op=dist.ReduceOp.SUM)
    elif mutation == "the norm's sum":
        assert engine._norm is not None
        engine._norm.group = None
    elif mutation == "the tied gradients' sum":
        module.get_tied_weights_and_groups = list
    elif mutation == "the data-parallel mean":
        deepspeed.pipeline_enable_backward_allreduce = False
    elif mutation == "the right gradient scale":
        # The same value, twice the gradient: Adam alone would not notice.
        loss.register_forward_hook(lambda _, inputs, value: 2 * value - value.detach())
    else:
        raise AssertionError(mutation)
