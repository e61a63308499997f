"""Where DeepSpeed keeps the elements of each parameter on this rank: its weights in fp32, and the optimizer's states.

They are pieces of flat tensors. A piece is a share of a parameter (`checkpoints.states.Share`) at a place in
one of them. With these pieces the weights get their first values, and a checkpoint is saved and loaded, so DeepSpeed's
own files are never written.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.settings.layout import Coordinate
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.trainer.checkpoints.states import WEIGHT, Held, SavedStates, Share, kept_rows
from hpc_gpt.trainer.model.tensor_parallel import full_name, split_of, tile_of


@dataclass(frozen=True)
class Piece:
    """A share that lies in the rank's flat tensor number `group`, from `offset` on."""

    share: Share
    group: int
    offset: int

    def within(self, flat: Tensor) -> Tensor:
        """Its elements in the flat tensor of one kind."""
        return flat.view(-1)[self.offset : self.offset + self.share.count]


class DeepspeedStates:
    """The elements that this rank of DeepSpeed's `engine` holds of the parameters of `module`.

    The rank is `at` this place in the layout, where `tp` ranks share a parameter that is split. `transposed`: the names
    of matrices that the module holds transposed.
    """

    def __init__(
        self,
        engine: Any,
        module: nn.Module,
        model: ModelShape,
        at: Coordinate,
        tp: int,
        transposed: frozenset[str] = frozenset(),
    ) -> None:
        self._engine, self._model = engine, model
        self._at, self._tp, self._transposed = at, tp, transposed
        self.shares = self._shares(module)
        self.pieces = [*self._pieces()]

    @property
    def is_partitioned(self) -> bool:
        """Whether ZeRO-3 divides the weights of the forward pass, too."""
        return hasattr(self._engine.optimizer, "fp32_partitioned_groups_flat")

    @property
    def flats(self) -> list[Tensor]:
        """The fp32 weights that this rank updates, in flat tensors."""
        names = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        name = next(name for name in names if hasattr(self._engine.optimizer, name))
        return [*getattr(self._engine.optimizer, name)]

    def held(self) -> Iterator[Held]:
        """Yields what this rank saves. A parameter that tp does not split is saved by the first tp rank."""
        flats = self.flats
        states = [self._base.state.get(flat, {}) for flat in flats]
        for piece in self.pieces:
            share = piece.share
            is_again = self._model.tied and self._at.pp and share.name == "embedding.weight"  # of the first stage
            if is_again or (share.split is None and self._at.tp):
                continue
            yield Held(share, WEIGHT, piece.within(flats[piece.group]))
            for kind, value in states[piece.group].items():
                if isinstance(value, Tensor) and value.ndim:
                    yield Held(share, kind, piece.within(value))

    def numbers(self) -> dict[str, float]:
        """The optimizer's states that are one number, the same for all parameters."""
        # DeepSpeed may have asked for the states of a flat tensor that has none yet.
        state: dict[str, Any] = next((one for one in self._base.state.values() if one), {})
        return {kind: float(value) for kind, value in state.items() if not isinstance(value, Tensor) or not value.ndim}

    @torch.no_grad()
    def load(self, saved: SavedStates) -> None:
        """Fills the weights and the optimizer's states, which any engine has saved."""
        flats = self.flats
        states: list[dict[str, Tensor]] = [{} for _ in flats]
        for piece in self.pieces:
            flat, state = flats[piece.group], states[piece.group]
            saved.read(piece.share, WEIGHT, piece.within(flat))
            for kind in saved.kinds(piece.share.name):
                if kind not in state:  # where the optimizer has one, its memory is used
                    own = self._base.state.get(flat, {}).get(kind)
                    state[kind] = torch.zeros_like(flat) if own is None else own.zero_()
                saved.read(piece.share, kind, piece.within(state[kind]))
        for flat, state in zip(flats, states, strict=True):
            # The numbers of a fused kernel must be on the device.
            device = flat.device if self._base.param_groups[0].get("fused") else torch.device("cpu")
            numbers = {kind: torch.tensor(value, device=device) for kind, value in saved.optimizer.items()}
            if state or numbers:
                self._base.state[flat] = state | numbers
        if not self.is_partitioned:
            # If each rank read the weights of the forward pass, it would open the files of all ranks.
            self._engine.optimizer.update_lp_params()
        self.refresh()

    def refresh(self) -> None:
        """Makes the divided weights of the forward pass from the fp32 weights; under ZeRO-3 alone."""
        if self.is_partitioned:
            for number in range(len(self.flats)):
                self.refresh_group(number)
            self.gather_small()

    def refresh_group(self, number: int) -> None:
        """`refresh` for one flat tensor."""
        self._engine.optimizer._reassign_or_swap_out_partitioned_parameters(number)

    def gather_small(self) -> None:
        """Gathers again the weights that ZeRO-3 keeps whole on every rank, after their partitions have changed."""
        persistent = self._engine.optimizer.persistent_parameters
        if persistent:
            persistent[0].partition(persistent)
            persistent[0].all_gather(persistent)

    @property
    def _base(self) -> torch.optim.Optimizer:
        base: torch.optim.Optimizer = self._engine.basic_optimizer
        return base

    def _shares(self, module: nn.Module) -> dict[nn.Parameter, Share]:
        """The share that each parameter is. A tile is some rows of a tp rank's share; any other one is all of it."""
        tiles: dict[str, list[tuple[int, nn.Parameter, tuple[int, ...]]]] = {}
        for parameter in module.parameters():
            tile = tile_of(parameter)
            shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
            tiles.setdefault(full_name(parameter), []).append((tile.number if tile else 0, parameter, shape))
        shares = {}
        for name, parts in tiles.items():
            parts.sort(key=lambda part: part[0])
            split = split_of(parts[0][1])
            whole = [sum(shape[0] for _, _, shape in parts), *parts[0][2][1:]]
            if split is not None:
                whole[split.dim] *= self._tp
            first, kept = 0, kept_rows(self._model, name, whole[0])
            is_transposed = len(whole) == 2 and name in self._transposed
            for _, parameter, shape in parts:
                count = math.prod(shape)
                shares[parameter] = Share(
                    name, tuple(whole), split, self._at.tp, self._tp, first, count, kept, is_transposed
                )
                first += count
        return shares

    def _pieces(self) -> Iterator[Piece]:
        """Yields this rank's pieces, in the order of its flat tensors."""
        optimizer = self._engine.optimizer
        if self.is_partitioned:
            for number, parameters in enumerate(optimizer.fp16_groups):
                yield from self._equal_parts(number, parameters)
            return
        groups = getattr(optimizer, "bit16_groups", None) or optimizer.bf16_groups
        for number, parameters in enumerate(groups):
            for parameter in parameters:
                mapping = parameter._hp_mapping
                if mapping is not None:
                    at, source = mapping.hp_fragment_address, mapping.lp_fragment_address
                    yield self._piece(parameter, number, at.start, source.start, source.numel)

    def _equal_parts(self, group: int, parameters: list[Any]) -> Iterator[Piece]:
        """Yields the pieces of a group of ZeRO-3: every rank has an equal part of each parameter, the last ones
        padded."""
        offset = 0
        for parameter in parameters:
            size = int(parameter.partition_numel())
            start = size * dist.get_rank(group=parameter.ds_process_group)
            count = min(size, parameter.ds_numel - start)
            if count > 0:
                yield self._piece(parameter, group, offset, start, count)
            offset += size

    def _piece(self, parameter: nn.Parameter, group: int, offset: int, start: int, count: int) -> Piece:
        share = self.shares[parameter]
        return Piece(replace(share, first=share.first + start, count=count), group, offset)
