"""The base of the engines on DeepSpeed: initialisation, the initial weights of a run, the result of a step, saving and
loading.

DeepSpeed 0.19.8 makes its fp32 master weights from the model's weights, which are bf16 or fp16 by then. So the model is
built without values, and the master weights get them here in fp32, a few megabytes at a time. Each rank
requests only the values that it updates and those that its forward pass holds: under ZeRO-3 its part of each parameter.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.engines import ds_config_of
from hpc_gpt.core.engines.base.ds_config import shards_in_bf16_optimizer, zero_stage
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.core.settings.schedule import learning_rate
from hpc_gpt.trainer.checkpoints.states import SavedStates, Share
from hpc_gpt.trainer.engines.deepspeed_setup import import_deepspeed, quiet
from hpc_gpt.trainer.engines.deepspeed_states import DeepspeedStates, Piece
from hpc_gpt.trainer.engines.library_patches import (
    drop_overflowed_gradients,
    note_untested,
    set_existing,
    skip_gradient_average,
)
from hpc_gpt.trainer.engines.master_weights import HALF
from hpc_gpt.trainer.engines.protocol import StepResult, TrainingEngine
from hpc_gpt.trainer.model.initial_weights import AT_ONCE
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel


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
        note_untested("deepspeed")
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

    def _fill(self, share: Share, rows: Tensor, first: int) -> None:
        """Fills `rows`, which are the rows from `first` on of this rank's share of a parameter."""
        self._tp.fill(share.name, rows, share.split, share.shape, first)

    @property
    def _transposed(self) -> frozenset[str]:
        """The names of the parameters that the model holds transposed."""
        return frozenset()

    def _initialize(self, optimizer: torch.optim.Optimizer, mpu: Any = None) -> None:
        """Gives model and optimizer to DeepSpeed, then fills in the weights' values.

        `mpu` is DeepSpeed's name for the groups of a model that is not a PipelineModule.
        """
        resolved = self._resolved
        self._optimizer = optimizer
        self._engine, *_ = self._deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=ds_config_of(resolved), mpu=mpu
        )
        layout = resolved.layout
        self._states = DeepspeedStates(
            self._engine, self.module, resolved.model, layout.coordinate(dist.get_rank()), layout.tp, self._transposed
        )
        put_weights(self._states, self._fill)
        self.initial.close()
        if layout.data_ranks == 1 and shards_in_bf16_optimizer(resolved):
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
        skipped = not self._engine.was_step_applied()
        if skipped and zero_stage(self._resolved) < 3 and not shards_in_bf16_optimizer(self._resolved):
            drop_overflowed_gradients(self._engine)
        return StepResult(loss, self._engine.get_global_grad_norm(), lr, skipped, self.balance.finish(skipped))

    def _read_scale(self) -> dict[str, float]:
        return read_scaler(self._engine) if self._resolved.train.dtype == "fp16" else {}

    def _restore(self, saved: SavedStates) -> None:
        engine, updates = self._engine, saved.optimizer.get("step")
        step = int(saved.about["step"])
        set_existing("deepspeed", engine, "global_steps", step)
        set_existing("deepspeed", engine, "global_samples", step * self._resolved.batch.global_batch)
        if updates is not None:
            set_existing("deepspeed", engine, "skipped_steps", step - int(updates))
        if scale := saved.about["loss_scale"]:
            restore_scaler(engine, scale)


def read_scaler(engine: Any) -> dict[str, float]:
    """The loss scale of DeepSpeed's `engine` for a checkpoint, as numbers: the scale, the steps since it has changed,
    and the overflows at which it changes, less one each time that one is forgiven."""
    scaler = engine.optimizer.loss_scaler
    steps = scaler.cur_iter - scaler.last_overflow_iter - 1
    since = (steps - 1) % scaler.scale_window + 1 if steps else 0  # it grows in the step after a whole window
    return {"scale": scaler.cur_scale, "good_steps": since, "hysteresis": scaler.cur_hysteresis}


def restore_scaler(engine: Any, saved: Mapping[str, float]) -> None:
    """Restores a loss scale that any engine has saved."""
    scaler = engine.optimizer.loss_scaler
    hysteresis = int(saved.get("hysteresis", scaler.delayed_shift))
    state = {"cur_scale": saved["scale"], "cur_iter": int(saved["good_steps"]), "last_overflow_iter": -1}
    for name, value in (state | {"cur_hysteresis": hysteresis}).items():
        set_existing("deepspeed", scaler, name, value)


# fill(share, rows, first): fills the rows from `first` on of a parameter's tensor-parallel share with fp32 values.
Fill = Callable[[Share, Tensor, int], None]


class _Target(NamedTuple):
    """Memory, fp32, bf16 or fp16, for the elements of a parameter's flattened share from `start` on."""

    start: int
    memory: Tensor

    @property
    def end(self) -> int:
        return self.start + self.memory.numel()


@torch.no_grad()
def put_weights(states: DeepspeedStates, fill: Fill) -> None:
    """Fills this rank's master weights and the weights of its forward pass."""
    flats = states.flats
    shares = {share.name: share for share in states.shares.values()}
    if not states.is_partitioned:
        targets = [(piece.share.name, _in_flat(flats, piece)) for piece in states.pieces]
        targets += [(share.name, _Target(share.first, one.view(-1))) for one, share in states.shares.items()]
        _put(shares, targets, fill)
        return
    # ZeRO-3 makes the weights of the forward pass from the master weights, one group at a time.
    for number in range(len(flats)):
        targets = [(piece.share.name, _in_flat(flats, piece)) for piece in states.pieces if piece.group == number]
        _put({name: shares[name] for name in dict.fromkeys(name for name, _ in targets)}, targets, fill)
        states.refresh_group(number)
    # A rank may have no part of a small parameter.
    held = {piece.share.name for piece in states.pieces}
    _put({name: share for name, share in shares.items() if name not in held}, [], fill)
    states.gather_small()


def _in_flat(flats: list[Tensor], piece: Piece) -> _Target:
    return _Target(piece.share.first, piece.within(flats[piece.group]))


def _put(shares: dict[str, Share], targets: Iterable[tuple[str, _Target]], fill: Fill) -> None:
    """Requests the values of each share once, and copies them to all `targets` of that name."""
    by_name: dict[str, list[_Target]] = {name: [] for name in shares}
    for name, target in targets:
        by_name[name].append(target)
    for name, share in shares.items():
        size = share.tp_shape[1:]
        width = math.prod(size)
        for first, last in _blocks(by_name[name], width):
            rows = torch.empty(last - first, *size)
            fill(share, rows, first)
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
