"""Engine fsdp: torch's FSDP2, block by block, over the data axis; our tensor parallelism over tp.

Weights, gradients and moments are split over the data axis, which has the cp ranks of all replicas; or over each
`layout.shard` neighbours of it, and the shards' gradients are summed over these groups once per step. One GPU trains
without FSDP2, like ddp. Small blocks are gathered together (`engine.gather_blocks`). `engine.reshard`
frees a block's weights after its forward pass and gathers them again for the backward pass. Every micro-batch's
gradient is reduced at once, so a rank never keeps more than its shard of it. Without `reshard` the weights are gathered
once per step and stay. The whole gradient stays, too, and is reduced once, in the last micro-batch: less communication,
more memory.

Over tp the model is split by the layers that every engine uses. torch's tensor-parallel styles support neither a fused
QKV whose ranks hold their heads of each part, nor this embedding and loss. The parameters and their gradients are
DTensors on the mesh of `build_mesh`, whose placements say which part of the model a rank holds.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from hpc_gpt.core.engines.fsdp import blocks_by_size
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.states import Share, kept_rows
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates
from hpc_gpt.trainer.engines.ddp import Ddp
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.engines.master_weights import HALF
from hpc_gpt.trainer.engines.protocol import MicroBatches, TrainingEngine
from hpc_gpt.trainer.engines.torch_engine import TorchEngine, counted_parameters, for_each, gradients_of
from hpc_gpt.trainer.model.context_parallel import ContextParallel
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.gpt import Block, Gpt
from hpc_gpt.trainer.model.initial_weights import InitialWeights
from hpc_gpt.trainer.model.router import routers_of
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import (
    Split,
    TensorParallel,
    full_name,
    is_of_experts,
    name_parameter,
    split_of,
)
from hpc_gpt.trainer.optimizers import build_optimizer
from hpc_gpt.trainer.ranks import own_group


class Fsdp(TorchEngine):
    """The engine; see `hpc_gpt.trainer.engines.protocol.TrainingEngine`.

    The optimizer works on the shards as plain tensors, which share their memory with FSDP's DTensors.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout = resolved.layout
        assert layout.pp == 1, "the settings' check of the engine refuses stages"
        super().__init__(resolved, device)
        mesh, over = build_mesh(layout, device), build_expert_mesh(layout, device)
        self._data_group = mesh.get_group("dp") if layout.shard is None else own_group(layout, "data", dist.get_rank())
        self.module = self._model = model = build_sharded_gpt(
            resolved, device, mesh, self.initial, self.context, self.experts, over
        )
        self._parameters = [parameter for parameter in model.parameters() if isinstance(parameter, DTensor)]
        assert isinstance(model, FSDPModule)
        self._root: FSDPModule = model
        self._shards = [_shard_of(parameter) for parameter in self._parameters]
        pairs = list(zip(self._parameters, self._shards, strict=True))
        shares = [mesh_share(whole, shard, resolved.model) for whole, shard in pairs]
        replicas = None if layout.shard is None else mesh.get_group("replicas")
        self._optimizer = build_optimizer(resolved, self._shards, shares, lambda _: replicas)
        self._in_replicas = layout.shard is not None
        self._last_set: tuple[bool, bool] | None = None
        # The first replica's shards count in the norm; the others are equal.
        is_first = layout.data_rank(dist.get_rank()) < layout.shards
        self._counted = counted_parameters(self._shards, self.tp_rank) if is_first else []
        firsts = {full_name(shard) for whole, shard in pairs if is_first_copy(whole, split_of(shard))}
        self._states = TorchStates(self._shards, shares, self._optimizer, lambda share: share.name in firsts)

    def _accumulation(self, is_last: bool) -> AbstractContextManager[None]:
        self._root.set_is_last_backward(is_last)
        at_once = is_last or self._resolved.engine.reshard
        wanted = at_once, is_last if self._in_replicas else at_once
        if wanted != self._last_set:  # each call goes through all modules
            self._root.set_requires_gradient_sync(at_once)
            self._root.set_requires_all_reduce(wanted[1])
            self._root.set_reshard_after_backward(at_once)
            self._last_set = wanted
        return nullcontext()

    @torch.no_grad()  # outside of it, each `to_local` would call autograd
    def _complete_gradients(self) -> None:
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            shard.grad = parameter.grad.to_local()
        if (size := self.experts.size) > 1:
            # FSDP2 has divided them by edp. They have the tokens of all ep ranks, so the divisor is edp x ep.
            for_each("div_", gradients_of(one for one in self._shards if is_of_experts(one)), size)

    def _finish_update(self) -> None:
        for parameter, shard in zip(self._parameters, self._shards, strict=True):
            parameter.grad = shard.grad = None

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        loss = super().evaluate(micro_batches, count)
        # A forward pass without a backward pass leaves the weights gathered.
        for module in sharded_modules(self.module):
            module.reshard()
        return loss


def build(resolved: Resolved, device: torch.device) -> TrainingEngine:
    """The engine for this rank. On one GPU there is nothing to gather or reduce: it is ddp, without hooks."""
    # FSDP2's hooks copy offloaded states, and free 16-bit weights, which a model that needs tp has no room for.
    hooks = resolved.layout.gpus > 1 or resolved.engine.offload == "full"
    return (Fsdp if hooks else Ddp)(resolved, device)


def _shard_of(parameter: DTensor) -> nn.Parameter:
    """This rank's part of a parameter as a plain parameter in the same memory."""
    return name_parameter(nn.Parameter(parameter.to_local().detach()), full_name(parameter), split_of(parameter))  # type: ignore[arg-type]


def mesh_share(whole: DTensor, shard: nn.Parameter, model: ModelShape) -> Share:
    """The share of a parameter that `shard` has, whose rows the ranks of the mesh after its first dimension, tp, share.

    The mesh's groups are not used: torch's cache gives a parameter the first mesh that equals its own. The groups of
    that mesh may have ended, and other groups may have their names by now.
    """
    name, split, mesh = full_name(shard), split_of(shard), whole.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    tp, tp_rank = mesh.shape[0], coordinate[0]
    rows, first = len(whole) // (tp if split is not None and split.dim == 0 else 1), 0
    for placement, size, place in list(zip(whole.placements, mesh.shape, coordinate, strict=True))[1:]:
        if placement.is_shard():
            each = -(-rows // size)
            low = min(rows, place * each)
            first, rows = first + low, min(each, rows - low)
    width = math.prod(whole.shape[1:]) // (tp if split is not None and split.dim else 1)
    kept = kept_rows(model, name, len(whole))
    return Share(name, tuple(whole.shape), split, tp_rank, tp, first * width, shard.numel(), kept)


def is_first_copy(whole: DTensor, split: Split | None) -> bool:
    """Whether no earlier rank has the same share: neither of another replica, nor of tp if all its ranks have it."""
    names, coordinate = whole.device_mesh.mesh_dim_names or (), whole.device_mesh.get_coordinate()
    assert coordinate is not None
    copied = {"replicas"} if split is not None else {"replicas", "tp"}
    return all(place == 0 for name, place in zip(names, coordinate, strict=True) if name in copied)


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The mesh of tp x dp; here dp is the data axis. A parameter is split over tp, and each share over dp.

    With `layout.shard` it is tp x replicas x dp: the ranks of dp share what each of the replicas holds. tp comes first
    because DTensor splits from left to right.
    """
    ranks = torch.arange(layout.gpus).view(-1, layout.shards, layout.tp).permute(2, 0, 1).contiguous()
    if layout.shard is None:
        return DeviceMesh(device.type, ranks[:, 0], mesh_dim_names=("tp", "dp"))
    return DeviceMesh(device.type, ranks, mesh_dim_names=("tp", "replicas", "dp"))


def build_expert_mesh(layout: Layout, device: torch.device) -> DeviceMesh | None:
    """The mesh of tp x ep x edp for weights of experts: ep neighbours on the data axis divide the experts, and the edp
    ranks with the same experts shard those. None if ep is 1."""
    if layout.ep == 1:
        return None
    ranks = torch.arange(layout.gpus).view(-1, layout.ep, layout.tp).permute(2, 1, 0).contiguous()
    return DeviceMesh(device.type, ranks, mesh_dim_names=("tp", "ep", "edp"))


def on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as a mesh on the CPU, for offloaded shards: a DTensor is on its mesh's device."""
    names = mesh.mesh_dim_names
    assert names is not None
    return DeviceMesh.from_group([mesh.get_group(name) for name in names], "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def place(shard: DTensor, split: Split | None, mesh: DeviceMesh) -> nn.Parameter:
    """Turns FSDP2's shard of a tp rank's share into a DTensor of the whole parameter on `mesh`, in the same memory.

    For a fused QKV (`Split.parts`), a rank holds its heads of each part; in the whole DTensor the ranks' shares follow
    each other.
    """
    return nn.Parameter(_whole(shard.to_local().detach(), shard.shape, split, mesh))


def _whole(local: Tensor, share: Sequence[int], split: Split | None, mesh: DeviceMesh) -> DTensor:
    """The whole parameter on `mesh`, with `local` as this rank's part of a tp rank's share of that shape."""
    shape = list(share)
    if split is not None:
        shape[split.dim] *= mesh.size(0)
    names = mesh.mesh_dim_names or ()
    if "ep" in names:
        shape[0] *= mesh.size(1)
    whole = torch.empty(shape, device="meta")
    over_tp: Placement = Replicate() if split is None else Shard(split.dim)
    placed = (over_tp, *(Replicate() if name == "replicas" else Shard(0) for name in names[1:]))
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=whole.shape, stride=whole.stride())


def build_sharded_gpt(
    resolved: Resolved,
    device: torch.device,
    mesh: DeviceMesh,
    initial: InitialWeights,
    context: ContextParallel | None = None,
    experts: ExpertParallel | None = None,
    expert_mesh: DeviceMesh | None = None,
) -> Gpt:
    """Builds this rank's shards of the model, in fp32, under FSDP2's hooks.

    The model is built and split without values, block by block. Then each rank draws or reads its shards. In bf16
    and fp16 the shards are the master weights, the gathered weights are bf16 or fp16, and gradients are reduced in
    fp32.

    FSDP2 gets the tp ranks' shares as plain tensors, so the layers get plain tensors after the all-gather. With
    DTensors on tp each use as a plain tensor would cost host time, forward and backward (on a small model a quarter of
    the step). Before its first step FSDP2 takes the parameters that it finds in the modules. So its shards are
    registered there as shards of the whole model, and their gradients are such shards, too.

    Both passes gather the next two while they work on a block, or on blocks that are gathered together. Without
    `engine.prefetch` they do not: in the backward pass each prefetches only itself, which is gathered already by then,
    so the next one waits for its turn.
    """
    shape, engine = resolved.model, resolved.engine
    later = functools.partial(torch.empty, device="meta")
    tp = TensorParallel(mesh.get_local_rank("tp"), mesh["tp"].size(), mesh.get_group("tp"), initial, empty=later,
                        context=context, experts=experts)  # fmt: skip
    techniques = Techniques.of(engine, resolved.train)
    half = HALF.get(resolved.train.dtype)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = OffloadPolicy()
    if engine.offload == "full":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    over = mesh["dp"] if mesh.ndim == 2 else mesh["replicas", "dp"]

    def shard(modules: nn.Module | list[nn.Module], reshard: bool | None) -> None:
        fully_shard(modules, mesh=over, reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)

    def shard_experts(block: Block) -> None:
        if expert_mesh is not None and block.experts is not None:
            # FSDP2 would cast the router's weights, too.
            policy = replace(precision, cast_forward_inputs=False)
            fully_shard(block.experts, mesh=expert_mesh["edp"], reshard_after_forward=engine.reshard, mp_policy=policy,
                        offload_policy=offload)  # fmt: skip

    model = Gpt(replace(shape, layers=0), resolved.train.seed, tp, techniques)
    model.shape = shape
    splits, together = {}, engine.gather_blocks
    groups: list[list[Any]] = []
    for number in range(shape.layers):
        block = Block(number, shape, tp, initial, techniques)
        splits.update({full_name(one): split_of(one) for one in block.parameters()})
        together = together or blocks_by_size(sum(one.numel() for one in block.parameters()), shape.layers)
        shard_experts(block)
        model.blocks.append(block)
        if (number + 1) % together == 0 or number + 1 == shape.layers:
            first = number - number % together
            groups.append([*model.blocks[first:]])
            shard(groups[-1], engine.reshard)
    splits.update({full_name(one): split_of(one) for one in model.parameters() if not isinstance(one, DTensor)})
    # The backward pass begins with the root's parameters, so torch's default keeps them.
    shard(model, None if engine.reshard else False)
    where, over_experts = mesh, expert_mesh
    if engine.offload == "full":
        where, over_experts = on_host(mesh), None if expert_mesh is None else on_host(expert_mesh)
    model.to_empty(device=where.device_type)
    for router in routers_of(model):
        if router.choice_bias is not None:
            router.choice_bias = router.choice_bias.to(device)  # whole on every rank, even if weights are offloaded
    _name_shards(model, splits, where, over_experts, tp)
    compile_model(model, engine)
    roots: list[list[Any]] = [[model], *groups]
    for place, (module, *_) in enumerate(roots):
        after, before = groups[place : place + 2], groups[: place - 1][::-1] if place else groups[::-1]
        module.set_modules_to_forward_prefetch(_gathered(after) if engine.prefetch else [])
        module.set_modules_to_backward_prefetch(_gathered(before[:2]) if engine.prefetch else [module])
    for experts_alone in _experts_in(model.blocks):
        experts_alone.set_modules_to_backward_prefetch([experts_alone])
    return model


def _gathered(groups: Sequence[Sequence[Any]]) -> list[Any]:
    """What is gathered for groups of blocks: each as a whole, and the experts in it that are so by themselves."""
    return [one for group in groups for one in (group[0], *_experts_in(group))]


def _experts_in(blocks: Iterable[Any]) -> list[FSDPModule]:
    return [block.experts for block in blocks if isinstance(block.experts, FSDPModule)]


def _name_shards(
    model: Gpt, splits: Mapping[str, Split | None], mesh: DeviceMesh, of_experts: DeviceMesh | None, tp: TensorParallel
) -> None:
    """Registers the shards in the modules as shards of the whole model on `mesh`, or on that of experts, and puts
    their values into them."""
    for name, shard in list(model.named_parameters()):
        assert isinstance(shard, DTensor)
        owner, _, key = name.rpartition(".")
        apart = of_experts is not None and is_of_experts(shard)
        where = of_experts if of_experts is not None and apart else mesh
        parameter = name_parameter(place(shard, splits[name], where), name, splits[name])
        over = shard.device_mesh
        coordinate = over.get_coordinate()
        assert coordinate is not None
        rows = -(-len(shard) // over.size(-1))
        size = (len(shard), *parameter.shape[1:]) if apart else parameter.shape
        tp.fill(name, shard.to_local().detach(), splits[name], size, rows * coordinate[-1])
        model.get_submodule(owner).register_parameter(key, parameter)


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The model and its blocks, each of which FSDP2 gathers as a whole."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
