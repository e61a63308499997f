"""The checkpoint of a model that every rank holds whole.

    weights.pt            {full name: fp32}, by rank 0
    optimizer-00000.pt    {full name: {moment: tensor}}, by rank 0, and by all if the optimizer is sharded
    progress.pt           step, loss scale

It can be loaded by any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.folders import REMOVE_IT
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.safe_load import load_safely

_WEIGHTS, _PROGRESS = "weights.pt", "progress.pt"


class ReplicatedCheckpoint:
    """Saves and loads fp32 `parameters` and the state of their `optimizer`."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        # ZeroRedundancyOptimizer holds the one that works on this rank's share.
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        self._sharded = self._optimizer is not optimizer

    def save(self, files: RankFiles, rank: int, step: int, scale: dict[str, Any]) -> None:
        """Adds what `rank` has to write."""
        if rank == 0:
            files.put(_WEIGHTS, {full_name(one): one for one in self._parameters})
            files.put(_PROGRESS, {"step": step, "scale": scale})
        if rank == 0 or self._sharded:
            owned, state = owned_by(self._optimizer), self._optimizer.state
            files.put(_optimizer_file(rank), {full_name(one): state[one] for one in owned if one in state})

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
        """(step, loss scale) of the checkpoint, whose weights and states are now this rank's."""
        weights = _read(folder / _WEIGHTS)
        for parameter in self._parameters:
            parameter.copy_(weights[full_name(parameter)])
        self._load_optimizer(folder, rank)
        progress = _read(folder / _PROGRESS)
        return int(progress["step"]), progress["scale"]

    def _load_optimizer(self, folder: Path, rank: int) -> None:
        missing, states = {full_name(one) for one in owned_by(self._optimizer)}, {}
        # A rank's own file comes first: with the same number of ranks it has all of the rank's share.
        files = sorted(folder.glob("optimizer-*.pt"), key=lambda path: path.name != _optimizer_file(rank))
        for path in files:
            if not missing:
                break
            found = _read(path)
            states.update({name: found[name] for name in missing & found.keys()})
            missing -= found.keys()
        set_states(self._optimizer, states)


def owned_by(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters whose moments this optimizer holds, in its order."""
    return [one for group in optimizer.param_groups for one in group["params"]]


def set_states(optimizer: torch.optim.Optimizer, states: Mapping[str, Any]) -> None:
    """Gives the optimizer the states of its parameters, by full name. SGD without momentum has none."""
    names = [full_name(one) for one in owned_by(optimizer)]
    numbered = {number: states[name] for number, name in enumerate(names) if name in states}
    optimizer.load_state_dict({"state": numbered, "param_groups": optimizer.state_dict()["param_groups"]})


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """The weights of such a checkpoint, by full name, fp32; in one process."""
    yield from _read(folder / _WEIGHTS).items()


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank:05d}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}", REMOVE_IT)
    kept: dict[str, Any] = load_safely(path)
    return kept
