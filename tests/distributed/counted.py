"""How many parameters the ranks of an engine count together."""

from typing import Any

import torch
import torch.distributed as dist

from hpc_gpt.trainer.train.engines.optimizer import owned
from hpc_gpt.trainer.train.engines.protocol import TorchEngine


def count_parameters(engine: Any) -> int:
    """Parameters of the whole model, a tied embedding once. Collective."""
    if isinstance(engine, TorchEngine):
        return sum(parameter.numel() for parameter in engine._parameters)
    # Under ZeRO-3 a rank holds only a piece of each parameter.
    own = owned(engine.module.parameters(), engine.tp_rank)
    total = torch.tensor(sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in own))
    dist.all_reduce(total)
    return int(total) // engine._resolved.layout.data_ranks
