"""Engine ddp: the whole model on every rank, under torch's DistributedDataParallel; on one rank the bare model.

bf16 and fp16 keep fp32 master weights (`master_weights`), with `train.optimizer_mode` compiled flat ones that one pass
updates. With `engine.sharded_optimizer` ZeroRedundancyOptimizer splits the moments over the ranks, whole parameters at
a time.
"""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.replicated import ReplicatedCheckpoint, read_weights
from hpc_gpt.train.engines.kernels import compile_model
from hpc_gpt.train.engines.master_weights import HALF, FlatMasters, MasterWeights, OnePassAdamW
from hpc_gpt.train.engines.optimizer import Update, build_optimizer, gradients_of, norms_of
from hpc_gpt.train.engines.private_parts import for_each
from hpc_gpt.train.engines.protocol import TorchEngine

__all__ = ["build", "read_weights"]


class Ddp(TorchEngine):
    """See `hpc_gpt.train.engines.protocol.Engine`. On one rank there is no wrapper and no collective."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine, train = resolved.layout, resolved.engine, resolved.train
        assert layout.tp == layout.pp == 1, "the settings' check of the engine refuses the others"
        super().__init__(resolved, device)
        self.module = Gpt(resolved.model, train.seed, techniques=Techniques.of(engine)).to(device)
        parameters = list(self.module.parameters())
        self._masters = _masters_of(resolved, parameters)
        if self._masters is not None:
            parameters = self._masters.masters
        self._parameters = parameters
        self._optimizer = _build_optimizer(resolved, parameters, self._masters)
        compile_model(self.module, engine)
        self._replicas = self._wrap() if layout.dp > 1 else None
        self._model = self._replicas or self.module
        norms = self._masters.norms if self._masters else lambda: norms_of(gradients_of(parameters))
        self._update = Update(self._optimizer, norms, None, train.clip, self._scaler, device)
        self._checkpoint = ReplicatedCheckpoint(parameters, self._optimizer)

    def _wrap(self) -> DistributedDataParallel:
        """The model under DDP. The ranks draw the same weights by the same seed, so none are sent. Every parameter is
        used in every step and none is looked for, so that `static_graph` would save nothing."""
        wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True, init_sync=False)
        if self._masters is not None:
            # DDP compares a hook's annotations, which are strings in this module, with types: a lambda has none.
            wrapped.register_comm_hook(self._masters, lambda masters, bucket: masters.average(bucket))
        return wrapped

    def _gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """What becomes of a micro-batch's gradient: averaged over the ranks if it is the `last`, else kept."""
        if self._replicas is None:
            return contextlib.nullcontext()
        if self._masters is not None:
            self._masters.collects = not last
        context: contextlib.AbstractContextManager[None] = (
            contextlib.nullcontext() if last else self._replicas.no_sync()
        )
        return context

    def _update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        updated = self._update.apply(lr)
        if self._masters is not None:
            self._masters.finish_step()
        self._forget_gradients()
        return updated

    def _forget_gradients(self) -> None:
        if self._replicas is not None and self._masters is None:
            # They are the buckets, a gradient's only memory, and have to stay in place.
            for_each("zero_", gradients_of(self._parameters))
            return
        for parameter in self.module.parameters():
            parameter.grad = None

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()


build = Ddp


def _masters_of(resolved: Resolved, weights: list[nn.Parameter]) -> MasterWeights | None:
    """The masters of `weights`, which become half; None in fp32."""
    train = resolved.train
    if train.dtype not in HALF:
        return None
    half = HALF[train.dtype]
    if train.optimizer_mode != "compiled":
        return MasterWeights(weights, half)
    once = resolved.batch.micro_batches == resolved.layout.dp == 1
    return FlatMasters(weights, half, half if once else torch.float32)


def _build_optimizer(
    resolved: Resolved, parameters: list[nn.Parameter], masters: MasterWeights | None
) -> torch.optim.Optimizer:
    if isinstance(masters, FlatMasters):
        return OnePassAdamW(resolved.train, masters, resolved.engine)
    whole = build_optimizer(resolved.train, parameters)
    if not resolved.engine.sharded_optimizer:
        return whole
    # Its package imports torch's FSDP and more: 0.4 s of every start, for the few that shard.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(whole)
    takes = inspect.signature(kind).parameters
    settings: dict[str, Any] = {key: value for key, value in whole.defaults.items() if key in takes}
    return ZeroRedundancyOptimizer(whole.param_groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)
