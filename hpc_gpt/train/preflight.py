"""The name by which job scripts start `preflight.rank`, which measures the device that a rank of the training gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpc_gpt.preflight.rank import start
from hpc_gpt.settings.resolved import Resolved
from hpc_gpt.supervision.meeting import RankIdentity

if TYPE_CHECKING:
    import torch


def _device_of(local: int, resolved: Resolved) -> torch.device:
    from hpc_gpt.train.ranks import choose_device  # torch loads after the rank's first line

    return choose_device(RankIdentity(local, resolved.gpus, local), resolved)


if __name__ == "__main__":
    start(_device_of)
