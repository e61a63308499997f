"""What an engine holds, as whole tensors, through the engine's own objects and not through its checkpoint."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from hpc_gpt.core.weights.names import parts_of
from hpc_gpt.trainer.engines.torch_engine import TorchEngine
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, is_of_experts, split_of, tile_of

States = dict[str, dict[str, Tensor]]


def states_of(engine: Any) -> States:
    """{full name: {kind: the whole tensor, in the model's order}}, the same on every rank: fp32 weights ("weight"), the
    optimizer's states, and choice biases; without the vocabulary's padding. Collective."""
    found = _of_torch(engine) if isinstance(engine, TorchEngine) else _of_deepspeed(engine)
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, {name: bias.clone() for name, bias in engine.balance._biases().items()})
    for name, bias in (entry for biases in everyones for entry in biases.items()):
        found[name] = {"weight": bias}
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
    kernel = engine._optimizer
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
            whole = _whole(parameter, value)
            states[kind] = whole if split is None else split.merge(list(whole.chunk(tp, split.dim)))
    return found


def _whole(like: DTensor, own: Tensor) -> Tensor:
    """The whole tensor of which each rank has its `own` part, as it has one of `like`. DTensor's own function would
    meet over the groups of the first equal mesh of this process, which may have ended."""
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, (like.device_mesh.get_coordinate(), own))
    whole = torch.empty(like.shape)
    for coordinate, part in everyones:
        place = whole
        for placement, at, ranks in zip(like.placements, coordinate, like.device_mesh.shape, strict=True):
            if isinstance(placement, Shard):
                size = -(-place.shape[placement.dim] // ranks)
                first = min(at * size, place.shape[placement.dim])
                place = place.narrow(placement.dim, first, min(size, place.shape[placement.dim] - first))
        place.copy_(part)
    return whole


@torch.no_grad()
def _of_deepspeed(engine: Any) -> States:
    """By DeepSpeed's own functions for it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    base, model = engine._engine.basic_optimizer, engine._resolved.model
    state = next(iter(base.state.values()), {})
    kinds = [kind for kind, value in state.items() if isinstance(value, Tensor) and value.ndim]
    if hasattr(optimizer := engine._engine.optimizer, "_hp_optimizer_states_linked"):
        # It does so after the step of its first group, when the second one has no states yet.
        optimizer._hp_optimizer_states_linked = False
        optimizer._lazy_init_hp_params_optimizer_state()
    own = []
    for parameter in engine.module.parameters():
        values = {"weight": safe_get_full_fp32_param(parameter)}
        values |= {kind: safe_get_full_optimizer_state(parameter, kind) for kind in kinds}
        tile = tile_of(parameter)
        place = full_name(parameter), engine.tp_rank, tile.number if tile else 0
        own.append((place, split_of(parameter), {kind: value.clone() for kind, value in values.items()}))
    everyones: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyones, own)
    splits: dict[str, Split | None] = {}
    shares: dict[tuple[str, str], dict[tuple[int, int], Tensor]] = {}
    for (name, *place), split, values in (entry for rank in everyones for entry in rank):
        splits[name] = split
        for kind, value in values.items():
            shares.setdefault((name, kind), {})[*place] = value
    found: States = {}
    for (name, kind), tiles in shares.items():
        split, tp_ranks = splits[name], sorted({tp_rank for tp_rank, _ in tiles})
        parts = [torch.cat([tiles[place] for place in sorted(tiles) if place[0] == tp_rank]) for tp_rank in tp_ranks]
        whole = parts[0] if split is None else split.merge(parts)
        is_of_hf = engine._resolved.engine.name == "hf-deepspeed"
        turned = is_of_hf and whole.ndim == 2 and parts_of(model, name)[0].transposed
        found.setdefault(name, {})[kind] = whole.t() if turned else whole
    return found


def numbers_of(engine: Any) -> dict[str, float | None]:
    """Steps, those of the optimizer on any rank, and fp16's loss scale. Collective."""
    if isinstance(engine, TorchEngine):
        optimizer, scale = engine._optimizer, engine._scaler.read().get("scale")
    else:
        optimizer, scale = engine._engine.basic_optimizer, None
        if engine._resolved.train.dtype == "fp16":
            scale = float(engine._engine.optimizer.loss_scale)
    updates: list[Any] = [None] * dist.get_world_size()
    own = {float(one["step"]) for one in optimizer.state.values() if "step" in one}
    dist.all_gather_object(updates, own)
    (found,) = set().union(*updates) or {None}
    return {"step": engine.step, "updates": found, "scale": scale}
