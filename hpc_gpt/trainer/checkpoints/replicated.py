"""The checkpoint of a model that is whole on every rank. Any number of ranks can load it.

weights.pt            {full name: fp32}, by rank 0
optimizer-00000.pt    {full name: {moment: tensor}}, by rank 0, and by all ranks if the optimizer is sharded
progress.pt           step, loss scale

The files are memory-mapped: a node's ranks share their pages, and copy one parameter at a time to their devices.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT, load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import owned_by, set_states
from hpc_gpt.trainer.engines.optimizer import kernel_of
from hpc_gpt.trainer.model.tensor_parallel import full_name

_WEIGHTS, _PROGRESS = "weights.pt", "progress.pt"


class ReplicatedCheckpoint:
    """Saves and loads fp32 `parameters` that every rank holds whole, and the states of their `optimizer`."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = kernel_of(optimizer)
        self._sharded = self._optimizer is not optimizer

    def save(self, files: RankFiles, rank: int, step: int, scale: dict[str, Any]) -> None:
        """Adds the files that `rank` writes."""
        if rank == 0:
            files.put(_WEIGHTS, {full_name(one): one for one in self._parameters})
            files.put(_PROGRESS, {"step": step, "scale": scale})
        if rank == 0 or self._sharded:
            state = self._optimizer.state
            states = {full_name(one): state[one] for one in owned_by(self._optimizer) if one in state}
            files.put(_optimizer_file(rank), states)

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
        """Loads this rank's weights and optimizer states; returns (step, loss scale)."""
        weights = _read(folder / _WEIGHTS)
        for parameter in self._parameters:
            parameter.copy_(weights[full_name(parameter)])
        missing, states = {full_name(one) for one in owned_by(self._optimizer)}, {}
        files = _optimizer_files(folder, rank)
        while missing and (path := next(files, None)) is not None:
            saved = _read(path)
            states.update({name: saved[name] for name in missing & saved.keys()})
            missing -= saved.keys()
        mapped = {id(value) for state in states.values() for value in state.values() if isinstance(value, Tensor)}
        set_states(self._optimizer, states)
        # On a CPU torch keeps the tensors that it is given. Mapped ones would keep a deleted file on the disk.
        for state in self._optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if id(value) in mapped})
        progress = _read(folder / _PROGRESS)
        return int(progress["step"]), progress["scale"]


def read_replicated(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    yield from _read(folder / _WEIGHTS).items()


def _optimizer_files(folder: Path, rank: int) -> Iterator[Path]:
    """Yields the files in which a rank looks for its states: its own, rank 0's, then all others.

    Its own file has its whole share if the number of ranks is unchanged, and rank 0's may have everything. Only after
    these two is the folder listed, which has a file per rank.
    """
    first = [folder / _optimizer_file(number) for number in dict.fromkeys((rank, 0))]
    yield from (path for path in first if path.is_file())
    yield from sorted({*folder.glob("optimizer-*.pt")} - {*first})


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank:05d}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}", REMOVE_IT)
    content: dict[str, Any] = load_safely(path, mmap=True)
    return content
