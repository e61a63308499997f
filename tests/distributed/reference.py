"""The plain process that trains what a case trains, once a session for each model and schedule."""

from dataclasses import replace
from functools import cache

from torch import Tensor

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.core.settings.resolved import Resolved
from hpc_gpt.trainer.model.gpt import Gpt
from hpc_gpt.trainer.model.tensor_parallel import full_name
from tests.distributed.equality_cases import EVALUATION, whole_batch
from tests.distributed.plain_gpt import PlainRun, train_plainly


def reference(resolved: Resolved, steps: int | None = None, idle: int = 0, noise: int = 0) -> PlainRun:
    """Its steps in one plain PyTorch process, or so many, in fp32 whatever the dtype; see `train_plainly`."""
    train = replace(resolved.train, dtype="fp32", optimizer_mode=None)
    return _reference(resolved.model, train, steps or train.steps, resolved.data.end_token, idle, noise)


@cache
def _reference(shape: ModelShape, train: Train, steps: int, end: int | None, idle: int, noise: int) -> PlainRun:
    batches = [whole_batch(step, end, shape.seq) for step in range(steps)]
    initial = initial_weights(shape, train.seed)
    evaluation = whole_batch(EVALUATION, end, shape.seq)
    return train_plainly(shape, train, initial, batches, evaluation, end=end, idle=idle, noise=noise)


@cache
def initial_weights(shape: ModelShape, seed: int) -> dict[str, Tensor]:
    return {full_name(parameter): parameter.detach() for parameter in Gpt(shape, seed).parameters()}
