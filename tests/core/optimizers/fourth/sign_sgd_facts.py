"""signSGD (Bernstein et al. 2018): each weight moves by the learning rate, against its gradient's sign."""

from hpc_gpt.core.optimizers import OptimizerFacts


class SignSgd(OptimizerFacts):
    keys = frozenset({"weight_decay"})


OPTIMIZER = SignSgd()
