"""Engine plain-torch: the whole model on every rank, and an all-reduce a gradient after the last micro-batch."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.engines.master_weights import HALF, MasterWeights
from hpc_gpt.trainer.engines.torch_engine import TorchEngine, gradients_of
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.techniques import Techniques
from hpc_gpt.trainer.model.tensor_parallel import TensorParallel
from hpc_gpt.trainer.optimizers import build_optimizer


class PlainTorch(TorchEngine):
    """See `hpc_gpt.trainer.engines.protocol.TrainingEngine`."""

    def __init__(self, resolved: Resolved, device: torch.device) -> None:
        super().__init__(resolved, device)
        train, half = resolved.train, HALF.get(resolved.train.dtype)
        # The ranks of cp have parts of the same samples; to the engine they are ranks of its data axis.
        tp = TensorParallel(context=self.context)
        self.module = Gpt(resolved.model, train.seed, tp, Techniques.of(resolved.engine, train)).to(device)
        self._model = self.module
        # In bf16 and fp16 the optimizer updates fp32 masters, which collect the gradients.
        self._masters = MasterWeights(self.module.parts(), half) if half else None
        self._parameters = self._masters.masters if self._masters else list(self.module.parameters())
        shares = [whole_share(one, resolved.model) for one in self._parameters]
        self._optimizer = build_optimizer(resolved, self._parameters, shares)
        compile_model(self.module, resolved.engine)
        # All ranks have the whole gradient: the first one's is measured.
        self._counted = self._parameters if dist.get_rank() == 0 else []
        self._states = TorchStates(self._parameters, shares, self._optimizer, lambda share: dist.get_rank() == 0)

    def _accumulation(self, is_last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def _complete_gradients(self) -> None:
        ranks = self._resolved.layout.data_ranks
        for gradient in gradients_of(self._parameters) if ranks > 1 else []:
            dist.all_reduce(gradient)
            gradient /= ranks

    def _finish_update(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        self._weights_are_loaded()

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()


build = PlainTorch
