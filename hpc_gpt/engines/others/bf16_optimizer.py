"""DeepSpeed's BF16_Optimizer as others run it: 2 + (2 + 4) + 12/dp (DeepSpeed runtime/bf16_optimizer.py)."""

from hpc_gpt.engines.base.states import StateBytes, States
from hpc_gpt.engines.base.training import Training
from hpc_gpt.engines.others.deepspeed_fp16 import BUCKET_ELEMENTS


class Bf16Optimizer(States):
    def state_bytes(self, training: Training) -> StateBytes:
        return StateBytes(2, 6, 12 / training.dp, 6, 2)

    def buckets(self, training: Training, params: float) -> float:
        return 4 * min(BUCKET_ELEMENTS, params)


STATES = Bf16Optimizer()
