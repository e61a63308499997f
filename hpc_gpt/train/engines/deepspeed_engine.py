"""The base of the engines on DeepSpeed: initialisation, the result of a step, saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hpc_gpt.engines import ds_config_of
from hpc_gpt.engines.base.ds_config import clips_itself, shards_in_bf16_optimizer, zero_stage
from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.initial_weights import DrawnLater
from hpc_gpt.model.tensor_parallel import Split, TensorParallel
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.checkpoints.folders import REMOVE_IT
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.training_state import load_random_state, put_identity, put_random_state
from hpc_gpt.train.checkpoints.universal import (
    WeightPlace,
    check_states,
    find_differences,
    load_universal,
    put_pieces,
)
from hpc_gpt.train.engines import private_parts
from hpc_gpt.train.engines.deepspeed_setup import TAG, average_nothing, import_deepspeed, plug_in, quiet, save_deepspeed
from hpc_gpt.train.engines.first_weights import put_weights
from hpc_gpt.train.engines.master_weights import HALF
from hpc_gpt.train.engines.optimizer import GradientNorm, learning_rate
from hpc_gpt.train.engines.protocol import StepResult, TrainingEngine
from hpc_gpt.train.engines.zero_step import StepWithoutHost, can_step_without_host, share_states, sum_where_read


class DeepspeedEngine(TrainingEngine):
    """See `hpc_gpt.train.engines.protocol.TrainingEngine`. A subclass makes `module` and calls `_initialize`.

    The model is built without values: DeepSpeed would make its master weights from bf16 or fp16 ones. When its masters
    are there, they get the values in fp32, and what the forward pass reads gets them rounded.
    """

    _tp: TensorParallel

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        self._deepspeed = import_deepspeed(device)
        private_parts.require(private_parts.CHECKPOINTS)
        with quiet():
            self._deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)

    def _tensor_parallel(self, group: dist.ProcessGroup | None) -> TensorParallel:
        """This rank's place in tensor parallelism `group`, where parameters are made without values."""
        resolved, dtype = self._resolved, HALF.get(self._resolved.train.dtype, torch.float32)
        self._tp = TensorParallel(
            self.tp_rank,
            resolved.layout.tp,
            group,
            self.given or DrawnLater(resolved.train.seed, resolved.model.layers),
            empty=lambda size: torch.empty(size, dtype=dtype, device=self.device),
        )
        return self._tp

    def _fill(self, place: WeightPlace, rows: Tensor, first: int) -> None:
        """Fills `rows`, those from `first` on of this rank's share of a parameter."""
        split = None if place.split is None else Split.of_stored(place.split)
        size = list(place.shape)
        if split is not None:
            size[split.dim] *= self._tp.size
        self._tp.fill(place.name, rows, split, size, first)

    def _initialize(self, optimizer: torch.optim.Optimizer, replica: dist.ProcessGroup, mpu: Any = None) -> None:
        """Gives model and optimizer to DeepSpeed, and then the weights their values.

        `replica` has the ranks of one model replica. `mpu` is DeepSpeed's name for the groups of a model that is not a
        PipelineModule.
        """
        resolved = self._resolved
        parameters: list[nn.Parameter] = list(self.module.parameters())
        self._optimizer = optimizer
        self._norm: GradientNorm | StepWithoutHost | None = None
        if clips_itself(resolved):
            self._norm = GradientNorm(optimizer, parameters, self.tp_rank, replica, resolved.train.clip)
        self._engine, *_ = self._deepspeed.initialize(
            model=self.module, optimizer=optimizer, config=ds_config_of(resolved), mpu=mpu
        )
        private_parts.check_optimizer(self._engine.optimizer)
        put_weights(self._engine, self.module, self._fill)
        assert self._tp.given is not None
        self._tp.given.close()
        plug_in(self._engine)
        if zero_stage(resolved) == 3:
            sum_where_read(self._engine.optimizer)
        if resolved.engine.offload_ratio < 1:
            share_states(self._engine.optimizer)
        if self._norm is None and can_step_without_host(resolved, self._engine.optimizer, optimizer):
            self._norm = StepWithoutHost(self._engine.optimizer, optimizer, resolved.train.clip, self.tp_rank)
        if resolved.layout.dp == 1 and (clips_itself(resolved) or shards_in_bf16_optimizer(resolved)):
            average_nothing(self._engine)

    @property
    def step(self) -> int:
        return int(self._engine.global_steps)

    def _set_rate(self) -> float:
        """Sets the learning rate of the next step, and returns it."""
        lr = learning_rate(self._resolved.train, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return lr

    def _result(self, loss: Tensor, lr: float) -> StepResult:
        """The figures of the step that was just done."""
        if self._norm is not None:
            assert self._norm.norm is not None
            assert self._norm.skipped is not None
            return StepResult(loss, self._norm.norm, lr, self._norm.skipped)
        skipped = not self._engine.was_step_applied()
        if skipped and zero_stage(self._resolved) < 3:
            # With offloading DeepSpeed 0.19.8 keeps a gradient that is not finite, and all later steps overflow.
            self._engine.optimizer.averaged_gradients = {}
        return StepResult(loss, self._engine.get_global_grad_norm(), lr, skipped)

    def save(self, files: RankFiles) -> None:
        """Adds DeepSpeed's own checkpoint, its list of pieces, this rank's generator state, and model.json."""
        save_deepspeed(self._engine, files)
        at = self.tp_rank, self.pp_rank, self.dp_rank
        put_pieces(files, self._engine, self.module, TAG, dist.get_rank(), at)
        put_random_state(files, dist.get_rank(), self.device)
        if dist.get_rank() == 0:
            put_identity(files, self._resolved, self.step)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, of either DeepSpeed engine and any layout."""
        others = find_differences(folder, self._resolved)
        if self._resolved.engine.offload_path is not None:
            # Measured: a resumed run's loss was off by 1.2, without an error.
            raise CheckpointError(
                f"{folder} cannot be resumed with engine.offload_path: DeepSpeed 0.19.8 does not restore the states on "
                "NVMe",
                "train without interruption, or offload to the host's memory from the start",
            )
        if not (folder / TAG).is_dir():
            raise CheckpointError(f"{folder} holds no weights", REMOVE_IT)
        if others:
            load_universal(self._engine, self.module, folder, self._resolved, self.tp_rank)
        else:
            with quiet():
                self._engine.load_checkpoint(str(folder), tag=TAG)
            check_states(self._engine, folder)
            load_random_state(folder, dist.get_rank(), self.device)
        dist.barrier()
