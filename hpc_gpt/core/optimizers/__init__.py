"""The optimizers: one module each, with an `OPTIMIZER`. A new module is found by being here; its file gives its name.

`trainer/optimizers/` has a module of the same name, which makes the torch optimizer.
"""

import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import ClassVar

from hpc_gpt.core.settings.experiment import Train


class OptimizerFacts:
    """The facts about an optimizer, without torch, with the answers of one that keeps no states."""

    name: ClassVar[str]
    keys: ClassVar[frozenset[str]] = frozenset()  # the keys of [train] that it follows, of those that not all follow
    needs_shares: ClassVar[bool] = False  # whether it updates whole matrices, on the GPU, from shares that it is given

    def __init_subclass__(cls) -> None:
        """Names the class by its module."""
        cls.name = cls.__module__.rpartition(".")[2].replace("_", "-")

    def moment_bytes(self, hidden: float) -> float:
        """Bytes of its fp32 states per parameter, if `hidden` is the share of the layers' matrices among these."""
        return 0.0

    def moved_bytes(self, mode: str, hidden: float) -> float:
        """Bytes per parameter that an update reads and writes in a step with the norm, counted by hand.

        It reads fp32 master weight, states and gradient, writes the first two, and 2 for the 16-bit weight; then reads
        and writes the gradient for its norm and scale.
        """
        return 2 * (4 + self.moment_bytes(hidden)) + 4 + 2 + 2 * 4

    def update_cost(self, size: int, matrices: Sequence[tuple[int, int, int]]) -> float:
        """The time of the update of a parameter of `size` numbers, but for a factor; `matrices`: the hidden ones in it,
        (number of them, rows, columns)."""
        return size

    def product_sizes(self, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """(m, n, k) of each matrix product in a step, of `train.muon_steps`, of a hidden matrix's update."""
        return []

    def stack_bytes(self, width: int, matrices: int, rows: int, columns: int) -> float:
        """Bytes of the temporaries of equal hidden matrices that are updated together, in numbers of `width` bytes."""
        return 0.0

    def update_bytes(self, mode: str, params: float, matrix: float, table: float) -> float:
        """Bytes of the update's temporaries, by torch 2.13's AdamW (torch/optim/adam.py): fused kernels keep everything
        in registers. foreach computes the square roots of all second moments at once, 4 bytes each. for-loop does so
        one tensor at a time, twice (root and quotient), while the previous tensor still has its own.

        `params`: those that the rank updates; `matrix`, `table`: as in `States.update_bytes`. Measured with torch's
        profiler on a CPU, to within 1 % of the bytes per parameter: ddp in bf16 18 fused, 22 foreach.
        """
        if mode == "foreach":
            return 4 * params
        return 4 * max(3 * matrix, 2 * table) if mode == "for-loop" else 0.0

    def megatron_options(self, train: Train) -> Mapping[str, object] | None:
        """Megatron-LM's options for it; None if Megatron-LM does not have it."""
        return None


@cache
def optimizer_named(name: str) -> OptimizerFacts:
    """The optimizer of that name; an experiment's name always exists. The others are not imported."""
    facts: OptimizerFacts = importlib.import_module(f"{__name__}.{name.replace('-', '_')}").OPTIMIZER
    return facts
