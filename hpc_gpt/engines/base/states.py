"""Bytes a parameter that a program holds: weights, gradients and optimizer states, in the passes and in the step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from hpc_gpt.engines.base.training import Training


@dataclass(frozen=True)
class StateBytes:
    """Bytes a parameter on one GPU.

    `gradients`: in the passes; `step_gradients`: in the optimizer step. `renewed`: freed and allocated again in every
    step, which leaves holes. `host`: offloaded to the host.
    """

    parameters: float
    gradients: float
    optimizer: float
    step_gradients: float
    renewed: float
    host: float = 0.0


class States:
    """How a program holds its states. The answers here are those of one that reduces without buckets."""

    name: ClassVar[str]
    # Whether layers of GPT-2's kind keep dropout masks.
    has_dropout: ClassVar[bool] = True
    synchronizations: ClassVar[float] = 1.0  # of a step, as a share of DeepSpeed's as its documentation sets it up

    def __init_subclass__(cls) -> None:
        """Its name is its module's."""
        cls.name = cls.__module__.rpartition(".")[2].replace("_", "-")

    def rule(self, training: Training) -> str:
        """The name of the way in which the states are held, as `plan --explain` prints it."""
        return self.name

    def state_bytes(self, training: Training) -> StateBytes:
        """Bytes a parameter that the training holds."""
        raise NotImplementedError

    def update_bytes(self, training: Training, params: float, matrix: float, table: float) -> float:
        """Bytes of the update's temporaries, in addition to StateBytes's; `params`: parameters of one GPU of the stage.

        `matrix`: parameters of a layer's largest matrix, of which two are updated in a row. `table`: parameters of the
        embedding, 0 if the stage has none.
        """
        return 0.0

    def buckets(self, training: Training, params: float) -> float:
        """Bytes of the buckets through which gradients are reduced; `params`: parameters of one GPU of the stage."""
        return 0.0

    def copies_by_layer(self, training: Training) -> bool:
        """Whether 16-bit gradients are copied a whole layer at a time, not a matrix."""
        return False

    def keeps_logits(self, training: Training) -> bool:
        """Whether logits are kept until the step."""
        return False

    def logit_bytes(self, training: Training) -> float:
        """Bytes of one logit at the peak of a backward pass."""
        raise NotImplementedError

    def lasting_bucket(self, training: Training) -> float:
        """Bytes of a bucket that is kept from step to step."""
        return 0.0


def zero_states(training: Training, weight: int, gradient: int, master: int) -> StateBytes:
    """ZeRO's stages, for so many bytes a parameter: optimizer over dp from stage 1 on, gradients from 2, weights in 3.

    The optimizer works on fp32 copies of its share of the gradients, which are allocated in the step and freed after
    it (Rajbhandari et al. 2020, section 5).
    """
    stage, dp = training.zero_stage, training.dp
    parameters = weight / dp if stage == 3 else float(weight)
    gradients = gradient / dp if stage >= 2 else float(gradient)
    optimizer = (master + 8) / (dp if stage >= 1 or training.sharded_optimizer else 1)
    copy = (4 / dp if stage >= 1 else 4.0) if gradient == 2 else 0.0
    host = 0.0
    if training.offload != "none" and stage >= 1:
        # The host has master weights, moments and fp32 gradients; under ZeRO-2 and -3 each gradient is sent at once.
        host, optimizer, copy = optimizer + 4 / dp, 0.0, 0.0
        gradients = 0.0 if stage >= 2 else gradients
        if training.offload == "full":
            host, parameters = host + parameters, 0.0
    return StateBytes(parameters, gradients, optimizer, gradients + copy, gradients + copy, host)


def plain_states(training: Training) -> StateBytes:
    """fp32 without anything shared but the optimizer: 4 + 4 + 8."""
    return zero_states(training, weight=4, gradient=4, master=0)
