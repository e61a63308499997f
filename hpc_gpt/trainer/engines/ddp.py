"""Engine ddp: the whole model on every rank, under torch's DistributedDataParallel; on one rank the bare model.

bf16 and fp16 have fp32 master weights (`master_weights`). With `engine.sharded_optimizer` the moments are split over
the ranks by whole parameters.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import Share
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.engines.kernels import compile_model, compiler
from hpc_gpt.trainer.engines.master_weights import HALF, MasterWeights
from hpc_gpt.trainer.engines.torch_engine import TorchEngine, counted_parameters, for_each, gradients_of
from hpc_gpt.trainer.model.fp8 import WeightsOnce
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel, full_name, is_of_experts
from hpc_gpt.trainer.optimizers import build_optimizer
from hpc_gpt.trainer.ranks import own_group


class Ddp(TorchEngine):
    """The engine; see `trainer.engines.protocol.TrainingEngine`. On one rank it has no wrapper and no collective."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine, train = resolved.layout, resolved.engine, resolved.train
        assert layout.pp == 1, "the settings' check of the engine refuses stages"
        super().__init__(resolved, device)
        tp = TensorParallel(given=self.initial, device=device, context=self.context, experts=self.experts)
        self.module = Gpt(resolved.model, train.seed, tp, Techniques.of(engine, train)).to(device)
        parts = self.module.parts()
        if layout.ep > 1:
            sides = [
                [[one for one in part if is_of_experts(one) is apart] for apart in (False, True)] for part in parts
            ]
            parts = [side for both in sides for side in both if side]
        self._masters = _master_weights_of(resolved, parts)
        self._weights = [weight for part in parts for weight in part]
        self._parameters = self._weights if self._masters is None else self._masters.masters
        # Weights of which other ranks have others; their gradients are averaged apart.
        self._of_experts = [one for one in self._parameters if layout.ep > 1 and is_of_experts(one)]
        experts = {*self._of_experts}
        self._same_experts = own_group(layout, "edp", dist.get_rank()) if layout.ep > 1 else None
        shares = [whole_share(one, resolved.model, self.experts) for one in self._parameters]
        self._optimizer = build_optimizer(
            resolved, self._parameters, shares, lambda one: self._same_experts if one in experts else self._everyone
        )
        compile_model(self.module, engine)
        in_fp8 = train.matmul != "none"
        self._cast_weights = WeightsOnce(self.module.blocks, compiler(engine)) if in_fp8 else None
        self._replicas = self._wrap() if layout.data_ranks > 1 else None
        self._model = self._replicas or self.module
        # Each parameter counts on its first rank: a norm that each rank computed might differ by rounding.
        place = layout.data_rank(dist.get_rank())
        counted = counted_parameters(self._parameters, self.tp_rank)
        self._counted = [one for one in counted if place < (layout.ep if is_of_experts(one) else 1)]
        self._states = TorchStates(self._parameters, shares, self._optimizer, self._writes, engine.sharded_optimizer)

    def _writes(self, share: Share) -> bool:
        """Whether this rank saves the share: the first rank does, and the first one with each of divided experts."""
        return dist.get_rank() < (1 if share.count == math.prod(share.shape) else self.experts.size)

    def _wrap(self) -> DistributedDataParallel:
        """Returns the model wrapped by DDP.

        All ranks draw the same weights from the seed, so none are sent. Every parameter is used in every step and DDP
        does not look for unused ones, so `static_graph` would save nothing.
        """
        # Buffers are copies of a rank's weights, so they are not sent; torch 2.13 has renamed the switch.
        takes = inspect.signature(DistributedDataParallel).parameters
        buffers = {next(key for key in ("forward_sync_buffers", "broadcast_buffers") if key in takes): False}
        if self.experts.size > 1:
            apart = [full_name(one) for one in self.module.parameters() if is_of_experts(one)]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.module, apart)  # type: ignore[no-untyped-call]
            if self._masters is not None:
                self._masters.reduced_apart = True
        wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True, init_sync=False, **buffers)  # type: ignore[arg-type]
        if self._masters is not None:
            # A lambda, because DDP compares a hook's annotations, which are strings in this module, with types.
            wrapped.register_comm_hook(self._masters, lambda masters, bucket: masters.average(bucket))
        return wrapped

    def _accumulation(self, is_last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch: the last one averages the gradient over the ranks, the others add to it
        locally."""
        if self._replicas is not None and self._masters is not None:
            self._masters.collects = not is_last
        if self._replicas is None or is_last:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._replicas.no_sync()
        return context

    @torch.no_grad()
    def _complete_gradients(self) -> None:
        """Averages the gradients of this rank's experts, which DDP leaves alone: a sum over their copies, which have
        the tokens of all ranks already; so the divisor is that of the other weights."""
        gradients = gradients_of(self._of_experts)
        for_each("div_", gradients, self._resolved.layout.data_ranks)
        if self._same_experts is not None:
            _all_reduce_each(gradients, self._same_experts).wait()

    def _finish_update(self) -> None:
        if self._masters is not None:
            self._masters.refresh(self._weights)
            self._masters.drop_gradients(self._weights)
        if self._replicas is not None and self._masters is None:
            # The gradients are views of DDP's buckets, so they must stay in place.
            for_each("zero_", gradients_of(self._weights))
        else:
            for weight in self._weights:
                weight.grad = None
        self._weights_changed()

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()
        self._weights_changed()

    def _weights_changed(self) -> None:
        if self._cast_weights is not None:
            self._cast_weights()


build = Ddp


def _master_weights_of(resolved: Resolved, parts: list[list[nn.Parameter]]) -> MasterWeights | None:
    """The master weights of a model's `parts`, whose weights become bf16 or fp16; None in fp32."""
    half = HALF.get(resolved.train.dtype)
    return None if half is None else MasterWeights(parts, half)


def _all_reduce_each(tensors: list[Tensor], group: dist.ProcessGroup) -> torch.futures.Future[Any]:
    """Begins an all-reduce of every tensor over the group, a sum in place; returns a future."""
    coalesced: torch.futures.Future[Any] = group.allreduce_coalesced(tensors).get_future()
    return coalesced
