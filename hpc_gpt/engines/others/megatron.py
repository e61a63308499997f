"""Megatron-LM as others run it: as our engine of that name does, and an update that is counted whole."""

from hpc_gpt.engines.base.states import StateBytes, States
from hpc_gpt.engines.base.training import Training
from hpc_gpt.engines.megatron_lm import one_gradient_buffer


class Megatron(States):
    def state_bytes(self, training: Training) -> StateBytes:
        return one_gradient_buffer(training)


STATES = Megatron()
