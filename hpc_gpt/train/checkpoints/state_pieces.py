"""Where the numbers of each parameter lie in a rank's optimizer states, which DeepSpeed keeps flat.

Every rank of a checkpoint leaves the list of its pieces beside DeepSpeed's files, `states-<rank>.json`. With it any
other layout can pick what it needs (`saved_states`), whatever split the numbers up: ZeRO, tp or pp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.model.tensor_parallel import full_name, split_of, tile_of
from hpc_gpt.train.checkpoints.rank_files import RankFiles

SCHEMA = 1


@dataclass(frozen=True)
class Piece:
    """`count` numbers of a parameter, from `start` on in its flattened tensor-parallel share of `shape`.

    They lie in the rank's flat tensor number `group` from `offset` on. `split` is (dim, parts) as in
    `tensor_parallel.Split`, None where every tensor-parallel rank holds all of it.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[int, int] | None
    group: int
    offset: int
    start: int
    count: int


def flat_states(engine: Any) -> list[Tensor]:
    """The fp32 weights that this rank updates: flat under ZeRO, without it the parameters themselves."""
    optimizer = engine.optimizer
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            flats: list[Tensor] = list(getattr(optimizer, name))
            return flats
    return [parameter for group in engine.basic_optimizer.param_groups for parameter in group["params"]]


def pieces_of(engine: Any, module: nn.Module) -> list[Piece]:
    """This rank's pieces, in the order of its flat tensors. `engine` is DeepSpeed's, `module` the model it trains."""
    optimizer, places = engine.optimizer, places_of(module)
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        split_up = enumerate(optimizer.fp16_groups)
        return [piece for number, parameters in split_up for piece in _shares(number, parameters, places)]
    groups: Any = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", None)
    if groups is None:
        flats: Any = enumerate(flat_states(engine))
        return [places[flat].piece(number, 0, 0, flat.numel()) for number, flat in flats]
    found = []
    for number, parameters in enumerate(groups):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                at, source = mapping.hp_fragment_address, mapping.lp_fragment_address
                found.append(places[parameter].piece(number, at.start, source.start, source.numel))
    return found


@dataclass(frozen=True)
class Place:
    """What a parameter is of its whole: `count` numbers from `start` on in a rank's flattened share of `shape`."""

    name: str
    shape: tuple[int, ...]
    split: tuple[int, int] | None
    start: int
    count: int

    def piece(self, group: int, offset: int, start: int, count: int) -> Piece:
        """The piece that holds `count` of the parameter's own numbers from `start` on."""
        return Piece(self.name, self.shape, self.split, group, offset, self.start + start, count)


def places_of(module: nn.Module) -> dict[nn.Parameter, Place]:
    """Of every parameter: a tile is some rows of a rank's share, any other is all of it."""
    tiles: dict[str, list[tuple[int, nn.Parameter, tuple[int, ...]]]] = {}
    for parameter in module.parameters():
        tile = tile_of(parameter)
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        tiles.setdefault(full_name(parameter), []).append((tile.number if tile else 0, parameter, shape))
    places = {}
    for name, parts in tiles.items():
        parts.sort(key=lambda part: part[0])
        rows = sum(shape[0] for _, _, shape in parts)
        start = 0
        for _, parameter, shape in parts:
            split = split_of(parameter)
            parted = None if split is None else (split.dim, split.parts)
            places[parameter] = Place(name, (rows, *shape[1:]), parted, start, math.prod(shape))
            start += math.prod(shape)
    return places


def _shares(group: int, parameters: list[Any], places: dict[nn.Parameter, Place]) -> Iterator[Piece]:
    """Of one of ZeRO-3's groups: every rank has an equal share of every parameter, the last ones padded."""
    offset = 0
    for parameter in parameters:
        size = int(parameter.partition_numel())
        start = size * dist.get_rank(group=parameter.ds_process_group)
        count = min(size, parameter.ds_numel - start)
        if count > 0:
            yield places[parameter].piece(group, offset, start, count)
        offset += size


def put_pieces(files: RankFiles, engine: Any, module: nn.Module, tag: str, rank: int, at: tuple[int, int, int]) -> None:
    """Leaves this rank's list in a checkpoint of DeepSpeed's; `at` is the rank's (tp, pp, dp).

    Without ZeRO the ranks of one data-parallel group hold the same, and the first leaves the list.
    """
    without_zero = not hasattr(engine.optimizer, "optimizer")
    if without_zero and at[2]:
        return
    name = engine._get_ckpt_name("", tag) if without_zero else engine._get_zero_ckpt_name("", tag)
    listed = {
        "schema": SCHEMA,
        "at": at,
        "file": name,
        # DeepSpeed's file has nothing of what lies on NVMe.
        "swapped": any(not flat.numel() for flat in flat_states(engine)),
        "weights": _weight_files(engine, module, tag, at[0]) if without_zero else None,
        "pieces": [astuple(piece) for piece in pieces_of(engine, module)],
    }
    files.put_text(f"states-{rank:05d}.json", json.dumps(listed) + "\n")


def _weight_files(engine: Any, module: nn.Module, tag: str, tp_rank: int) -> dict[str, tuple[str, str]]:
    """Where the weights lie that are no part of the optimizer's file: full name -> (file, key in it).

    Tiles are ZeRO-3's, so that here every parameter has a name of its own.
    """
    found = {}
    for key, parameter in module.named_parameters():
        if hasattr(module, "ckpt_layer_path"):
            # A pipeline writes a file for each layer; a tied one is the first layer's.
            layer, _, rest = key.partition(".")
            number = 0 if layer == "tied_modules" else int(layer)
            rest = rest.partition(".")[2] if layer == "tied_modules" else rest
            found[full_name(parameter)] = f"{tag}/layer_{number:02d}-model_{tp_rank:02d}-model_states.pt", rest
        else:
            found[full_name(parameter)] = engine._get_ckpt_name("", tag), key
    return found
