"""The interface between training loop and engine, the code that engines share, and the choice of an engine by name."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn

from hpc_gpt.core.engines import engine_named
from hpc_gpt.core.errors import ConfigError, check_package
from hpc_gpt.core.process import no_collections
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import learning_rate, schedule_share
from hpc_gpt.core.weights.folder import read_folder
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.states import SavedIndex, SavedStates, put_states
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates
from hpc_gpt.trainer.checkpoints.training_state import Generators, identity, open_checkpoint
from hpc_gpt.trainer.engines.attention import AttentionKernels, prepare_attention
from hpc_gpt.trainer.engines.balance import Balance
from hpc_gpt.trainer.engines.grouped_trial import try_grouped
from hpc_gpt.trainer.engines.kernels import check_compilers
from hpc_gpt.trainer.engines.library_patches import note_untested
from hpc_gpt.trainer.engines.optimizer import LossScaler, Update
from hpc_gpt.trainer.model.documents import MicroBatch
from hpc_gpt.trainer.model.initial_weights import FolderWeights, InitialWeights, SeededWeights
from hpc_gpt.trainer.model.tensor_parallel import full_name
from hpc_gpt.trainer.model.vocab_loss import OnePassLoss, VocabParallelLoss
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


class TorchEngine(TrainingEngine):
    """The base of the engines without DeepSpeed: a step, saving and loading.

    A subclass sets `module`; `_model`, which wraps it for training; and the attributes without a value below.
    """

    _model: nn.Module
    _parameters: list[Any]
    _update: Update
    _states: TorchStates

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        self._step = 0
        self._scaler = LossScaler(resolved.train.dtype, device)

    @property
    def step(self) -> int:
        return self._step

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        count = self._resolved.batch.micro_batches
        total = torch.zeros((), device=self.device)
        if isinstance(module_loss := getattr(self.module, "loss", None), OnePassLoss):
            module_loss.unscaled = count == 1 and self._resolved.train.dtype != "fp16"
        factor = self._scaler.factor
        self.balance.begin(1 / count if factor is None else factor / count)
        with self.attention():
            for number, micro_batch in enumerate(islice(micro_batches, count), 1):
                with self._gradients(last=number == count):
                    loss = self._model(*self._inputs(micro_batch))
                    self._scaler.scale(loss / count).backward()  # type: ignore[no-untyped-call]
                total += loss.detach()
        lr = learning_rate(self._resolved.train, self._step)
        self._update.schedule_share = schedule_share(self._resolved.train, self._step)
        norm, skipped = self._update_weights(lr)
        self._step += 1
        return StepResult(self._mean(total / count), norm, lr, skipped, self.balance.finish(skipped))

    def _gradients(self, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch. It decides whether the gradient is reduced over the ranks or only added up."""
        raise NotImplementedError

    def _update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        """Steps the optimizer and drops the gradients; returns (norm, skipped) of `Update.apply`."""
        raise NotImplementedError

    def _weights_are_loaded(self) -> None:
        """Called after a checkpoint is loaded."""

    def _read_scale(self) -> dict[str, float]:
        return self._scaler.read()

    def _restore(self, saved: SavedStates) -> None:
        self._step = int(saved.about["step"])
        self._scaler.restore(saved.about["loss_scale"])
        self._weights_are_loaded()


def module_of(engine: str) -> ModuleType:
    """The engine's module in this package. Its `build(resolved, device) -> TrainingEngine` is called on every rank
    after torch.distributed is initialised."""
    with no_collections():
        return importlib.import_module(engine_named(engine).trainer)


def read_weights(folder: Path, resolved: Resolved) -> Iterator[tuple[str, Tensor]]:
    """Yields every parameter of the whole model in a checkpoint, and every choice bias, by its full name
    (`tensor_parallel.full_name`), in one process without torch.distributed."""
    saved = SavedStates(folder)
    yield from ((name, saved.whole(name)) for name in saved.names)


def build_engine(resolved: Resolved, device: torch.device) -> TrainingEngine:
    """Builds the engine that the experiment names, ready to train on this rank.

    torch.distributed must be initialised with one rank for each GPU of the layout. Raises ConfigError if the device
    cannot do the arithmetic, or a compiler for it is missing.
    """
    check_dtype_on(resolved.train.dtype, device, resolved.engine.name)
    check_matmul_on(resolved.train.matmul, device)
    check_compilers(resolved.engine, device, resolved.layout.cp)
    note_untested("torch")
    if resolved.train.deterministic:
        make_deterministic()
    allow_tf32(resolved.train.tf32)
    try_grouped(resolved, device)
    engine: TrainingEngine = module_of(resolved.engine.name).build(resolved, device)
    prepare_attention(engine.module, engine.attention, device)
    engine.balance = Balance(resolved, engine.module, device, lambda: engine.step)
    if (weights := engine.given_weights) is not None:
        names = {full_name(parameter) for parameter in engine.module.parameters()} | engine.balance.names
        assert names == weights.taken, f"not from train.init: {names ^ weights.taken}"
        weights.close()
    engine.generators = Generators(device)
    return engine


def check_dtype_on(dtype: str, device: torch.device, engine: str) -> None:
    """Raises ConfigError for arithmetic that the device lacks: fp16 under DeepSpeed on a CPU, bf16 before Ampere."""
    if dtype == "fp16" and device.type == "cpu" and not engine_named(engine).trains_fp16_on_cpu:
        raise ConfigError(
            "train.dtype is fp16, but DeepSpeed does not train in fp16 on a CPU",
            'use train.dtype = "fp32" or "bf16", or engine.name = "ddp" or "fsdp"',
        )
    if dtype == "bf16" and device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        if major < 8:
            raise ConfigError(
                f"train.dtype is bf16, but {torch.cuda.get_device_name(device)} (compute capability "
                f"{major}.{minor}) has no bf16 arithmetic, which came with 8.0",
                'use train.dtype = "fp16"',
            )


def check_matmul_on(matmul: str, device: torch.device) -> None:
    """Raises ConfigError for matrix products that the device has no units for: FP8 before sm_89 and gfx950. On a
    CPU prints a note that they are slow."""
    if matmul == "none":
        return
    if device.type != "cuda":
        if dist.get_rank() == 0:
            print(
                f"note: train.matmul is {matmul}: on a CPU it is slower than bf16, so only for a trial", file=sys.stderr
            )
        return
    major, minor = torch.cuda.get_device_capability(device)
    first = (9, 5) if torch.version.hip is not None else (8, 9)  # AMD's gfx950; gfx942 has FP8 of another format
    if (major, minor) < first:
        raise ConfigError(
            f"train.matmul is {matmul}, but {torch.cuda.get_device_name(device)} (compute capability {major}.{minor}) "
            f"has no units for its FP8 (e4m3fn, e5m2), which came with {first[0]}.{first[1]}",
            "leave train.matmul out",
        )


def make_deterministic() -> None:
    """Uses deterministic kernels only: the same layout gives the same bits. Call it before the first kernel runs."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Otherwise torch fills every empty buffer: for DeepSpeed's 2 GB bucket that takes 2 s per step on a CPU.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False


def allow_tf32(allowed: bool) -> None:
    """Lets fp32 products run as TF32 on a GPU that has it (Ampere and later), with 10 bits of mantissa instead of 23.

    These calls set torch's older and newer switches alike: Inductor reads the older ones, kernels the newer ones, and
    torch raises an error if they disagree.
    """
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed
