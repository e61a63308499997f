"""The checkpoint of a model that is whole on every rank, but for its experts. Any number of ranks can load it.

weights.pt            {full name: fp32}, by rank 0
optimizer-00000.pt    {full name: {moment: tensor}}, by rank 0, and by all ranks if the optimizer is sharded
experts-00000.pt      {"weights": as above, "states": as above} of the experts of a rank, if ranks divide them (ep)
progress.pt           step, loss scale

The files are memory-mapped: a node's ranks share their pages, and copy one parameter at a time to their devices.
"""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT, load_safely
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import Whole, owned_by, set_states, take_whole
from hpc_gpt.trainer.engines.optimizer import kernel_of
from hpc_gpt.trainer.model.dispatch import ExpertParallel
from hpc_gpt.trainer.model.tensor_parallel import full_name, is_of_experts

_WEIGHTS, _PROGRESS = "weights.pt", "progress.pt"


class ReplicatedCheckpoint:
    """Saves and loads fp32 `parameters` that every rank holds whole, but for `experts` that ranks divide, and the
    states of their `optimizer`."""

    def __init__(
        self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer, experts: ExpertParallel | None = None
    ) -> None:
        self._parameters = parameters
        self._experts = experts or ExpertParallel()
        self._apart = {full_name(one) for one in parameters if self._experts.size > 1 and is_of_experts(one)}
        self._optimizer = kernel_of(optimizer)
        self._sharded = self._optimizer is not optimizer

    def save(self, files: RankFiles, rank: int, step: int, scale: dict[str, Any]) -> None:
        """Adds the files that `rank` writes."""
        state, apart = self._optimizer.state, self._apart
        weights = {full_name(one): one for one in self._parameters}
        states = {full_name(one): state[one] for one in owned_by(self._optimizer) if one in state}
        if rank == 0:
            files.put(_WEIGHTS, {name: weights[name] for name in weights if name not in apart})
            files.put(_PROGRESS, {"step": step, "scale": scale})
        if rank == 0 or self._sharded:
            files.put(_optimizer_file(rank), {name: states[name] for name in states if name not in apart})
        if apart and rank < self._experts.size:  # the first ranks, one with each expert
            kinds = {"weights": weights, "states": states}
            ours = {kind: {name: of_kind[name] for name in apart & of_kind.keys()} for kind, of_kind in kinds.items()}
            files.put(_experts_file(rank), ours)

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
        """Loads this rank's weights and optimizer states; returns (step, loss scale)."""
        weights = _read(folder / _WEIGHTS)
        experts = _read_experts(folder)
        for parameter in self._parameters:
            name = full_name(parameter)
            parameter.copy_(self._ours(name, _pieces(name, weights, experts)))
        missing, states = {full_name(one) for one in owned_by(self._optimizer)}, {}
        files = _optimizer_files(folder, rank)
        while missing and (path := next(files, None)) is not None:
            saved = _read(path)
            states.update({name: saved[name] for name in missing & saved.keys()})
            missing -= saved.keys()
        for name in {*missing, *self._apart}:
            pieces = [states[name]] if name in states else [one["states"].get(name, {}) for one in experts]
            if pieces:
                states[name] = {key: self._ours(name, [piece[key] for piece in pieces]) for key in pieces[0]}
        mapped = {id(value) for state in states.values() for value in state.values() if isinstance(value, Tensor)}
        set_states(self._optimizer, states)
        # On a CPU torch keeps the tensors that it is given. Mapped ones would keep a deleted file on the disk.
        for state in self._optimizer.state.values():
            state.update({key: value.clone() for key, value in state.items() if id(value) in mapped})
        progress = _read(folder / _PROGRESS)
        return int(progress["step"]), progress["scale"]

    def take(self, whole: Whole) -> tuple[int, dict[str, Any]]:
        """Loads this rank's part of another engine's checkpoint; returns (step, loss scale)."""
        parameters = {full_name(one): one for one in self._parameters}
        return take_whole(whole, parameters, self._optimizer, lambda name, tensor: self._ours(name, [tensor]))

    def _ours(self, name: str, pieces: list[Tensor]) -> Tensor:
        """Joins the saved `pieces` of a tensor, and returns this rank's experts of it; all of it for other weights."""
        if not pieces[0].ndim:
            return pieces[0]
        count = sum(map(len, pieces)) // (self._experts.size if name in self._apart else 1)
        at, parts = -self._experts.first(count) if name in self._apart else 0, []
        for piece in pieces:
            if at < count and at + len(piece) > 0:
                parts.append(piece[max(0, -at) : count - at])
            at += len(piece)
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def read_replicated(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    weights, experts = _read(folder / _WEIGHTS), _read_experts(folder)
    yield from weights.items()
    for name in experts[0]["weights"] if experts else ():
        yield name, torch.cat(_pieces(name, weights, experts))


def read_whole(folder: Path, resolved: Resolved) -> Whole:
    """The checkpoint for another engine."""
    progress = _read(folder / _PROGRESS)
    weights = ((name, "", weight) for name, weight in read_replicated(folder, resolved))
    return Whole(int(progress["step"]), progress["scale"], chain(weights, _states(folder)))


def _states(folder: Path) -> Iterator[tuple[str, str, Tensor]]:
    """Yields (full name, moment, whole tensor) of every optimizer state."""
    for path in sorted(folder.glob("optimizer-*.pt")):
        for name, state in _read(path).items():
            yield from ((name, moment, value) for moment, value in state.items())
    experts = [one["states"] for one in _read_experts(folder)]
    for name, state in experts[0].items() if experts else ():
        for moment, value in state.items():
            yield name, moment, torch.cat([one[name][moment] for one in experts]) if value.ndim else value


def _read_experts(folder: Path) -> list[dict[str, Any]]:
    """The files of divided experts, in the order of these. Without any, the folder is not listed."""
    divided = (folder / _experts_file(0)).is_file()
    return [_read(path) for path in sorted(folder.glob("experts-*.pt"))] if divided else []


def _pieces(name: str, weights: dict[str, Tensor], experts: list[dict[str, Any]]) -> list[Tensor]:
    """A parameter's pieces, which follow each other: one, or one for each rank that saved some of its experts."""
    return [weights[name]] if name in weights else [one["weights"][name] for one in experts]


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


def _experts_file(rank: int) -> str:
    return f"experts-{rank:05d}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}", REMOVE_IT)
    content: dict[str, Any] = load_safely(path, mmap=True)
    return content
