"""Megatron-LM 2.4 in fp16: 2 + 2 + 12, in the step 6 more.

They are fp32 copies of the fp16 gradients, freed before the next step's first gradient, and a flat copy for the
all-reduce (planner README: 20 after a step, 22 peak).
"""

from hpc_gpt.engines.base.states import StateBytes, States
from hpc_gpt.engines.base.training import Training


class Megatron2021Fp16(States):
    def state_bytes(self, training: Training) -> StateBytes:
        return StateBytes(2, 2, 12, 8, 6)


STATES = Megatron2021Fp16()
