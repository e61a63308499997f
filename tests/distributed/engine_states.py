"""What an engine holds, as whole tensors, through the engine's own objects and not through its checkpoint."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_gpt.trainer.engines.optimizer import kernel_of
from hpc_gpt.trainer.engines.protocol import TorchEngine
from hpc_gpt.trainer.model.tensor_parallel import full_name, is_of_experts, split_of

States = dict[str, dict[str, Tensor]]


def states_of(engine: Any) -> States:
    """{full name: {kind: the whole tensor, in the model's order}}, the same on every rank: fp32 weights ("weight"), the
    optimizer's states, and choice biases; without the vocabulary's padding. Collective."""
    found = _of_torch(engine) if isinstance(engine, TorchEngine) else {}
    for name, bias in engine.balance._biases().items():
        found[name] = {"weight": bias.clone()}
    model = engine._resolved.model
    for name in ("embedding.weight", "head.weight"):
        if name in found:
            found[name] = {kind: value[: model.vocab] for kind, value in found[name].items()}
    return found


def are_equal(one: States, other: States) -> bool:
    """Whether all values are, to the bit."""
    return one.keys() == other.keys() and all(
        states.keys() == other[name].keys() and all(torch.equal(states[kind], other[name][kind]) for kind in states)
        for name, states in one.items()
    )


@torch.no_grad()
def _of_torch(engine: Any) -> States:
    found: States = {}
    shards = getattr(engine, "_shards", engine._parameters)
    kernel = kernel_of(engine._update.optimizer)
    for parameter, shard in zip(engine._parameters, shards, strict=True):
        own = {kind: value for kind, value in kernel.state.get(shard, {}).items() if value.ndim}
        if not isinstance(parameter, DTensor):  # under a sharded optimizer one rank has the states
            everyones: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyones, own)
            own = next((one for one in everyones if one), {})
            if engine.experts.size > 1 and is_of_experts(parameter):
                own = {kind: torch.cat([one[kind] for one in everyones[: engine.experts.size]]) for kind in own}
                dist.all_gather_object(everyones, shard.detach())
                shard = torch.cat(everyones[: engine.experts.size])
            found[full_name(parameter)] = {"weight": shard.detach().clone(), **own}
            continue
        split, tp = split_of(shard), parameter.device_mesh.shape[0]
        states = found.setdefault(full_name(shard), {})
        for kind, value in {"weight": shard.detach(), **own}.items():
            whole = DTensor.from_local(
                value, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
            ).full_tensor()
            states[kind] = whole if split is None else split.merge(list(whole.chunk(tp, split.dim)))
    return found
