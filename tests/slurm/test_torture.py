"""`make torture` in short: runs broken in different ways, side by side with one that is left alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.slurm.cluster import Cluster
from tests.torture.campaign import break_one, unbroken
from tests.torture.order import Planned

# Of tp2 x pp2 alone. None of them touches a daemon of the cluster, which other tests use as well.
RANKS, NODES = 4, 2
FAULTS = (
    Planned(1, "kill-during-a-save", 11, NODES, salt=1),
    Planned(2, "flip-a-bit-in-the-newest-checkpoint", 13, NODES, salt=2),
    Planned(3, "scancel-signal-usr2", 8, NODES, salt=3),
    Planned(4, "two-requeues-at-once", 17, NODES, salt=4),
)


def test_broken_runs_end_as_the_unbroken_one(small: Cluster, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1 + len(FAULTS)) as pool:
        alone = pool.submit(unbroken, small, tmp_path / "unbroken", "low", NODES, RANKS)
        broken = [
            pool.submit(break_one, small, tmp_path / fault.kind, "low", fault, alone.result, RANKS) for fault in FAULTS
        ]
        verdicts = [run.result() for run in broken]
    assert all(verdict.ok for verdict in verdicts), "\n".join(verdict.line() for verdict in verdicts)
    assert [verdict.ended[-1] for verdict in verdicts] == ["done"] * len(FAULTS)
