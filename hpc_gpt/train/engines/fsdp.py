"""Engine fsdp: torch's FSDP2, a block at a time, over dp; our tensor parallelism over tp.

Weights, gradients and moments are split over the data-parallel ranks. `engine.reshard` frees a block's weights
after its forward pass and gathers them again for the backward pass; every micro-batch's gradient is reduced at once,
so that a rank never keeps more than its shard of it. Without it the weights are gathered once a step and stay, as does
the whole gradient, which is reduced once, in the last micro-batch: less to send, more to hold.

Over tp the model is split by the layers that every engine uses: torch's own tensor-parallel styles know neither a fused
QKV, of which a rank holds its heads of each part, nor this embedding and loss. The parameters and their gradients are
DTensors on the mesh of tp x dp, whose placements say which part of the model a rank holds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpc_gpt.model.gpt import Block, Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import InitialWeights, Split, TensorParallel, full_name, name_parameter, split_of
from hpc_gpt.runs import lineage
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.sharded import ShardedCheckpoint, read_sharded
from hpc_gpt.train.checkpoints.training_state import check_identity, load_random_state, put_identity, put_random_state
from hpc_gpt.train.engines.kernels import attention_kernels, compile_model
from hpc_gpt.train.engines.master_weights import HALF
from hpc_gpt.train.engines.optimizer import (
    LossScaler,
    Update,
    build_optimizer,
    gradients_of,
    learning_rate,
    norms_of,
    owned,
)
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult

# Keys of a checkpoint's identity that may differ from those of the run that loads it.
CONVERTIBLE = lineage.CONVERTIBLE["fsdp"]


def build(resolved: Resolved, device: torch.device) -> Fsdp:
    """The engine on this rank; torch.distributed is initialised, with as many ranks as the layout has."""
    return Fsdp(resolved, device)


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of a checkpoint by its full name, fp32; in one process."""
    return read_sharded(folder)


class Fsdp:
    """See `hpc_gpt.train.engines.protocol.Engine`.

    The optimizer works on the shards as plain tensors, which share their memory with FSDP's. Its kernels need not
    know that they are parts of a whole.
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


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The ranks of tp x dp. tp comes first: a parameter is split over tp, and then its share over dp.

    DTensor splits from left to right, so that plain placements say so on this mesh.
    """
    ranks = torch.arange(layout.gpus).view(layout.dp, layout.tp).T.contiguous()
    return DeviceMesh(device.type, ranks, mesh_dim_names=("tp", "dp"))


def on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as a mesh of their hosts, for offloaded shards: a DTensor is made on its mesh's device."""
    groups = [mesh.get_group("tp"), mesh.get_group("dp")]
    return DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=("tp", "dp"))


def place(shard: DTensor, split: Split | None, mesh: DeviceMesh) -> nn.Parameter:
    """FSDP2's shard of a tp rank's share, as what it is of the whole parameter on `mesh`, in the same memory.

    Of a fused QKV (`Split.parts`), of which a rank holds its heads of each part, the whole is that of the ranks' shares
    one after the other.
    """
    shape = list(shard.shape)
    if split is not None:
        shape[split.dim] *= mesh["tp"].size()
    whole = torch.empty(shape, device="meta")
    over_tp: Placement = Replicate() if split is None else Shard(split.dim)
    local = shard.to_local().detach()
    return nn.Parameter(
        DTensor.from_local(local, mesh, (over_tp, Shard(0)), run_check=False, shape=whole.shape, stride=whole.stride())
    )


def build_sharded_gpt(resolved: Resolved, device: torch.device, mesh: DeviceMesh) -> Gpt:
    """This rank's shards of the model, in fp32, under FSDP2's hooks.

    It is made a block at a time: one is drawn, whole, and split before the next, so that a rank never holds more
    than one block, and embedding and head, beside its shards. In bf16 and fp16 the shards are the master weights, what
    is gathered is half, and gradients are reduced in fp32.

    FSDP2 is given the tp ranks' shares as plain tensors, and gives them, gathered, to the layers so. Given DTensors on
    tp it would gather DTensors, and each use of one as a plain tensor costs host time, forward and backward (on a small
    model a quarter of the step). Before its first step FSDP2 takes the parameters that it finds in the modules. Its
    shards are put there as shards of the whole model, and so are their gradients.

    The backward pass gathers the next block while it works on this one. Without `engine.prefetch` it does not: each
    block is told to gather itself ahead, which it has done by then, so that the next one waits for its turn.
    """
    shape, engine = resolved.model, resolved.engine
    tp = TensorParallel(mesh.get_local_rank("tp"), mesh["tp"].size(), mesh.get_group("tp"))
    techniques, initial = Techniques.of(engine), InitialWeights(resolved.train.seed, shape.layers)
    half = HALF.get(resolved.train.dtype)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = OffloadPolicy()
    if engine.offload == "full":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    def shard(module: nn.Module, reshard: bool | None) -> None:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)

    model = Gpt(replace(shape, layers=0), resolved.train.seed, tp, techniques)
    model.shape = shape
    splits = {}
    for number in range(shape.layers):
        block = Block(f"blocks.{number}", shape, tp, initial, techniques)
        splits.update({full_name(one): split_of(one) for one in block.parameters()})
        shard(block, engine.reshard)
        model.blocks.append(block)
    splits.update({full_name(one): split_of(one) for one in model.parameters() if not isinstance(one, DTensor)})
    # What the root holds is needed at once when the backward pass begins: torch's own choice keeps it.
    shard(model, None if engine.reshard else False)
    where = on_host(mesh) if engine.offload == "full" else mesh
    for name, own in list(model.named_parameters()):
        assert isinstance(own, DTensor)
        owner, _, key = name.rpartition(".")
        parameter = name_parameter(place(own, splits[name], where), name, splits[name])
        model.get_submodule(owner).register_parameter(key, parameter)
    compile_model(model, engine)
    if not engine.prefetch:
        for module in sharded_modules(model):
            module.set_modules_to_backward_prefetch([module])
    return model


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The model and its blocks: what FSDP2 gathers together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
