"""What a prediction says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class StageMemory:
    """GiB of one GPU of a pipeline stage. `allocated` is the peak, the sum of the parts before it."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    buffers: float
    reserved: float
    nvidia_smi: float
    host: float = 0.0  # offloaded, of one GPU's share

    @property
    def allocated(self) -> float:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits + self.buffers


@dataclass(frozen=True)
class Memory:
    """Every stage, first to last."""

    stages: Sequence[StageMemory]

    @property
    def deciding(self) -> int:
        """The stage that needs most."""
        return max(range(len(self.stages)), key=lambda stage: self.stages[stage].nvidia_smi)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one optimizer step: the parts sum up to `step_s`. `dp_s` is what nothing hides.

    `band` is the relative half width of the range that the true time is expected in.
    """

    compute_s: float
    recompute_s: float
    tp_s: float
    bubble_s: float
    p2p_s: float
    dp_s: float
    optimizer_s: float
    offload_s: float
    band: float

    @property
    def step_s(self) -> float:
        return (
            self.compute_s
            + self.recompute_s
            + self.tp_s
            + self.bubble_s
            + self.p2p_s
            + self.dp_s
            + self.optimizer_s
            + self.offload_s
        )
