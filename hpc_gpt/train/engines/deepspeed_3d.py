"""Engine deepspeed-3d: DeepSpeed's pipeline x our tensor parallelism x data parallelism, ZeRO 0 or 1."""

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.model.techniques import Techniques
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.train.checkpoints.universal import read_weights
from hpc_gpt.train.engines import private_parts
from hpc_gpt.train.engines.deepspeed_engine import DeepspeedEngine
from hpc_gpt.train.engines.deepspeed_setup import forget_evaluation, forget_logits, own_group, quiet
from hpc_gpt.train.engines.kernels import compile_model
from hpc_gpt.train.engines.optimizer import build_optimizer
from hpc_gpt.train.engines.protocol import MicroBatches, StepResult

__all__ = ["build", "read_weights"]


class Deepspeed3D(DeepspeedEngine):
    """See `hpc_gpt.train.engines.protocol.TrainingEngine`.

    A layout of one stage also runs in DeepSpeed's PipelineModule, so there is one path to test instead of two. It
    clones its inputs, but those are a few kB of token numbers.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        private_parts.require(private_parts.PIPELINE)
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        from hpc_gpt.model.pipeline import StagedGpt

        layout = resolved.layout
        with quiet():
            self.module = StagedGpt(
                resolved.model,
                resolved.train.seed,
                PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.dp),
                self._tensor_parallel(own_group(layout, "tp", dist.get_rank())),
                Techniques.of(resolved.engine),
                resolved.engine.partition,
            )
            compile_model(self.module, resolved.engine)
            optimizer = build_optimizer(resolved.train, self.module.parameters())
            self._initialize(optimizer, self.module.mpu().get_model_parallel_group())
            forget_logits(self._engine)

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        lr = self._set_rate()
        with self.attention():
            loss = self._engine.train_batch(micro_batches)
        return self._result(loss.reshape(()), lr)

    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        with self.attention():
            loss = self._engine.eval_batch(micro_batches, num_micro_batches=count)
        forget_evaluation(self._engine)
        result: Tensor = loss.detach().reshape(())
        return result


build = Deepspeed3D
