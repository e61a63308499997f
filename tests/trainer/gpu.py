"""What the tests on a GPU share."""

from typing import Any

import pytest
import torch

from hpc_gpt.core.settings.resolved import Resolved
from tests.distributed.equality_cases import micro_batches

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    pytest.mark.usefixtures("fresh"),
]
# Largest difference of a loss from the plain process's in fp32, by dtype. fp32 has no TF32.
NEAR = {"fp32": 2e-5, "bf16": 2e-2, "fp16": 5e-3}


def train(engine: Any, resolved: Resolved, steps: range) -> list[float]:
    """The losses of the steps, none of which may be skipped."""
    losses = []
    for step in steps:
        here = torch.device("cuda", 0)
        pairs = [tuple(part.to(here) for part in micro_batch) for micro_batch in micro_batches(resolved, 0, step)]
        result = engine.train_step(iter(pairs))
        assert not bool(result.skipped), f"step {step}"
        losses.append(float(result.loss))
    return losses
