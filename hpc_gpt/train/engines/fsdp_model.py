"""Our GPT, split over tp by its own layers and dealt out over dp by torch's FSDP2, on one mesh of ranks."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
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
from hpc_gpt.model.initial_weights import InitialWeights
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import Split, TensorParallel, full_name, name_parameter, split_of
from hpc_gpt.settings.layout import Layout
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.engines.compilation import compile_model
from hpc_gpt.train.engines.master_weights import HALF


def build_mesh(layout: Layout, device: torch.device) -> DeviceMesh:
    """The ranks of tp x dp. tp comes first: a parameter is split over it first, and its share over dp then.

    DTensor deals out from left to right, so that plain placements say so on this mesh.
    """
    ranks = torch.arange(layout.gpus).view(layout.dp, layout.tp).T.contiguous()
    return DeviceMesh(device.type, ranks, mesh_dim_names=("tp", "dp"))


def on_host(mesh: DeviceMesh) -> DeviceMesh:
    """The same ranks as a mesh of their hosts, where offloaded shards lie: a DTensor is made on its mesh's device."""
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

    It is made a block at a time: one is drawn, whole, and dealt out before the next, so that a rank never holds more
    than one block, and embedding and head, beside its shards. In bf16 and fp16 the shards are the masters; what is
    gathered is half, and gradients are reduced in fp32.

    FSDP2 is given the tp ranks' shares as plain tensors, and gives them, gathered, to the layers so. Given DTensors on
    tp it would gather DTensors, and each use of one as a plain tensor costs host time, forward and backward (on a small
    model a quarter of the step). Before its first step it takes up the parameters that it finds in the modules: there
    its shards are put in the place of the whole model's, and so are their gradients.

    The backward pass gathers the next block while it works on this one. Without `engine.prefetch` it does not: each
    block is told to gather itself ahead, which it is by then, so that the gathering waits for its own turn.
    """
    shape, engine = resolved.model, resolved.engine
    tp = TensorParallel(mesh.get_local_rank("tp"), mesh["tp"].size(), mesh.get_group("tp"))
    techniques, initial = Techniques.of(engine), InitialWeights(resolved.train.seed, shape.layers)
    half = HALF.get(resolved.train.dtype)
    precision = MixedPrecisionPolicy(param_dtype=half, reduce_dtype=torch.float32 if half else None)
    offload = OffloadPolicy()
    if engine.offload == "full":
        offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")

    def deal_out(module: nn.Module, reshard: bool | None) -> None:
        fully_shard(module, mesh=mesh["dp"], reshard_after_forward=reshard, mp_policy=precision, offload_policy=offload)

    model = Gpt(replace(shape, layers=0), resolved.train.seed, tp, techniques)
    model.shape = shape
    splits = {}
    for number in range(shape.layers):
        block = Block(f"blocks.{number}", shape, tp, initial, techniques)
        splits.update({full_name(one): split_of(one) for one in block.parameters()})
        deal_out(block, engine.reshard)
        model.blocks.append(block)
    splits.update({full_name(one): split_of(one) for one in model.parameters() if not isinstance(one, DTensor)})
    # What the root holds is needed at once when the backward pass begins: torch's own choice keeps it.
    deal_out(model, None if engine.reshard else False)
    where = on_host(mesh) if engine.offload == "full" else mesh
    for name, shard in list(model.named_parameters()):
        assert isinstance(shard, DTensor)
        owner, _, key = name.rpartition(".")
        parameter = name_parameter(place(shard, splits[name], where), name, splits[name])
        model.get_submodule(owner).register_parameter(key, parameter)
    compile_model(model, engine)
    if not engine.prefetch:
        for module in sharded_modules(model):
            module.set_modules_to_backward_prefetch([module])
    return model


def sharded_modules(model: nn.Module) -> list[FSDPModule]:
    """The model and its blocks: what is gathered together."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]
