"""One log of many ranks: of each its memory, of the last stage the loss; and a batch that grows in many steps."""

import random
from itertools import product

import pytest

from tests.readers.logs.test_blocks import MEGATRON, assert_same
from tests.readers.reading import read_lines

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


STAGES = [1, 2, 4]


@pytest.mark.parametrize("stages", STAGES)
def test_every_rank_has_its_peak_and_the_last_stage_the_loss(stages):
    (part,) = read_lines("log", of_all_ranks(stages).splitlines())
    assert {rank: memory.reserved_gib for rank, memory in part.memory.items()} == {
        rank: 40 + rank + rank % 3 for rank in range(RANKS)
    }
    steps = part.steps["torchtitan"]
    assert steps["loss"].tolist() == pytest.approx([10 - step / 10 for step in range(1, 41)])
    assert (steps.count, sum(part.left_out.values())) == (40, 40 * (RANKS - 1))


def test_blocks_say_so_too():
    for stages, size, shuffled in product(STAGES, [1, 3000, 1_000_000], [None, 0, 1]):
        assert_same(of_all_ranks(stages, shuffled=shuffled), size)


@pytest.mark.parametrize("batches", [range(192, 2049, 16), [4, 8, 16, 2, 32, 5, 6, 7, 9, 300, 11, *range(100, 140), 1]])
def test_the_largest_of_many_batches_is_known(batches):
    lines = [
        MEGATRON.format(step=step, ms=2000.0, loss="3.28E+01", skipped=0, batch=batch)
        for step, batch in enumerate(batches, 1)
    ]
    (part,) = read_lines("log", lines)
    values = [fact.value for fact in part.facts["global_batch"]]
    assert (len(values), values[:7], values[-1]) == (8, list(batches)[:7], max(batches))
    for size in (1, 3000, 1_000_000):
        assert_same("\n".join(lines) + "\n", size)
