"""What the ranks of a running engine hold of each parameter, whichever engine it is: whether copies are copies."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hpc_gpt.model.tensor_parallel import full_name, split_of, tile_of


@dataclass(frozen=True)
class Digest:
    """Of the whole model: the sum of each parameter's numbers by full name, and those whose copies are not the same."""

    sums: dict[str, float]
    apart: list[str]


def digest(engine: Any) -> Digest:
    """Every rank calls it and gets the same. What ZeRO-3 or FSDP has dealt out over dp is gathered first."""
    own = []
    with gathered(engine.module) as parameters:
        for parameter in parameters:
            share, tile = _share(parameter), tile_of(parameter)
            place = (0 if tile is None else tile.number, engine.tp_rank if _is_split(parameter) else 0)
            held = hashlib.sha256(share.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            own.append((full_name(parameter), place, float(share.double().sum()), held))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    sums: dict[str, dict[tuple[int, int], float]] = {}
    copies: dict[str, dict[tuple[int, int], set[str]]] = {}
    for name, place, total, held in (entry for rank in everyone for entry in rank):
        sums.setdefault(name, {})[place] = total
        copies.setdefault(name, {}).setdefault(place, set()).add(held)
    apart = [name for name, places in copies.items() if any(len(held) > 1 for held in places.values())]
    return Digest({name: sum(places.values()) for name, places in sums.items()}, apart)


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The module's parameters; those that ZeRO-3 has dealt out are whole inside."""
    parameters = list(module.parameters())
    with contextlib.ExitStack() as stack:
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        yield parameters


def _is_split(parameter: nn.Parameter) -> bool:
    """Whether what `_share` gives is this tensor-parallel rank's own."""
    over_tp = isinstance(parameter, DTensor) and "tp" in (parameter.device_mesh.mesh_dim_names or ())
    return split_of(parameter) is not None and not over_tp


def _share(parameter: nn.Parameter) -> Tensor:
    whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return whole.detach().cpu()
