"""AdamW (Loshchilov and Hutter 2019), by torch."""

from collections.abc import Mapping

from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.settings.experiment import Train


class AdamW(OptimizerFacts):
    keys = frozenset({"weight_decay", "beta1", "beta2", "eps"})

    def moment_bytes(self, hidden: float) -> float:
        return 8.0

    def moved_bytes(self, mode: str, hidden: float) -> float:
        """foreach and for-loop, instead of fused's 28: weight decay 8, first moment 12, second 8 + 12, root, quotient
        and sum with epsilon 8 each, weight 16; further launches are not counted."""
        return 80 + 2 + 2 * 4 if mode in ("foreach", "for-loop") else super().moved_bytes(mode, hidden)

    def megatron_options(self, train: Train) -> Mapping[str, object]:
        betas = {"--adam-beta1": train.beta1, "--adam-beta2": train.beta2}
        return {"--optimizer": "adam", **betas, "--adam-eps": train.eps}


OPTIMIZER = AdamW()
