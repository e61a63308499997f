"""Loads DeepSpeed's checkpoints in any layout, by lists of the places of each parameter's elements.

DeepSpeed keeps a rank's optimizer states in flat tensors. Every rank writes a list of its pieces next to DeepSpeed's
files, `states-<rank>.json`. With these lists any other layout finds its elements, whether they were split by ZeRO, tp
or pp.

The files are memory-mapped: a rank reads only the pages of the parameters that it needs, and nothing is written. So a
run resumes at another tp, pp, dp or ZeRO stage without a conversion. DeepSpeed's converter is one process, needs 14
bytes of disk per parameter, 680 GB for 48B, and handles neither ZeRO-0 nor tp under ZeRO-3.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.files import json_in
from hpc_gpt.core.runs.descent import convertible
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT, load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import SUB_GROUP, check_identity, read_identity
from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed
from hpc_gpt.trainer.model.tensor_parallel import Split, full_name, split_of, tile_of

SCHEMA = 1
# The kind that means a parameter's weights; the other kinds are the names of the optimizer's moments.
WEIGHTS = "weights"


@dataclass(frozen=True)
class Piece:
    """`count` elements of a parameter, from `start` on in its flattened tensor-parallel share of `shape`.

    In the rank's flat tensor number `group` they lie from `offset` on. `split` is a stored `tensor_parallel.Split`;
    None if every tensor-parallel rank holds the whole parameter.
    """

    name: str
    shape: tuple[int, ...]
    split: tuple[Any, ...] | None
    group: int
    offset: int
    start: int
    count: int


def flat_states(engine: Any) -> list[Tensor]:
    """The fp32 weights that this rank updates: flat tensors under ZeRO, otherwise the parameters themselves."""
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
        groups: Any = enumerate(optimizer.fp16_groups)
        return [piece for number, parameters in groups for piece in _shares(number, parameters, places)]
    groups = getattr(optimizer, "bit16_groups", None) or getattr(optimizer, "bf16_groups", None)
    if groups is None:
        flats: Any = enumerate(flat_states(engine))
        return [places[flat].piece(number, 0, 0, flat.numel()) for number, flat in flats]
    pieces = []
    for number, parameters in enumerate(groups):
        for parameter in parameters:
            mapping = parameter._hp_mapping
            if mapping is not None:
                at, source = mapping.hp_fragment_address, mapping.lp_fragment_address
                pieces.append(places[parameter].piece(number, at.start, source.start, source.numel))
    return pieces


@dataclass(frozen=True)
class WeightPlace:
    """The part of a rank's share that a parameter is: `count` elements from `start` on in the flattened share of
    `shape`."""

    name: str
    shape: tuple[int, ...]
    split: tuple[Any, ...] | None
    start: int
    count: int

    def piece(self, group: int, offset: int, start: int, count: int) -> Piece:
        """The piece with `count` of the parameter's elements, from its element `start` on."""
        return Piece(self.name, self.shape, self.split, group, offset, self.start + start, count)


def places_of(module: nn.Module) -> dict[nn.Parameter, WeightPlace]:
    """The place of every parameter. A tile is some rows of a rank's share; any other parameter is the whole share."""
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
            parted = None if split is None else tuple(split.stored())
            places[parameter] = WeightPlace(name, (rows, *shape[1:]), parted, start, math.prod(shape))
            start += math.prod(shape)
    return places


def _shares(group: int, parameters: list[Any], places: dict[nn.Parameter, WeightPlace]) -> Iterator[Piece]:
    """Yields the pieces of a group of ZeRO-3: every rank has an equal share of each parameter, the last ones padded."""
    offset = 0
    for parameter in parameters:
        size = int(parameter.partition_numel())
        start = size * dist.get_rank(group=parameter.ds_process_group)
        count = min(size, parameter.ds_numel - start)
        if count > 0:
            yield places[parameter].piece(group, offset, start, count)
        offset += size


def put_pieces(files: RankFiles, engine: Any, module: nn.Module, tag: str, rank: int, at: tuple[int, int, int]) -> None:
    """Adds this rank's list of pieces to DeepSpeed's checkpoint; `at` is the rank's (tp, pp, dp).

    Without ZeRO all data-parallel ranks have the same states, and the first one adds the list.
    """
    without_zero = not hasattr(engine.optimizer, "optimizer")
    if without_zero and at[2]:
        return
    name = engine._get_ckpt_name("", tag) if without_zero else engine._get_zero_ckpt_name("", tag)
    listed = {
        "schema": SCHEMA,
        "at": at,
        "file": name,
        "weights": _weight_files(engine, module, tag, at[0]) if without_zero else None,
        "pieces": [astuple(piece) for piece in pieces_of(engine, module)],
    }
    files.put_text(f"states-{rank:05d}.json", json.dumps(listed) + "\n")


def _weight_files(engine: Any, module: nn.Module, tag: str, tp_rank: int) -> dict[str, tuple[str, str]]:
    """{full name: (file, key in it)} of the weights that are not in the optimizer's file.

    Only ZeRO-3 has tiles, so every parameter in this dict has its own name.
    """
    places = {}
    for key, parameter in module.named_parameters():
        if hasattr(module, "ckpt_layer_path"):
            # A pipeline writes one file per layer; the tied module is in the first layer's file.
            layer, _, inner_key = key.partition(".")
            number = 0 if layer == "tied_modules" else int(layer)
            inner_key = inner_key.partition(".")[2] if layer == "tied_modules" else inner_key
            places[full_name(parameter)] = f"{tag}/layer_{number:02d}-model_{tp_rank:02d}-model_states.pt", inner_key
        else:
            places[full_name(parameter)] = engine._get_ckpt_name("", tag), key
    return places


class SavedStates:
    """Reads the weights and optimizer states of a DeepSpeed checkpoint, parameter by parameter.

    Raises CheckpointError if any are missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lists = [json_in(path) for path in sorted(folder.glob("states-*.json"))]
        if not lists or any(listed["schema"] != SCHEMA for listed in lists):
            raise CheckpointError(
                f"{folder} has no list of its weights' places (states-*.json) that this version reads",
                "resume it in the layout it was saved with",
            )
        if any(listed.get("swapped") for listed in lists):
            raise CheckpointError(
                f"{folder} lacks the states that hpc-gpt 0.3 offloaded to NVMe: DeepSpeed 0.19.8 does not save them",
                "submit a new run",
            )
        self.tp = 1 + max(listed["at"][0] for listed in lists)
        self._files = [(listed["file"], listed["weights"]) for listed in lists]
        # name -> tp rank -> stage -> (number of the list, piece); two stages hold a tied parameter.
        self._places: dict[str, dict[int, dict[int, list[tuple[int, Piece]]]]] = {}
        for number, listed in enumerate(lists):
            tp_rank, pp_rank, _ = listed["at"]
            for name, shape, split, *place in listed["pieces"]:
                piece = Piece(name, tuple(shape), split and tuple(split), *place)
                stages = self._places.setdefault(name, {}).setdefault(tp_rank, {})
                stages.setdefault(pp_rank, []).append((number, piece))
        self._opened: dict[str, Any] = {}

    def names(self) -> list[str]:
        """The full names of all parameters of the whole model."""
        return list(self._places)

    def kinds(self) -> list[str]:
        """The names of the optimizer states of a parameter: `exp_avg` and `exp_avg_sq` under Adam."""
        state = self._first_state()
        return [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim]

    def updates(self) -> float | None:
        """The optimizer's count of steps, without skipped ones; None if it does not count."""
        step = self._first_state().get("step")
        return None if step is None else float(step)

    def loss_scaler(self) -> Any:
        """DeepSpeed's saved loss scaler; None without ZeRO."""
        return self._optimizer_file(0).get("loss_scaler")

    def share(self, name: str, key: str, tp_rank: int, tp: int) -> Tensor:
        """The share of a parameter's weights, or of one of its states, that `tp_rank` of `tp` holds; fp32."""
        split = self._split(name)
        if split is None or tp == self.tp:
            return self._share(name, key, 0 if split is None else tp_rank)
        return split.shard(self.whole(name, key), tp_rank, tp)

    def whole(self, name: str, key: str = WEIGHTS) -> Tensor:
        """The whole weights of a parameter, or one of its whole states; fp32."""
        split = self._split(name)
        if split is None:
            return self._share(name, key, 0)
        return split.merge([self._share(name, key, tp_rank) for tp_rank in range(self.tp)])

    def _split(self, name: str) -> Split | None:
        if name not in self._places:
            raise CheckpointError(f"{self.folder} holds no parameter {name}", "is it a checkpoint of another model?")
        pieces = next(iter(self._places[name][0].values()))
        split = pieces[0][1].split
        return None if split is None else Split.of_stored(split)

    def _share(self, name: str, key: str, tp_rank: int) -> Tensor:
        pieces = next(iter(self._places[name][tp_rank].values()))
        shape = pieces[0][1].shape
        share = torch.empty(shape, dtype=torch.float32)
        flat, filled = share.view(-1), 0
        for number, piece in pieces:
            source = self._flat(number, piece, key)[piece.offset : piece.offset + piece.count]
            flat[piece.start : piece.start + piece.count] = source
            filled += piece.count
        if filled != share.numel():
            raise CheckpointError(f"{self.folder} holds {filled} of the {share.numel()} elements of {name}", REMOVE_IT)
        return share

    def _flat(self, number: int, piece: Piece, key: str) -> Tensor:
        if key != WEIGHTS:
            flat: Tensor = self._states(number)[piece.group][key]
        elif (weights := self._files[number][1]) is not None:
            file, name = weights[piece.name]
            state = self._open(file)
            flat = (state if name in state else state["module"])[name]
        else:
            states = self._optimizer_file(number)
            groups = "fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"
            flat = states[groups][piece.group]
        return flat.detach().view(-1)

    def _optimizer_file(self, number: int) -> dict[str, Any]:
        state = self._open(self._files[number][0])
        states: dict[str, Any] = state.get("optimizer_state_dict") or state["optimizer"]
        return states

    def _first_state(self) -> dict[str, Any]:
        return next(iter(self._states(0).values()), {})

    def _states(self, number: int) -> dict[int, dict[str, Any]]:
        """{number of the flat tensor: the base optimizer's states}."""
        states = self._optimizer_file(number)
        base = states.get("base_optimizer_state") or states.get("optimizer_state_dict") or states
        by_number: dict[int, dict[str, Any]] = base["state"]
        return by_number

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            import_deepspeed(torch.device("cpu"))  # the files have objects of its classes
            try:
                self._opened[name] = load_safely(self.folder / name, mmap=True)
            except (OSError, RuntimeError) as fault:
                raise CheckpointError(f"{self.folder / name} cannot be read: {fault}", REMOVE_IT) from None
        return self._opened[name]


def read_universal(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    saved = SavedStates(folder)
    for name in saved.names():
        yield name, saved.whole(name)


def find_differences(folder: Path, resolved: Resolved) -> frozenset[str]:
    """Returns the keys in which the checkpoint differs. Raises CheckpointError if `load_universal` cannot convert
    one."""
    saved = read_identity(folder)
    may = convertible(str(saved.get("engine.name")), resolved.engine.name) | {SUB_GROUP}
    return check_identity(folder, saved, resolved, may)


def load_universal(engine: Any, module: nn.Module, folder: Path, resolved: Resolved, tp_rank: int) -> None:
    """Loads this rank's weights, optimizer states and counts into `engine`, which is DeepSpeed's.

    Raises CheckpointError if the checkpoint lacks a parameter or part of one.
    """
    saved = SavedStates(folder)
    pieces: dict[str, list[Piece]] = {}
    for piece in pieces_of(engine, module):
        pieces.setdefault(piece.name, []).append(piece)
    # The weights of the forward pass. ZeRO-3 refreshes its partitions below; all other weights are whole on every rank.
    whole: dict[str, list[tuple[nn.Parameter, WeightPlace]]] = {}
    for one, place in places_of(module).items():
        if not hasattr(one, "ds_id"):
            whole.setdefault(place.name, []).append((one, place))
    flats = flat_states(engine)
    states = [{kind: torch.zeros_like(flat) for kind in saved.kinds()} for flat in flats]
    with torch.no_grad():
        for name in dict.fromkeys([*pieces, *whole]):
            for kind in (WEIGHTS, *saved.kinds()):
                if name not in pieces and kind != WEIGHTS:
                    continue
                share = saved.share(name, kind, tp_rank, resolved.layout.tp).view(-1)
                for piece in pieces.get(name, ()):
                    target = flats[piece.group] if kind == WEIGHTS else states[piece.group][kind]
                    part = share[piece.start : piece.start + piece.count]
                    target.view(-1)[piece.offset : piece.offset + piece.count].copy_(part)
                for one, place in whole.get(name, ()) if kind == WEIGHTS else ():
                    one.view(-1).copy_(share[place.start : place.start + place.count])
        _set_states(engine, flats, states, saved.updates())
        if hasattr(engine.optimizer, "fp32_partitioned_groups_flat"):
            for number in range(len(flats)):
                engine.optimizer._reassign_or_swap_out_partitioned_parameters(number)
            gather_small(engine.optimizer)
    scaler = saved.loss_scaler()
    if resolved.train.dtype == "fp16" and scaler is not None:
        engine.optimizer.loss_scaler = scaler
    engine.global_steps = int(read_identity(folder)["step"])
    engine.global_samples = engine.global_steps * resolved.batch.global_batch
    if saved.updates() is not None:
        engine.skipped_steps = engine.global_steps - int(saved.updates() or 0)


def _set_states(engine: Any, flats: list[Tensor], states: list[dict[str, Tensor]], updates: float | None) -> None:
    """Sets the base optimizer's states. The step count of fused kernels must be on the device."""
    base = engine.basic_optimizer
    for flat, state in zip(flats, states, strict=True):
        if updates is not None:
            on_device = base.param_groups[0].get("fused")
            counted = isinstance(base, torch.optim.AdamW)
            count = torch.tensor(updates, dtype=torch.float32, device=flat.device if on_device else "cpu")
            state["step"] = count if counted else int(updates)  # type: ignore[assignment]
        if state:
            base.state[flat] = state


def gather_small(optimizer: Any) -> None:
    """Gathers again the weights that ZeRO-3 keeps whole on every rank, after their partitions have changed."""
    persistent = optimizer.persistent_parameters
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)
