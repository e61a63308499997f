"""What the ranks of a running engine hold of each parameter, whichever engine it is: whether copies are copies."""

import contextlib
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpc_gpt.trainer.model.tensor_parallel import full_name, split_of, tile_of

Place = tuple[int, ...]


@dataclass(frozen=True)
class Digest:
    """Of the whole model: the sum of each parameter's numbers by full name, and those whose copies are not the same."""

    sums: dict[str, float]
    apart: list[str]


def digest(engine: Any) -> Digest:
    """Every rank calls it and gets the same. What ZeRO-3 has dealt out over dp is gathered first."""
    own = []
    with gathered(engine.module) as parameters:
        for parameter in parameters:
            share = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach().cpu()
            held = hashlib.sha256(share.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            own.append((full_name(parameter), _place(parameter, engine), float(share.double().sum()), held))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    sums: dict[str, dict[Place, float]] = {}
    copies: dict[str, dict[Place, set[str]]] = {}
    for name, place, total, held in (entry for rank in everyone for entry in rank):
        sums.setdefault(name, {})[place] = total
        copies.setdefault(name, {}).setdefault(place, set()).add(held)
    apart = [name for name, places in copies.items() if any(len(held) > 1 for held in places.values())]
    return Digest({name: sum(places.values()) for name, places in sums.items()}, apart)


def _place(parameter: nn.Parameter, engine: Any) -> Place:
    """Which part of the whole parameter a rank holds: ranks with the same place hold copies."""
    tile = tile_of(parameter)
    place = [0 if tile is None else tile.number]
    axes: tuple[str, ...] = ()
    if isinstance(parameter, DTensor):
        mesh, at = parameter.device_mesh, parameter.device_mesh.get_coordinate()
        assert at is not None
        axes = mesh.mesh_dim_names or ()
        place += [0 if split.is_replicate() else number for split, number in zip(parameter.placements, at, strict=True)]
    # Where the mesh does not say how a parameter lies over tp, its own mark does.
    place.append(engine.tp_rank if split_of(parameter) is not None and "tp" not in axes else 0)
    return tuple(place)


@contextlib.contextmanager
def gathered(module: nn.Module) -> Iterator[list[nn.Parameter]]:
    """The module's parameters; those that ZeRO-3 has dealt out are whole inside."""
    parameters = list(module.parameters())
    with contextlib.ExitStack() as stack:
        if any(hasattr(parameter, "ds_id") for parameter in parameters):
            import deepspeed

            stack.enter_context(deepspeed.zero.GatheredParameters(parameters))
        yield parameters
