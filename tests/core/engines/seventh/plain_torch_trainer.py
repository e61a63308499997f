"""Engine plain-torch: the whole model on every rank, and an all-reduce a gradient after the last micro-batch."""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.checkpoints.torch_states import TorchStates, whole_share
from hpc_gpt.trainer.engines.kernels import compile_model
from hpc_gpt.trainer.engines.master_weights import HALF, MasterWeights
from hpc_gpt.trainer.engines.optimizer import Update, gradients_of, norms_of
from hpc_gpt.trainer.engines.protocol import TorchEngine
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
        optimizer = build_optimizer(resolved, self._parameters, shares)
        compile_model(self.module, resolved.engine)
        self._update = Update(
            optimizer, lambda: norms_of(gradients_of(self._parameters)), None, train.clip, self._scaler, device
        )
        self._states = TorchStates(self._parameters, shares, optimizer, lambda share: dist.get_rank() == 0)

    def _gradients(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext()

    def _update_weights(self, lr: float) -> tuple[Tensor, Tensor]:
        ranks = self._resolved.layout.data_ranks
        for gradient in gradients_of(self._parameters) if ranks > 1 else []:
            dist.all_reduce(gradient)
            gradient /= ranks
        updated = self._update.apply(lr)
        for parameter in self._parameters:
            parameter.grad = None
        self._weights_are_loaded()
        return updated

    def _weights_are_loaded(self) -> None:
        if self._masters is not None:
            self._masters.copy_back()


build = PlainTorch
