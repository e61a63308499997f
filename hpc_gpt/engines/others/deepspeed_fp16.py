"""DeepSpeed in fp16, and in bf16 before BF16_Optimizer: ZeRO-0 2 + 2 + 12, in the step 4 more; ZeRO-1 4 + 12/dp, in the
step 4/dp more; ZeRO-2 2 + 14/dp; ZeRO-3 16/dp (Rajbhandari et al. 2020, section 5; DeepSpeed
runtime/fp16/fused_optimizer.py and runtime/zero).

Buckets have DeepSpeed's default sizes, or fewer elements if there are no more parameters; h^2 under ZeRO-3 (Hugging
Face's "auto" and DeepSpeed's own examples).
"""

from hpc_gpt.engines.base.ds_config import PREFETCH_ELEMENTS
from hpc_gpt.engines.base.states import StateBytes, States, zero_states
from hpc_gpt.engines.base.training import Training

# reduce_bucket_size and allgather_bucket_size by DeepSpeed's default.
BUCKET_ELEMENTS = 5e8


class DeepspeedFp16(States):
    def state_bytes(self, training: Training) -> StateBytes:
        width = 4 if training.dtype == "fp32" else 2
        return zero_states(training, width, width, 4)

    def buckets(self, training: Training, params: float) -> float:
        if training.zero_stage == 0:
            return 0.0
        width = 2 if training.dtype != "fp32" else 4
        if training.zero_stage == 3:
            return width * (2 * min(float(training.shape.hidden) ** 2, params) + min(PREFETCH_ELEMENTS, params))
        # ZeRO-2 fills one while the other is being reduced.
        return width * min(BUCKET_ELEMENTS, params) * (2 if training.zero_stage == 2 else 1)


STATES = DeepspeedFp16()
