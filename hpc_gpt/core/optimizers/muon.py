"""Muon (Jordan 2024; Liu et al. 2025, arXiv:2502.16982) for the hidden matrices, AdamW for all else."""

from collections.abc import Sequence

from hpc_gpt.core.optimizers import OptimizerFacts
from hpc_gpt.core.optimizers.adamw import OPTIMIZER as ADAMW

# AdamW's time for a number, as the rows of a square matrix whose numbers take Newton-Schulz as long.
_ADAMW_ROWS = 128


class Muon(OptimizerFacts):
    keys = ADAMW.keys | {"muon_lr", "muon_momentum", "muon_steps", "muon_dtype"}
    needs_shares = True

    def moment_bytes(self, hidden: float) -> float:
        return ADAMW.moment_bytes(hidden) * (1 - hidden) + 4 * hidden

    def moved_bytes(self, mode: str, hidden: float) -> float:
        """Bytes of a hidden matrix: momentum 12, Nesterov's input 12, decay 8, 16-bit copy and its norm 8, update 10
        and the 16-bit weight 2; then the gradient for its norm and scale. The products are counted apart."""
        return ADAMW.moved_bytes(mode, hidden) * (1 - hidden) + (12 + 12 + 8 + 8 + 10 + 2 + 2 * 4) * hidden

    def stack_bytes(self, width: int, matrices: int, rows: int, columns: int) -> float:
        """Two of the matrices, and one of their shorter sides squared."""
        return width * matrices * (2 * rows * columns + min(rows, columns) ** 2)

    def update_bytes(self, mode: str, params: float, matrix: float, table: float) -> float:
        """In 16 bits two of the matrix and two of its rows squared, which may be a quarter of it; or AdamW's."""
        return max(5 * matrix, ADAMW.update_bytes(mode, params, matrix, table))

    def update_cost(self, size: int, matrices: Sequence[tuple[int, int, int]]) -> float:
        if not matrices:
            return size * _ADAMW_ROWS
        return sum(count * rows * columns * min(rows, columns) for count, rows, columns in matrices)

    def product_sizes(self, rows: int, columns: int) -> list[tuple[int, int, int]]:
        """A step of Newton-Schulz: 2 r^2 (2 c + r) FLOPs, of r rows below c columns."""
        short, long = sorted((rows, columns))
        return [(short, short, long), (short, short, short), (short, long, short)]


OPTIMIZER = Muon()
