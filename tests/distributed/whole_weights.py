"""The whole model's weights from the shares that the ranks of a running engine hold, whichever engine it is."""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_gpt.model.tensor_parallel import full_name, split_of


def merged_weights(engine: Any) -> tuple[dict[str, Tensor], float]:
    """(the whole model's weights by full name in fp32, the largest difference between what should be copies).

    Every rank calls it and gets the same.
    """
    with gathered(engine.module) as parameters:
        own = [(full_name(one), split_of(one), _whole_share(one)) for one in parameters]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (engine.pp_rank, engine.dp_rank, engine.tp_rank, own))
    shards: dict[str, dict[tuple[int, int], dict[int, Tensor]]] = {}
    splits = {}
    for pp, dp, tp, parameters in everyone:
        for name, split, share in parameters:
            shards.setdefault(name, {}).setdefault((pp, dp), {})[tp] = share
            splits[name] = split
    merged, apart = {}, 0.0
    for name, copies in shards.items():
        split = splits[name]
        wholes = []
        for by_rank in copies.values():
            ranked = [by_rank[tp] for tp in sorted(by_rank)]
            wholes += ranked if split is None else [split.merge(ranked)]
        merged[name] = wholes[0]
        apart = max([apart, *(float((whole - wholes[0]).abs().max()) for whole in wholes[1:])])
    return merged, apart


@contextlib.contextmanager
def gathered(module: nn.Module) -> Any:
    """The module's parameters; those that ZeRO-3 has dealt out are whole inside."""
    parameters = list(module.parameters())
    with contextlib.ExitStack() as stack:
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        yield parameters


def _whole_share(parameter: nn.Parameter) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().float().cpu().clone()
