"""Engine ddp: the whole model on every rank, under torch's DistributedDataParallel; on one rank the bare model.

bf16 and fp16 keep fp32 master weights (`master_weights`), with `train.optimizer_mode` compiled flat ones that one pass
updates. With `engine.sharded_optimizer` ZeroRedundancyOptimizer splits the moments over the ranks,
whole parameters at a time.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.runs import lineage
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.replicated import ReplicatedCheckpoint, read_replicated
from hpc_gpt.train.checkpoints.training_state import check_identity, load_random_state, put_identity, put_random_state
from hpc_gpt.train.engines.kernels import attention_kernels, compile_model
from hpc_gpt.train.engines.master_weights import HALF, FlatMasters, MasterWeights, OnePassAdamW
from hpc_gpt.train.engines.optimizer import (
    LossScaler,
    Update,
    build_optimizer,
    gradients_of,
    learning_rate,
    norms_of,
)
from hpc_gpt.train.engines.private_parts import for_each
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult

# Keys of a checkpoint's identity that may differ from those of the run that loads it.
CONVERTIBLE = lineage.CONVERTIBLE["ddp"]


def build(resolved: Resolved, device: torch.device) -> Ddp:
    """The engine on this rank; torch.distributed is initialised, with as many ranks as the layout has."""
    return Ddp(resolved, device)


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint by its full name, fp32; in one process."""
    return read_replicated(folder)


class Ddp:
    """See `hpc_gpt.train.engines.protocol.Engine`. On one rank there is no wrapper and no collective."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine, train = resolved.layout, resolved.engine, resolved.train
        assert layout.tp == layout.pp == 1, "settle_engine refuses the others"
        assert dist.get_world_size() == layout.gpus, f"{dist.get_world_size()} ranks for {layout}"
        self.device = device
        self.tp_rank, self.pp_rank, self.dp_rank = layout.coordinate(dist.get_rank())
        self._resolved = resolved
        self._step = 0
        self._attention = attention_kernels(resolved, device)
        self.module = Gpt(resolved.model, train.seed, techniques=Techniques.of(engine)).to(device)
        parameters = list(self.module.parameters())
        self._masters = _masters_of(resolved, parameters)
        if self._masters is not None:
            parameters = self._masters.masters
        self._parameters = parameters
        self._optimizer = _build_optimizer(resolved, parameters, self._masters)
        compile_model(self.module, engine)
        self._replicas = self._wrap() if layout.dp > 1 else None
        self._scaler = LossScaler(train.dtype, device)
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

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self._step

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step; see `Engine`. The ranks meet only in the last micro-batch's backward pass."""
        count = self._resolved.batch.micro_batches
        total = torch.zeros((), device=self.device)
        model = self._replicas or self.module
        with self._attention():
            for number, (tokens, targets) in enumerate(islice(micro_batches, count), 1):
                with self._gradients(last=number == count):
                    loss = model(tokens, targets)
                    self._scaler.scale(loss / count).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        lr = learning_rate(self._resolved.train, self._step)
        norm, skipped = self._update.apply(lr)
        if self._masters is not None:
            self._masters.finish_step()
        self._forget_gradients()
        self._step += 1
        return StepResult(self._mean(total / count), norm, lr, skipped)

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

    def _forget_gradients(self) -> None:
        if self._replicas is not None and self._masters is None:
            # They are the buckets, a gradient's only memory, and have to stay in place.
            for_each("zero_", gradients_of(self._parameters))
            return
        for parameter in self.module.parameters():
            parameter.grad = None

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank."""
        total = torch.zeros((), device=self.device)
        with self._attention():
            for tokens, targets in islice(micro_batches, count):
                total += self.module(tokens, targets)
        return self._mean(total / count)

    def _mean(self, loss: Tensor) -> Tensor:
        if self._replicas is not None:
            dist.all_reduce(loss)
            loss /= self._resolved.layout.dp
        return loss

    def save(self, files: RankFiles) -> None:
        """Weights by rank 0, the optimizer by rank 0 or by each its share, every rank's generator state."""
        rank = dist.get_rank()
        self._checkpoint.save(files, rank, self._step, self._scaler.read())
        put_random_state(files, rank, self.device)
        if rank == 0:
            put_identity(files, self._resolved, self._step)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, on any number of ranks; CheckpointError if it is of another model."""
        differing = check_identity(folder, self._resolved, CONVERTIBLE)
        self._step, scale = self._checkpoint.load(folder, dist.get_rank())
        self._scaler.restore(scale)
        if self._masters is not None:
            self._masters.copy_back()
        if not differing:
            load_random_state(folder, dist.get_rank(), self.device)
        dist.barrier()

    def parameter_count(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        return sum(parameter.numel() for parameter in self._parameters)


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
