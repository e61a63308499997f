"""Engine deepspeed-3d: DeepSpeed's pipeline x our tensor parallelism x data parallelism, ZeRO 1."""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.engines.deepspeed_engine import DeepspeedEngine
from hpc_gpt.trainer.engines.deepspeed_setup import quiet
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.engines.library_patches import forget_evaluation, forget_logits
from hpc_gpt.trainer.engines.protocol import MicroBatches, StepResult
from hpc_gpt.trainer.model.documents import MicroBatch
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.optimizers import build_optimizer
from hpc_gpt.trainer.ranks import own_group


class Deepspeed3D(DeepspeedEngine):
    """The engine; see `hpc_gpt.trainer.engines.protocol.TrainingEngine`.

    A layout of one stage also runs in DeepSpeed's PipelineModule, so there is one path to test instead of two. The
    module clones its inputs, but those are a few kB of token numbers.
    """

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology

        from hpc_gpt.trainer.model.pipeline import StagedGpt

        layout = resolved.layout
        with quiet():
            self.module = StagedGpt(
                resolved.model,
                resolved.train.seed,
                PipeModelDataParallelTopology(num_pp=layout.pp, num_mp=layout.tp, num_dp=layout.data_ranks),
                self._tensor_parallel(own_group(layout, "tp", dist.get_rank())),
                Techniques.of(resolved.engine, resolved.train),
                resolved.engine.partition,
            )
            compile_model(self.module, resolved.engine)
            optimizer = build_optimizer(resolved, self.module.parameters())
            self._initialize(optimizer)
            forget_logits(self._engine)
        self._reader: _Reader | None = None
        if resolved.data.mask_documents:
            self._reader = _Reader()
            self.module.register_forward_pre_hook(self._add_documents)

    def _add_documents(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Adds the documents of its micro-batch to the input of a forward pass. (A hook is not compiled.)"""
        assert self._reader is not None
        return (*args, self._inputs(self._reader.of_this_pass())[2])

    def _read_by(self, micro_batches: MicroBatches) -> MicroBatches:
        """The iterator from which DeepSpeed reads the micro-batches."""
        return micro_batches if self._reader is None else self._reader.begin(micro_batches)

    def train_step(self, micro_batches: MicroBatches) -> StepResult:
        """Does one step. These functions of `library_patches` replace parts of DeepSpeed in it:

        - `forget_logits`: always, and `forget_evaluation` in `evaluate`.
        - `skip_gradient_average`: a single data-parallel rank with BF16_Optimizer.
        - `drop_overflowed_gradients`: after a skipped step of ZeRO-1.
        """
        lr = self._begin_step()
        with self.attention():
            loss = self._engine.train_batch(self._read_by(micro_batches))
        return self._result(loss.reshape(()), lr)

    def evaluate(self, micro_batches: MicroBatches, count: int) -> Tensor:
        with self.attention():
            loss = self._engine.eval_batch(self._read_by(micro_batches), num_micro_batches=count)
        forget_evaluation(self._engine)
        result: Tensor = loss.detach().reshape(())
        return result


class _Reader:
    """Gives each forward pass of a stage its micro-batch.

    It is always the next one: a stage begins forward passes in order. In the first and the last stage DeepSpeed loads
    it just before; the other stages load nothing, so it is read here.
    """

    def begin(self, micro_batches: MicroBatches) -> Iterator[MicroBatch]:
        """Begins with the micro-batches of a step or an evaluation; returns the iterator from which DeepSpeed loads."""
        self._micro_batches = iter(micro_batches)
        self._loaded: deque[MicroBatch] = deque()
        return self._load()

    def _load(self) -> Iterator[MicroBatch]:
        for micro_batch in self._micro_batches:
            self._loaded.append(micro_batch)
            yield micro_batch

    def of_this_pass(self) -> MicroBatch:
        """The micro-batch of the forward pass that begins."""
        return self._loaded.popleft() if self._loaded else next(self._micro_batches)


build = Deepspeed3D
