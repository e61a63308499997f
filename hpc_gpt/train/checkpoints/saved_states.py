"""The weights and optimizer states of a DeepSpeed checkpoint, parameter by parameter, whatever its layout was.

The files are mapped, not read: a rank touches the pages of the parameters it asks for, and nothing is written. So a
run goes on at another tp, pp, dp or ZeRO stage without a conversion before it, whose time and disk (14 bytes a
parameter, 680 GB for 48B) would be one process's; DeepSpeed's converter is that process, and takes neither ZeRO-0
nor tp under ZeRO-3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.tensor_parallel import Split
from hpc_gpt.train.checkpoints.safe_load import load_safely
from hpc_gpt.train.checkpoints.state_pieces import SCHEMA, Piece
from hpc_gpt.train.engines.deepspeed_setup import import_deepspeed

WEIGHTS = "weights"


class SavedStates:
    """A checkpoint folder that `put_pieces` left its lists in; CheckpointError where they or numbers are missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        lists = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("states-*.json"))]
        if not lists or any(each["schema"] != SCHEMA for each in lists):
            raise CheckpointError(
                f"{folder} does not say where its numbers lie: an older version wrote it",
                "resume it at the layout it was saved with",
            )
        if any(each["swapped"] for each in lists):
            raise CheckpointError(
                f"{folder} lacks what was offloaded to NVMe: DeepSpeed 0.19.8 does not save that",
                "offload to the host's memory where a run is to be resumed or exported",
            )
        self.tp = 1 + max(each["at"][0] for each in lists)
        self._files = [(each["file"], each["weights"]) for each in lists]
        # name -> tp rank -> stage -> (number of the list, piece); stages share a tied parameter.
        self._places: dict[str, dict[int, dict[int, list[tuple[int, Piece]]]]] = {}
        for number, each in enumerate(lists):
            tp_rank, pp_rank, _ = each["at"]
            for name, shape, split, *place in each["pieces"]:
                piece = Piece(name, tuple(shape), split and tuple(split), *place)
                stages = self._places.setdefault(name, {}).setdefault(tp_rank, {})
                stages.setdefault(pp_rank, []).append((number, piece))
        self._opened: dict[str, Any] = {}

    def names(self) -> list[str]:
        """Every parameter of the whole model, by its full name."""
        return list(self._places)

    def kinds(self) -> list[str]:
        """What there is of each parameter beside its weights: `exp_avg` and `exp_avg_sq` under Adam."""
        state = self._states(0).get(0, {})
        return [key for key, value in state.items() if isinstance(value, Tensor) and value.ndim]

    def updates(self) -> float | None:
        """The optimizer's own count of steps, which leaves skipped ones out; None for one that counts none."""
        step = self._states(0).get(0, {}).get("step")
        return None if step is None else float(step)

    def loss_scaler(self) -> Any:
        """DeepSpeed's loss scaler as it was; None without ZeRO."""
        return self._optimizer_file(0).get("loss_scaler")

    def share(self, name: str, key: str, tp_rank: int, tp: int) -> Tensor:
        """A parameter's weights or one of its states (fp32), as `tp_rank` of `tp` holds it."""
        split = self._split(name)
        if split is None or tp == self.tp:
            return self._share(name, key, 0 if split is None else tp_rank)
        return split.shard(self.whole(name, key), tp_rank, tp)

    def whole(self, name: str, key: str = WEIGHTS) -> Tensor:
        """The same of the whole model."""
        split = self._split(name)
        if split is None:
            return self._share(name, key, 0)
        return split.merge([self._share(name, key, tp_rank) for tp_rank in range(self.tp)])

    def _split(self, name: str) -> Split | None:
        if name not in self._places:
            raise CheckpointError(f"{self.folder} holds no parameter {name}", "is it a checkpoint of another model?")
        pieces = next(iter(self._places[name][0].values()))
        split = pieces[0][1].split
        return None if split is None else Split(*split)

    def _share(self, name: str, key: str, tp_rank: int) -> Tensor:
        pieces = next(iter(self._places[name][tp_rank].values()))
        shape = pieces[0][1].shape
        share = torch.empty(shape, dtype=torch.float32)
        flat, found = share.view(-1), 0
        for number, piece in pieces:
            source = self._flat(number, piece, key)[piece.offset : piece.offset + piece.count]
            flat[piece.start : piece.start + piece.count] = source
            found += piece.count
        if found != share.numel():
            raise CheckpointError(
                f"{self.folder} holds {found} of the {share.numel()} numbers of {name}",
                "remove it, and the one before is used",
            )
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
            flat = states["fp32_flat_groups" if "fp32_flat_groups" in states else "single_partition_of_fp32_groups"][
                piece.group
            ]
        return flat.detach().view(-1)

    def _optimizer_file(self, number: int) -> dict[str, Any]:
        state = self._open(self._files[number][0])
        states: dict[str, Any] = state.get("optimizer_state_dict") or state["optimizer"]
        return states

    def _states(self, number: int) -> dict[int, dict[str, Any]]:
        """The base optimizer's states by flat tensor."""
        states = self._optimizer_file(number)
        base = states.get("base_optimizer_state") or states.get("optimizer_state_dict") or states
        found: dict[int, dict[str, Any]] = base["state"]
        return found

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            import_deepspeed(torch.device("cpu"))  # whose classes are in the files
            try:
                self._opened[name] = load_safely(self.folder / name, mmap=True)
            except (OSError, RuntimeError) as fault:
                raise CheckpointError(
                    f"{self.folder / name} cannot be read: {fault}", "remove the checkpoint, and the one before is used"
                ) from None
        return self._opened[name]


def read_weights(folder: Path, resolved: Any) -> Iterator[tuple[str, Tensor]]:
    """Every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    saved = SavedStates(folder)
    for name in saved.names():
        yield name, saved.whole(name)
