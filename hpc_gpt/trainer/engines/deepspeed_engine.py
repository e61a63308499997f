"""The base of the engines on DeepSpeed: initialisation, the initial weights of a run, the result of a step, saving and
loading.

DeepSpeed 0.19.8 makes its fp32 master weights from the model's weights, which are bf16 or fp16 by then. So the model is
built without values, and the master weights get them here in fp32, a few megabytes at a time. Under ZeRO each rank
requests only the values that it updates and those that its forward pass holds: under ZeRO-3 its part of each parameter.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.core.engines import ds_config_of
from hpc_gpt.core.engines.base.ds_config import clips_itself, shards_in_bf16_optimizer, zero_stage
from hpc_gpt.core.errors import CheckpointError
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import learning_rate
from hpc_gpt.trainer.checkpoints import older
from hpc_gpt.trainer.checkpoints.folders import REMOVE_IT
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.training_state import load_generators, put_generators, put_identity
from hpc_gpt.trainer.checkpoints.universal import (
    Piece,
    WeightPlace,
    find_differences,
    flat_states,
    gather_small,
    load_universal,
    pieces_of,
    places_of,
    put_pieces,
)
from hpc_gpt.trainer.engines import private_parts
from hpc_gpt.trainer.engines.deepspeed_setup import TAG, NamedFiles, import_deepspeed, quiet, save_deepspeed
from hpc_gpt.trainer.engines.library_patches import (
    drop_overflowed_gradients,
    skip_gradient_average,
    use_checkpoint_engine,
)
from hpc_gpt.trainer.engines.master_weights import HALF
from hpc_gpt.trainer.engines.optimizer import GradientNorm
from hpc_gpt.trainer.engines.protocol import StepResult, TrainingEngine
from hpc_gpt.trainer.model.initial_weights import AT_ONCE
from hpc_gpt.trainer.model.tensor_parallel import Split, TensorParallel


class DeepspeedEngine(TrainingEngine):
    """The base class; see `hpc_gpt.trainer.engines.protocol.TrainingEngine`. A subclass makes `module` and calls
    `_initialize`.

    The model is built without values: DeepSpeed would make its master weights from bf16 or fp16 ones. Once the master
    weights exist, they get the values in fp32, and the weights of the forward pass get them rounded.
    """

    _tp: TensorParallel

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        self._deepspeed = import_deepspeed(device)
        private_parts.check_version("deepspeed")
        private_parts.require(private_parts.CHECKPOINTS)
        with quiet():
            self._deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def _tensor_parallel(self, group: dist.ProcessGroup | None) -> TensorParallel:
        """This rank's place in the tensor-parallel `group`. It makes parameters without values."""
        resolved, dtype = self._resolved, HALF.get(self._resolved.train.dtype, torch.float32)
        self._tp = TensorParallel(
            self.tp_rank,
            resolved.layout.tp,
            group,
            self.initial,
            empty=lambda size: torch.empty(size, dtype=dtype, device=self.device),
            context=self.context,
        )
        return self._tp

    def _fill(self, place: WeightPlace, rows: Tensor, first: int) -> None:
        """Fills `rows`, which are the rows from `first` on of this rank's share of a parameter."""
        split = None if place.split is None else Split.of_stored(place.split)
        size = list(place.shape)
        if split is not None:
            size[split.dim] *= self._tp.size
        self._tp.fill(place.name, rows, split, size, first)

    def _initialize(self, optimizer: torch.optim.Optimizer, replica: dist.ProcessGroup, mpu: Any = None) -> None:
        """Gives model and optimizer to DeepSpeed, then fills in the weights' values.

        `replica` is the group of the ranks of one model replica. `mpu` is DeepSpeed's name for the groups of a model
        that is not a PipelineModule.
        """
        resolved = self._resolved
        parameters: list[nn.Parameter] = list(self.module.parameters())
        self._optimizer = optimizer
        self._norm: GradientNorm | None = None
        if clips_itself(resolved):
            self._norm = GradientNorm(optimizer, parameters, self.tp_rank, replica, resolved.train.clip)
        self._engine, *_ = self._deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=ds_config_of(resolved), mpu=mpu
        )
        private_parts.check_optimizer(self._engine.optimizer)
        put_weights(self._engine, self.module, self._fill)
        self.initial.close()
        use_checkpoint_engine(self._engine, NamedFiles)
        if resolved.layout.data_ranks == 1 and (clips_itself(resolved) or shards_in_bf16_optimizer(resolved)):
            skip_gradient_average(self._engine)

    @property
    def step(self) -> int:
        return int(self._engine.global_steps)

    def _begin_step(self) -> float:
        """Sets the learning rate of the next step, and returns it."""
        scale = self._engine.optimizer.loss_scale if self._resolved.train.dtype == "fp16" else 1.0
        self.balance.begin(scale / self._resolved.batch.micro_batches)
        lr = learning_rate(self._resolved.train, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _result(self, loss: Tensor, lr: float) -> StepResult:
        """The figures of the step that was just done."""
        if self._norm is not None:
            assert self._norm.norm is not None
            assert self._norm.skipped is not None
            return StepResult(loss, self._norm.norm, lr, self._norm.skipped, self.balance.finish(self._norm.skipped))
        skipped = not self._engine.was_step_applied()
        if skipped and zero_stage(self._resolved) < 3:
            drop_overflowed_gradients(self._engine)
        return StepResult(loss, self._engine.get_global_grad_norm(), lr, skipped, self.balance.finish(skipped))

    def save(self, files: RankFiles) -> None:
        """Adds DeepSpeed's own checkpoint, its list of pieces, this rank's generator state, and model.json."""
        save_deepspeed(self._engine, files)
        at = self.tp_rank, self.pp_rank, self._resolved.layout.data_rank(dist.get_rank())
        put_pieces(files, self._engine, self.module, TAG, dist.get_rank(), at)
        put_generators(files, self.device)
        if biases := {one.share.name: one.elements for one in self.balance.held(self.is_first_of_stage)}:
            files.put(f"balance-{self.pp_rank:05d}.pt", biases)
        if dist.get_rank() == 0:
            put_identity(files, self._resolved, self.step)

    def load(self, folder: Path) -> None:
        """Restores a checkpoint that `save` wrote, from either DeepSpeed engine and any layout."""
        others = find_differences(folder, self._resolved)
        if not (folder / TAG).is_dir():
            raise CheckpointError(f"{folder} holds no weights", REMOVE_IT)
        if others:
            load_universal(self._engine, self.module, folder, self._resolved, self.tp_rank)
        else:
            decays = [group["weight_decay"] for group in self._optimizer.param_groups]
            with quiet():
                self._engine.load_checkpoint(str(folder), tag=TAG)
            for group, decay in zip(self._optimizer.param_groups, decays, strict=True):
                group["weight_decay"] = decay  # a branch may change it, and DeepSpeed has loaded the checkpoint's
            load_generators(folder, dist.get_rank(), dist.get_world_size(), self.device)
        self.balance.load(older.OlderBiases(folder))  # type: ignore[arg-type]
        dist.barrier()


# fill(place, rows, first): fills the rows from `first` on of a parameter's tensor-parallel share with fp32 values.
Fill = Callable[[WeightPlace, Tensor, int], None]


class _Target(NamedTuple):
    """Memory, fp32, bf16 or fp16, for the elements of a parameter's flattened share from `start` on."""

    start: int
    memory: Tensor

    @property
    def end(self) -> int:
        return self.start + self.memory.numel()


@torch.no_grad()
def put_weights(engine: Any, module: nn.Module, fill: Fill) -> None:
    """Fills this rank's master weights and the weights of its forward pass. `engine` is DeepSpeed's."""
    optimizer, flats, by_parameter = engine.optimizer, flat_states(engine), places_of(module)
    places = {place.name: place for place in by_parameter.values()}
    pieces = pieces_of(engine, module)
    if not hasattr(optimizer, "fp32_partitioned_groups_flat"):
        targets = [(piece.name, _in_flat(flats, piece)) for piece in pieces]
        targets += [(place.name, _Target(place.start, one.view(-1))) for one, place in by_parameter.items()]
        _put(places, targets, fill)
        return
    # ZeRO-3 makes the weights of the forward pass from the master weights, one group at a time.
    for number in range(len(flats)):
        targets = [(piece.name, _in_flat(flats, piece)) for piece in pieces if piece.group == number]
        _put({name: places[name] for name in dict.fromkeys(name for name, _ in targets)}, targets, fill)
        optimizer._reassign_or_swap_out_partitioned_parameters(number)
    # A rank may have no part of a small parameter.
    _put({name: place for name, place in places.items() if name not in {piece.name for piece in pieces}}, [], fill)
    gather_small(optimizer)


def _in_flat(flats: list[Tensor], piece: Piece) -> _Target:
    return _Target(piece.start, flats[piece.group].view(-1)[piece.offset : piece.offset + piece.count])


def _put(places: dict[str, WeightPlace], targets: Iterable[tuple[str, _Target]], fill: Fill) -> None:
    """Requests the values of each place once, and copies them to all `targets` of that name."""
    by_name: dict[str, list[_Target]] = {name: [] for name in places}
    for name, target in targets:
        by_name[name].append(target)
    for name, place in places.items():
        width = math.prod(place.shape[1:])
        for first, last in _blocks(by_name[name], width):
            rows = torch.empty(last - first, *place.shape[1:])
            fill(place, rows, first)
            values, begin, end = rows.view(-1), first * width, last * width
            for target in by_name[name]:
                low, high = max(begin, target.start), min(end, target.end)
                if low < high:
                    target.memory[low - target.start : high - target.start].copy_(values[low - begin : high - begin])


def _blocks(targets: list[_Target], width: int) -> Iterator[tuple[int, int]]:
    """Yields (first, last) rows that the targets need, a few rows at a time; (0, 0) if there are no targets."""
    if not targets:
        yield 0, 0
        return
    count, done = max(1, AT_ONCE // width), 0
    for one in sorted(targets, key=lambda target: target.start):
        end = -(-one.end // width)
        for row in range(max(done, one.start // width), end, count):
            yield row, min(end, row + count)
        done = max(done, end)
