"""What a prediction says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


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
    """Every stage, first to last. `extremes`: the stages of which one needs most; all of them where it is None."""

    stages: Sequence[StageMemory]
    extremes: Sequence[int] | None = None

    @property
    def extreme_stages(self) -> list[StageMemory]:
        """The stages among which the largest of any figure is, so that a search need not look at all."""
        return [self.stages[stage] for stage in self._candidates]

    @cached_property
    def deciding(self) -> int:
        """The stage that needs most."""
        return max(self._candidates, key=lambda stage: (self.stages[stage].nvidia_smi, -stage))

    @property
    def _candidates(self) -> Sequence[int]:
        return range(len(self.stages)) if self.extremes is None else self.extremes


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
