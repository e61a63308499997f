"""SGD without momentum, by torch."""

from collections.abc import Mapping

from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.settings.experiment import Train


class Sgd(OptimizerFacts):
    keys = frozenset({"weight_decay"})

    def megatron_options(self, train: Train) -> Mapping[str, object]:
        return {"--optimizer": "sgd", "--sgd-momentum": 0.0}


OPTIMIZER = Sgd()
