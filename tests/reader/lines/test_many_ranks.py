"""One log of many ranks, in blocks: of each its memory, of the last stage the loss."""

import random
from itertools import product

from tests.reader.lines.test_blocks import assert_same

TITAN = (
    "[rank{rank}]:[titan] 2025-07-21 15:57:43,242 - root - INFO - step: {step:2}  loss: {loss:7.4f}  grad_norm:  2.5000"
    "  memory: {gib:5.2f}GiB(50.50%)  tps: 3,500  tflops: 3.59  mfu: 0.36%"
)
RANKS = 8


def of_all_ranks(stages: int, steps: int = 40, shuffled: int | None = None) -> str:
    """Lines of a pipeline whose last stage alone knows the loss; the peaks rise, each rank's its own way."""
    each = RANKS // stages
    found = []
    for step in range(1, steps + 1):
        lines = [
            TITAN.format(
                rank=rank,
                step=step,
                loss=10 - step / 10 if rank >= RANKS - each else -1.0,
                gib=40 + rank + (step >= 20) * (rank % 3),
            )
            for rank in range(RANKS)
        ]
        if shuffled is not None:
            random.Random(shuffled + step).shuffle(lines)
        found += lines
    return "\n".join(found) + "\n"


def test_blocks_say_so_too():
    for stages, size, shuffled in product([1, 2, 4], [1, 3000, 1_000_000], [None, 0, 1]):
        assert_same(of_all_ranks(stages, shuffled=shuffled), size)
