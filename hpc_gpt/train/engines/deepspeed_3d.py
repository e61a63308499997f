"""Engine deepspeed-3d: DeepSpeed's pipeline x our tensor parallelism x data parallelism, ZeRO 0 or 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.errors import CheckpointError
from hpc_gpt.model.techniques import Techniques
from hpc_gpt.model.tensor_parallel import TensorParallel
from hpc_gpt.settings.ds_config import clips_itself, deepspeed_config, is_alone
from hpc_gpt.settings.resolve import Resolved
from hpc_gpt.train.checkpoints.rank_files import RankFiles
from hpc_gpt.train.checkpoints.training_state import load_random_state, put_identity, put_random_state
from hpc_gpt.train.checkpoints.universal import find_differences, load_universal, put_pieces, read_weights
from hpc_gpt.train.engines.attention import attention_kernels
from hpc_gpt.train.engines.compilation import compile_model
from hpc_gpt.train.engines.deepspeed_setup import TAG, import_deepspeed, quiet
from hpc_gpt.train.engines.gradient_norm import GradientNorm, owned
from hpc_gpt.train.engines.groups import own_group
from hpc_gpt.train.engines.optimizer import build_optimizer, learning_rate
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult
from hpc_gpt.train.engines.zero_alone import keep_to_itself
from hpc_gpt.train.engines.zero_step import UnseenStep, can_step_unseen

__all__ = ["build", "read_weights"]


def build(resolved: Resolved, device: torch.device) -> Deepspeed3D:
    """The engine on this rank; torch.distributed is initialised, with as many ranks as the layout has."""
    return Deepspeed3D(resolved, device)


class Deepspeed3D:
    """See `hpc_gpt.train.engines.protocol.Engine`.

    A layout of one stage runs through DeepSpeed's PipelineModule like any other: what that clones there are token
    numbers, a few kB, and one path is tested instead of two.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout = resolved.layout
        rank = dist.get_rank()
        assert dist.get_world_size() == layout.gpus, f"{dist.get_world_size()} ranks for {layout}"
        self.device = device
        self.tp_rank, self.pp_rank, self.dp_rank = layout.coordinate(rank)
        self._resolved = resolved
        self._attention = attention_kernels(resolved, device)
        deepspeed = import_deepspeed(device)
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        from hpc_gpt.model.pipeline import StagedGpt
        from hpc_gpt.train.engines.deepspeed_files import plug_in

        with quiet():
            deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
            topology = PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp)
            self.module = StagedGpt(
                resolved.model,
                resolved.train.seed,
                topology,
                TensorParallel(self.tp_rank, layout.tp, own_group(layout, "tp", rank)),
                Techniques.of(resolved.engine),
                resolved.engine.partition,
            )
            compile_model(self.module, resolved.engine)
            parameters = list(self.module.parameters())
            self._optimizer = build_optimizer(resolved.train, parameters)
            self._replica_group: dist.ProcessGroup = self.module.mpu().get_model_parallel_group()
            self._norm: GradientNorm | UnseenStep | None = None
            if clips_itself(resolved):
                self._norm = GradientNorm(
                    self._optimizer, parameters, self.tp_rank, self._replica_group, resolved.train.clip
                )
            self._engine, *_ = deepspeed.initialize(
                model=self.module, optimizer=self._optimizer, config=deepspeed_config(resolved)
            )
            _forget_logits(self._engine)
            plug_in(self._engine)
            if is_alone(resolved):
                keep_to_itself(self._engine.optimizer)
            if self._norm is None and can_step_unseen(resolved, self._optimizer):
                self._norm = UnseenStep(self._engine.optimizer, self._optimizer, resolved.train.clip, self.tp_rank)
        if (
            layout.dp == 1
            and resolved.train.dtype != "fp16"
            and (clips_itself(resolved) or resolved.train.dtype == "bf16")
        ):
            # Averaging over one rank copies every gradient twice for nothing. (ZeRO's own optimizer needs the call.)
            self._engine.pipeline_enable_backward_allreduce = False

    @property
    def step(self) -> int:
        """Optimizer steps done, skipped ones included."""
        return int(self._engine.global_steps)

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """One optimizer step; see `Engine`."""
        lr = learning_rate(self._resolved.train, self.step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        with self._attention():
            loss = self._engine.train_batch(micro_batches)
        if self._norm is not None:
            assert self._norm.norm is not None
            assert self._norm.skipped is not None
            return StepResult(loss.reshape(()), self._norm.norm, lr, self._norm.skipped)
        # One loss scale serves fp32 and bf16 too: it is 1 there. `overflow` is the host's own flag already.
        optimizer = self._engine.optimizer
        return StepResult(loss.reshape(()), optimizer._global_grad_norm, lr, bool(optimizer.overflow))

    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        """Mean loss over `count` micro-batches of each data-parallel rank."""
        with self._attention():
            loss = self._engine.eval_batch(micro_batches, num_micro_batches=count)
        outputs = self._engine.pipe_buffers["outputs"]
        outputs[:] = [None] * len(outputs)
        result: Tensor = loss.detach().reshape(())
        return result

    def save(self, files: RankFiles) -> None:
        """DeepSpeed's own checkpoint, whose model it is, and every rank's generator state."""
        from hpc_gpt.train.engines.deepspeed_files import save_deepspeed

        save_deepspeed(self._engine, files)
        at = self.tp_rank, self.pp_rank, self.dp_rank
        put_pieces(files, self._engine, self.module, TAG, dist.get_rank(), at)
        put_random_state(files, dist.get_rank(), self.device)
        if dist.get_rank() == 0:
            put_identity(files, self._resolved, self.step)

    def load(self, folder: Path) -> None:
        """Restores what `save` wrote, of either DeepSpeed engine and any layout; CheckpointError if it is of another
        model or arithmetic."""
        others = find_differences(folder, self._resolved)
        if not (folder / TAG).is_dir():
            raise CheckpointError(f"{folder} holds no weights", "remove it, and the one before is used")
        if others:
            load_universal(self._engine, self.module, folder, self._resolved, self.tp_rank)
        else:
            with quiet():
                self._engine.load_checkpoint(str(folder), tag=TAG)
            load_random_state(folder, dist.get_rank(), self.device)
        dist.barrier()

    def parameter_count(self) -> int:
        """Parameters of the whole model, a tied embedding once."""
        count = sum(parameter.numel() for parameter in owned(self.module.parameters(), self.tp_rank))
        total = torch.tensor(count, dtype=torch.int64, device=self.device)
        dist.all_reduce(total, group=self._replica_group)
        return int(total)


def _forget_logits(engine: Any) -> None:
    """Lets go of a micro-batch's logits after its backward pass; DeepSpeed's last stage keeps them until the next
    are there, the largest activation of a small model twice over."""
    from deepspeed.runtime.pipe.schedule import BackwardPass

    backward = engine._INSTRUCTION_MAP[BackwardPass]

    def backward_pass(self: Any, buffer_id: int) -> None:
        backward(self, buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = None

    engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, BackwardPass: backward_pass}
