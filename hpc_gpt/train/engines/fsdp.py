"""Engine fsdp: torch's FSDP2, a block at a time, over dp; our tensor parallelism over tp.

Weights, gradients and moments are dealt out over the data-parallel ranks. `engine.reshard` frees a block's weights
after its forward pass and gathers them again for the backward pass; every micro-batch's gradient is reduced at once,
so that a rank never keeps more than its shard of it. Without it the weights are gathered once a step and stay, as does
the whole gradient, which is reduced once, in the last micro-batch: less to send, more to hold.

Over tp the model is split by the layers that every engine uses: torch's own tensor-parallel styles know neither a fused
QKV, of which a rank holds its heads of each part, nor this embedding and loss. The parameters and their gradients are
DTensors on the mesh of tp x dp, whose placements say which part of the model a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from hpc_gpt.model.tensor_parallel import full_name, name_parameter, split_of
from hpc_gpt.runs import lineage
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.sharded import ShardedCheckpoint, read_sharded
from hpc_gpt.train.checkpoints.training_state import check_identity, load_random_state, put_identity, put_random_state
from hpc_gpt.train.engines.attention import attention_kernels
from hpc_gpt.train.engines.fsdp_model import build_mesh, build_sharded_gpt, sharded_modules
from hpc_gpt.train.engines.gradient_norm import gradients_of, norms_of, owned
from hpc_gpt.train.engines.loss_scaler import LossScaler
from hpc_gpt.train.engines.optimizer import build_optimizer, learning_rate
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult
from hpc_gpt.train.engines.update import Update

# Keys of a checkpoint's identity in which it may differ from the run that loads it.
CONVERTIBLE = lineage.CONVERTIBLE["fsdp"]


def build(resolved: Resolved, device: torch.device) -> Fsdp:
    """The engine on this rank; torch.distributed is initialised, with as many ranks as the layout has."""
    return Fsdp(resolved, device)


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint by its full name, fp32; in one process."""
    return read_sharded(folder)


class Fsdp:
    """See `hpc_gpt.train.engines.protocol.Engine`.

    The optimizer works on the shards as plain tensors, which share their memory with FSDP's: its kernels need not
    know that they are parts of something.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, train = resolved.layout, resolved.train
        assert layout.pp == 1, "settle_engine refuses stages"
        assert dist.get_world_size() == layout.gpus, f"{dist.get_world_size()} ranks for {layout}"
        self.device = device
        self.tp_rank, self.pp_rank, self.dp_rank = layout.coordinate(dist.get_rank())
        self._resolved = resolved
        self._step = 0
        self._attention = attention_kernels(resolved, device)
        self._mesh = build_mesh(layout, device)
        self.module = build_sharded_gpt(resolved, device, self._mesh)
        assert isinstance(self.module, FSDPModule)
        self._root: FSDPModule = self.module
        self._parameters = [parameter for parameter in self.module.parameters() if isinstance(parameter, DTensor)]
        self._shards = [_shard_of(parameter) for parameter in self._parameters]
        optimizer = build_optimizer(train, self._shards)
        self._scaler = LossScaler(train.dtype, device)
        everyone = dist.group.WORLD if layout.gpus > 1 else None
        counted = owned(self._shards, self.tp_rank)
        self._update = Update(
            optimizer, lambda: norms_of(gradients_of(counted)), everyone, train.clip, self._scaler, device
        )
        self._checkpoint = ShardedCheckpoint(self._parameters, self._shards, optimizer)

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return self._step

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step; see `Engine`."""
        count = self._resolved.batch.micro_batches
        total = torch.zeros((), device=self.device)
        with self._attention():
            for number, (tokens, targets) in enumerate(islice(micro_batches, count), 1):
                self._prepare(last=number == count)
                loss = self.module(tokens, targets)
                self._scaler.scale(loss / count).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        lr = learning_rate(self._resolved.train, self._step)
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            assert isinstance(parameter.grad, DTensor)
            shard.grad = parameter.grad.to_local()
        norm, skipped = self._update.apply(lr)
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            parameter.grad = shard.grad = None
        self._step += 1
        return StepResult(self._mean(total / count), norm, lr, skipped)

    def _prepare(self, last: bool) -> None:
        """What becomes of the next micro-batch's gradient and weights."""
        at_once = last or self._resolved.engine.reshard
        self._root.set_is_last_backward(last)
        self._root.set_requires_gradient_sync(at_once)
        self._root.set_reshard_after_backward(at_once)

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank."""
        total = torch.zeros((), device=self.device)
        with self._attention():
            for tokens, targets in islice(micro_batches, count):
                total += self.module(tokens, targets)
        self._free_gathered()
        return self._mean(total / count)

    def _free_gathered(self) -> None:
        """Without a backward pass after it, a forward pass leaves weights gathered."""
        for module in sharded_modules(self.module):
            module.reshard()

    def _mean(self, loss: Tensor) -> Tensor:
        if self._resolved.layout.dp > 1:
            dist.all_reduce(loss, group=self._mesh.get_group("dp"))
            loss /= self._resolved.layout.dp
        return loss

    def save(self, files: RankFiles) -> None:
        """Every rank's shards as one DCP checkpoint, and every rank's generator state."""
        rank = dist.get_rank()
        self._checkpoint.save(files, self._step, self._scaler.read())
        put_random_state(files, rank, self.device)
        if rank == 0:
            put_identity(files, self._resolved, self._step)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, on any layout; CheckpointError if it is of another model."""
        differing = check_identity(folder, self._resolved, CONVERTIBLE)
        self._step, scale = self._checkpoint.load(folder)
        self._scaler.restore(scale)
        if not differing:
            load_random_state(folder, dist.get_rank(), self.device)
        dist.barrier()

    def parameter_count(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        return sum(parameter.numel() for parameter in self._parameters)


def _shard_of(parameter: DTensor) -> nn.Parameter:
    """What of a parameter this rank holds, as a plain one in the same memory."""
    return name_parameter(nn.Parameter(parameter.to_local().detach()), full_name(parameter), split_of(parameter))  # type: ignore[arg-type]
