"""Engine deepspeed-zero: our tensor parallelism x DeepSpeed's ZeRO 1 to 3 over data-parallel ranks, with offloading."""

import warnings
from collections.abc import Callable
from itertools import islice
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.engines import ds_config_of
from hpc_gpt.core.engines.base.ds_config import zero_stage
from hpc_gpt.core.settings.layout import Layout
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.deepspeed_engine import DeepspeedEngine
from hpc_gpt.trainer.engines.deepspeed_setup import quiet
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.engines.library_patches import split_as_built
from hpc_gpt.trainer.engines.protocol import MicroBatches, StepResult
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from hpc_gpt.trainer.optimizers import build_optimizer
from hpc_gpt.trainer.ranks import own_group


class Groups:
    """DeepSpeed's `mpu`: a rank's groups along tp (DeepSpeed: model parallel) and along the data axis."""

    get_model_parallel_group: Callable[[], dist.ProcessGroup]
    get_data_parallel_group: Callable[[], dist.ProcessGroup]

    def __init__(self, layout: Layout, rank: int) -> None:
        at = layout.coordinate(rank)
        # Even a single rank needs a group: to DeepSpeed None means all ranks.
        tp, data = (cast(dist.ProcessGroup, own_group(layout, axis, rank, alone=True)) for axis in ("tp", "data"))
        # Parts of DeepSpeed try the newer names first, with `tensor`.
        self.get_model_parallel_group = self.get_tensor_model_parallel_group = lambda: tp
        self.get_model_parallel_rank = self.get_tensor_model_parallel_rank = lambda: at.tp
        self.get_model_parallel_world_size = self.get_tensor_model_parallel_world_size = lambda: layout.tp
        self.get_data_parallel_group = lambda: data
        self.get_data_parallel_rank = lambda: layout.data_rank(rank)
        self.get_data_parallel_world_size = lambda: layout.data_ranks


class DeepspeedZero(DeepspeedEngine):
    """The engine; see `hpc_gpt.trainer.engines.protocol.TrainingEngine`.

    Under ZeRO-3 on a GPU the host waits for the device after every backward pass, because DeepSpeed 0.19.8 synchronises
    there (stage3.py); a profile on a CPU does not show it. So the host cannot launch the next micro-batch ahead.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        layout, engine = resolved.layout, resolved.engine
        assert layout.pp == 1, "the settings' check of the engine refuses stages"
        super().__init__(resolved, device)
        partitioned = zero_stage(resolved) == 3
        with quiet():
            self._groups = Groups(layout, dist.get_rank())
            self._data_group = self._groups.get_data_parallel_group()
            tp = self._tensor_parallel(self._groups.get_model_parallel_group())
            if partitioned:
                with split_as_built(self._deepspeed, ds_config_of(resolved), self._groups):
                    self.module = self._build_model(tp)
                if engine.compile != "none":
                    _gather_by_block(self._deepspeed, self.module, engine.tiles)
            else:
                self.module = self._build_model(tp).to(device)
            compile_model(self.module, engine, () if isinstance(self.module, Gpt) else self.module.blocks)
            optimizer = build_optimizer(resolved, self.module.parameters())
            self._initialize(optimizer, self._groups)

    def _build_model(self, tp: TensorParallel) -> Any:
        """Builds the model: (tokens, targets) -> loss, with named parameters (`name_parameter`).

        A subclass may build another model, with its layers as `blocks`.
        """
        return Gpt(
            self._resolved.model,
            self._resolved.train.seed,
            tp,
            Techniques.of(self._resolved.engine, self._resolved.train),
        )

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """Does one step. These functions of `library_patches` replace parts of DeepSpeed in it:

        - `skip_gradient_average`: a single data-parallel rank with BF16_Optimizer.
        - `drop_overflowed_gradients`: after a skipped step of ZeRO-1 or -2.
        """
        engine, count = self._engine, self._resolved.batch.micro_batches
        lr = self._begin_step()
        total = torch.zeros((), device=self.device)
        with self.attention():
            for micro_batch in islice(micro_batches, count):
                loss = self._loss(*self._inputs(micro_batch))
                total += loss.detach()
                engine.backward(loss)
                engine.step()  # DeepSpeed updates the weights in the last call of a step
        return self._result(self._mean(total / count), lr)

    def _loss(self, *inputs: Any) -> Tensor:
        loss: Tensor = self._engine(*inputs)
        return loss


build = DeepspeedZero


def _gather_by_block(deepspeed: Any, model: Any, tiles: int) -> None:
    """Makes ZeRO-3 gather a whole block, unless there are tiles: its hooks on layers would split a compiled graph.

    The head's weight is used outside the call of its layer, which DeepSpeed detects only in eager mode.
    """
    warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
    if tiles == 1:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    if isinstance(model, Gpt):
        deepspeed.zero.register_external_parameter(model, model.output_layer.weight)
