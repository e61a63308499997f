"""Plain PyTorch: every rank has the whole model, and averages its gradients by hand after the last micro-batch."""

from hpc_gpt.core.engines.base.facts import EngineFacts
from hpc_gpt.core.engines.base.training import StateBytes, Training, plain_states


class PlainTorch(EngineFacts):
    order = 70  # its place in lists; what is not given here is as in EngineFacts
    alternatives = {"sharded_optimizer": "use --engine ddp", "zero_stage": "use --engine deepspeed-zero"}
    axes = frozenset({"cp"})

    def rule(self, training: Training) -> str:
        return "fp32" if training.dtype == "fp32" else "masters"

    def state_bytes(self, training: Training) -> StateBytes:
        """fp32: 4 + 4 + 8. Else half weights, and in fp32 gradients, master weights and moments: 2 + 4 + 12."""
        return plain_states(training) if training.dtype == "fp32" else StateBytes(2, 4, 12, 4, 4)

    def copies_by_layer(self, training: Training) -> bool:
        return training.dtype != "fp32"

    def reduced_bytes(self, training: Training) -> float:
        return 4.0


ENGINE = PlainTorch()
