"""Engine ddp: the whole model on every rank, under torch's DistributedDataParallel; on one rank the bare model.

bf16 and fp16 keep fp32 master weights (`master_weights`); with `train.optimizer_mode` compiled these are flat and one
pass updates them. With `engine.sharded_optimizer` ZeroRedundancyOptimizer splits the moments over the ranks, whole
parameters at a time.

Its checkpoint can be loaded by any number of ranks:

    weights.pt            {full name: fp32}, by rank 0
    optimizer-00000.pt    {full name: {moment: tensor}}, by rank 0, and by all ranks if the optimizer is sharded
    progress.pt           step, loss scale
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.gpt import Gpt
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import full_name
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.folders import REMOVE_IT, load_safely
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.training_state import owned_by, set_states
from hpc_gpt.train.engines.kernels import compile_model
from hpc_gpt.train.engines.master_weights import HALF, FlatMasters, MasterWeights, OnePassAdamW
from hpc_gpt.train.engines.optimizer import Update, build_optimizer, gradients_of, norms_of
from hpc_gpt.train.engines.private_parts import for_each
from hpc_gpt.train.engines.protocol import TorchEngine

_WEIGHTS, _PROGRESS = "weights.pt", "progress.pt"


class Ddp(TorchEngine):
    """See `hpc_gpt.train.engines.protocol.Engine`. On one rank there is no wrapper and no collective."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine, train = resolved.layout, resolved.engine, resolved.train
        assert layout.tp == layout.pp == 1, "the settings' check of the engine refuses the others"
        super().__init__(resolved, device)
        self.module = Gpt(resolved.model, train.seed, techniques=Techniques.of(engine)).to(device)
        parameters = list(self.module.parameters())
        self._masters = _masters_of(resolved, parameters)
        if self._masters is not None:
            parameters = self._masters.masters
        self._parameters = parameters
        self._optimizer = _build_optimizer(resolved, parameters, self._masters)
        compile_model(self.module, engine)
        self._replicas = self._wrap() if layout.dp > 1 else None
        self._model = self._replicas or self.module
        norms = self._masters.norms if self._masters else lambda: norms_of(gradients_of(parameters))
        self._update = Update(self._optimizer, norms, None, train.clip, self._scaler, device)
        self._checkpoint = ReplicatedCheckpoint(parameters, self._optimizer)

    def _wrap(self) -> DistributedDataParallel:
        """The model under DDP.

        All ranks draw the same weights from the seed, so none are sent. Every parameter is used in every step and DDP
        looks for no unused ones, so `static_graph` would save nothing.
        """
        wrapped = DistributedDataParallel(self.module, gradient_as_bucket_view=True, init_sync=False)
        if self._masters is not None:
            # A lambda, because DDP compares a hook's annotations, which are strings in this module, with types.
            wrapped.register_comm_hook(self._masters, lambda masters, bucket: masters.average(bucket))
        return wrapped

    def _gradients(self, last: bool) -> contextlib.AbstractContextManager[None]:
        """The context of a micro-batch: the gradient is averaged over the ranks if it is the `last`, else kept."""
        if self._replicas is not None and self._masters is not None:
            self._masters.collects = not last
        if self._replicas is None or last:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = self._replicas.no_sync()
        return context

    def _update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        updated = self._update.apply(lr)
        if self._masters is not None:
            self._masters.finish_step()
        if self._replicas is not None and self._masters is None:
            # The gradients are views of DDP's buckets, and have to stay in place.
            for_each("zero_", gradients_of(self._parameters))
        else:
            for parameter in self.module.parameters():
                parameter.grad = None
        return updated

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()


build = Ddp


def _masters_of(resolved: Resolved, weights: list[nn.Parameter]) -> MasterWeights | None:
    """The master weights of `weights`, which become half; None in fp32."""
    train = resolved.train
    if train.dtype not in HALF:
        return None
    half = HALF[train.dtype]
    if train.optimizer_mode != "compiled":
        return MasterWeights(weights, half)
    once = resolved.batch.micro_batches == resolved.layout.dp == 1
    return FlatMasters(weights, half, half if once else torch.float32)


def _build_optimizer(
    resolved: Resolved, parameters: list[nn.Parameter], masters: MasterWeights | None
) -> torch.optim.Optimizer:
    if isinstance(masters, FlatMasters):
        return OnePassAdamW(resolved.train, masters, resolved.engine)
    whole = build_optimizer(resolved.train, parameters)
    if not resolved.engine.sharded_optimizer:
        return whole
    # Imported here: its package loads torch's FSDP and more, 0.4 s of each start.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    kind = type(whole)
    takes = inspect.signature(kind).parameters
    settings: dict[str, Any] = {key: value for key, value in whole.defaults.items() if key in takes}
    return ZeroRedundancyOptimizer(whole.param_groups, optimizer_class=kind, parameters_as_bucket_view=True, **settings)


class ReplicatedCheckpoint:
    """Saves and loads fp32 `parameters` that every rank holds whole, and the state of their `optimizer`."""

    def __init__(self, parameters: list[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
        self._parameters = parameters
        # ZeroRedundancyOptimizer has the optimizer of this rank's share as `optim`.
        self._optimizer: torch.optim.Optimizer = getattr(optimizer, "optim", optimizer)
        self._sharded = self._optimizer is not optimizer

    def save(self, files: RankFiles, rank: int, step: int, scale: dict[str, Any]) -> None:
        """Adds the files that `rank` writes."""
        if rank == 0:
            files.put(_WEIGHTS, {full_name(one): one for one in self._parameters})
            files.put(_PROGRESS, {"step": step, "scale": scale})
        if rank == 0 or self._sharded:
            owned, state = owned_by(self._optimizer), self._optimizer.state
            files.put(_optimizer_file(rank), {full_name(one): state[one] for one in owned if one in state})

    @torch.no_grad()
    def load(self, folder: Path, rank: int) -> tuple[int, dict[str, Any]]:
        """Loads this rank's weights and optimizer states; returns (step, loss scale)."""
        weights = _read(folder / _WEIGHTS)
        for parameter in self._parameters:
            parameter.copy_(weights[full_name(parameter)])
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
        progress = _read(folder / _PROGRESS)
        return int(progress["step"]), progress["scale"]


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model by its full name, fp32, in one process without torch.distributed."""
    yield from _read(folder / _WEIGHTS).items()


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank:05d}.pt"


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise CheckpointError(f"{path.parent} holds no {path.name}", REMOVE_IT)
    kept: dict[str, Any] = load_safely(path)
    return kept
