"""The interface between training loop and engine, and the code that all engines share. `build` chooses an engine."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from hpc_gpt.core.errors import check_package
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedIndex, SavedStates, put_states
from hpc_gpt.trainer.checkpoints.training_state import Generators, identity, open_checkpoint
from hpc_gpt.trainer.engines.attention import AttentionKernels
from hpc_gpt.trainer.engines.balance import Balance
from hpc_gpt.trainer.model.documents import MicroBatch
from hpc_gpt.trainer.model.initial_weights import FolderWeights, InitialWeights, SeededWeights
from hpc_gpt.trainer.model.vocab_loss import VocabParallelLoss
from hpc_gpt.trainer.ranks import context_of, experts_of

MicroBatches = Iterator[MicroBatch]
# The figures of `StepResult.balance`, as a line of metrics.jsonl names them.
BALANCE_FIGURES = ("balance_loss", "expert_load", "experts_dead")


class StepResult(NamedTuple):
    """The figures of one optimizer step. Tensors stay on the device; reading them waits for it.

    `loss` is the mean over micro-batches and the data axis, in nats per token. `grad_norm` is the norm of the
    whole model's gradient before clipping, inf or NaN if the gradient is not finite. `skipped`: the gradient was not
    finite, and the weights did not change.

    `balance`, for a mixture of experts, has the BALANCE_FIGURES over all ranks: the mean over the layers of the balance
    loss, without its coefficient; the most tokens of an expert divided by the mean, in the layer where that is largest;
    and the number of experts without a token, in all layers.
    """

    loss: Tensor
    grad_norm: Tensor | float
    lr: float
    skipped: Tensor | bool
    balance: Tensor | None = None


class TrainingEngine:
    """The base of every engine: one rank's part of a training.

    It has the rank's place in the layout, the attention kernels, the mean over the data axis, and the evaluation. Every
    method is collective: all ranks call it together.
    """

    module: Any  # the model on this rank, before the engine wraps it: hooks on it see every forward pass
    balance: Balance  # `build_engine` sets it
    generators: Generators  # and this
    _states: Any  # what it saves: TorchStates or DeepspeedStates
    # The ranks over which a loss is averaged; None for all ranks.
    _data_group: dist.ProcessGroup | None = None

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout = resolved.layout
        assert dist.get_world_size() == layout.gpus, f"{dist.get_world_size()} ranks for {layout}"
        self.device = device
        self.tp_rank, self.pp_rank, self.dp_rank, self.cp_rank = layout.coordinate(dist.get_rank())
        self._resolved = resolved
        self._index = SavedIndex()
        self.context = context_of(resolved, dist.get_rank())
        self.experts = experts_of(layout, dist.get_rank())
        self.attention = AttentionKernels(resolved, device, self.context)
        # The weights of train.init; None if the initial weights are drawn.
        self.given_weights: FolderWeights | None = None
        if resolved.train.init is not None:
            check_package("safetensors", "train.init")
            self.given_weights = FolderWeights(read_folder(Path(resolved.train.init)), resolved.model)
        self.initial: InitialWeights = self.given_weights or SeededWeights(resolved.train.seed, resolved.model.layers)

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included; `load` restores it."""
        raise NotImplementedError

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """Does one optimizer step on `resolved.batch.micro_batches` micro-batches.

        A micro-batch is (tokens, targets), int64 [micro_batch, seq / cp] on the rank's device, with data.mask_documents
        also the boundaries of its documents. Every rank gets its part of its data-parallel rank's sequences; a pipeline
        stage takes only the micro-batches that it needs.
        """
        raise NotImplementedError

    @torch.no_grad()
    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank; the same scalar on every rank."""
        total = torch.zeros((), device=self.device)
        with self.attention():
            for micro_batch in islice(micro_batches, count):
                total += self._loss(*self._inputs(micro_batch))
        return self._mean(total / count)

    def measure(self, micro_batches: MicroBatches, count: int, token_bytes: NDArray[Any] | None) -> Tensor:
        """The loss of `evaluate`, and for bits per byte the nats and bytes of the targets that add bytes to the text:
        fp64 [3]. These two are sums over all ranks, so tp times as large, and NaN unless all have the `token_bytes`,
        [at most vocab]."""
        sums = torch.full((2,), torch.nan, dtype=torch.float64, device=self.device)
        part = next(part for part in self.module.modules() if isinstance(part, VocabParallelLoss))
        if token_bytes is not None:
            counts = torch.zeros(self._resolved.model.vocab, dtype=torch.int64)
            counts[: len(token_bytes)] = torch.from_numpy(token_bytes.astype("int64"))
            part.token_bytes, part.sums = counts.to(self.device), sums.zero_()
        loss = self.evaluate(micro_batches, count)
        part.token_bytes = None
        dist.all_reduce(sums)
        return torch.cat([loss.double().reshape(1), sums])

    def save(self, files: RankFiles) -> None:
        """Adds this rank's part of model, optimizer, step and generator states to `files`; writes nothing.

        The tensors are those in training, not copies, so they must be copied or written before the next step.
        """
        about = {
            "step": self.step,
            "optimizer": self._states.numbers(),
            "loss_scale": self._read_scale(),
            "settings": identity(self._resolved),
        }
        held = [*self._states.held(), *self.balance.held(self.is_first_of_stage)]
        names = [*self._resolved.model.parameter_names, *self._resolved.model.buffer_names]
        put_states(files, held, about, self._index, names)
        self.generators.put(files)

    def load(self, folder: Path) -> None:
        """Restores a checkpoint that any engine's `save` wrote, in any layout.

        Raises CheckpointError if it belongs to another model or arithmetic.
        """
        saved, is_alike = open_checkpoint(folder, self._resolved)
        self._states.load(saved)
        self._restore(saved)
        self.balance.load(saved)
        if is_alike:
            self.generators.load(folder, dist.get_rank(), dist.get_world_size())
        dist.barrier()

    def _read_scale(self) -> dict[str, float]:
        """The loss scale as numbers; empty but in fp16."""
        raise NotImplementedError

    def _restore(self, saved: SavedStates) -> None:
        """Restores step and loss scale; called after weights and optimizer states are loaded."""
        raise NotImplementedError

    @property
    def is_first_of_stage(self) -> bool:
        """Whether the rank is the first one of its pipeline stage."""
        return self.tp_rank == self.cp_rank == self.dp_rank == 0

    def _inputs(self, micro_batch: MicroBatch) -> tuple[Any, ...]:
        """The model's arguments: tokens, targets, and their documents if the run masks documents."""
        if len(micro_batch) == 2:
            return micro_batch
        tokens, targets, boundaries = micro_batch
        return tokens, targets, self.attention.documents(boundaries)

    def _loss(self, *inputs: Any) -> Tensor:
        loss: Tensor = self.module(*inputs)
        return loss

    def _mean(self, loss: Tensor) -> Tensor:
        """Averages a loss over the data axis: the replicas, and their parts of the sequences, which are of equal
        size."""
        if (ranks := self._resolved.layout.data_ranks) > 1:
            dist.all_reduce(loss, group=self._data_group)
            loss /= ranks
        return loss


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model in a checkpoint, and every choice bias, by its full name
    (`tensor_parallel.full_name`), in one process without torch.distributed."""
    saved = SavedStates(folder)
    yield from ((name, saved.whole(name)) for name in saved.names)
