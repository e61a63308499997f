"""`make torture` in short: runs broken in different ways, side by side with one that is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import ALL_TESTS
from tests.slurm.cluster import Cluster
from tests.slurm.launcher import Launcher
from tests.slurm.stories import Story, Teller, story
from tests.torture import campaign
from tests.torture.campaign import Verdict, break_one
from tests.torture.order import Planned
from tests.torture.site import make_launcher

# tp2 x pp2 with ALL_TESTS, else two stages alone. No fault touches a daemon of the cluster, which other tests use too.
RANKS, NODES = (4 if ALL_TESTS else 2), 2
FAULTS = [
    Planned(1, "kill-during-a-save", 11, NODES, salt=1),
    Planned(2, "flip-a-bit-in-the-newest-checkpoint", 13, NODES, salt=2),
]
if ALL_TESTS:  # one rank is signalled so in test_chain, and requeued twice in test_causes
    FAULTS += [
        Planned(3, "scancel-signal-usr2", 8, NODES, salt=3),
        Planned(4, "two-requeues-at-once", 17, NODES, salt=4),
    ]


def make_smaller(cluster: Cluster, folder: Path, partition: str, nodes: int, ranks: int = 8) -> Launcher:
    """The launcher of `make torture`, which knows no layout of two ranks."""
    launcher = make_launcher(cluster, folder, partition, nodes, ranks)
    if ranks == 2:
        text = launcher.experiment.read_text()
        # A wider model, as a save is to take long enough to be seen.
        launcher.experiment.write_text(text.replace("tp = 2", "tp = 1").replace("hidden = 32", "hidden = 128"))
    return launcher


campaign.make_launcher = make_smaller


@story
def left_alone(teller: Teller) -> dict[int, float]:
    """Step -> loss of the run that nobody breaks."""
    return campaign.unbroken(teller.cluster, teller.launcher.folder / "left-alone", "low", NODES, RANKS)


def broken(fault: Planned) -> Story[Verdict]:
    """The story of a run that the fault breaks, on nodes of its own: it waits until they are idle again."""

    def tell(teller: Teller) -> Verdict:
        folder = teller.launcher.folder / fault.kind
        return break_one(teller.cluster, folder, f"lane{fault.number}", fault, lambda: teller(left_alone), RANKS)

    return story(tell)


BROKEN = [broken(fault) for fault in FAULTS]


if ALL_TESTS:  # it failed twice in whole runs on a busy machine, not alone: to be understood before it is in each run

    @pytest.mark.story(left_alone, *BROKEN)
    def test_broken_runs_end_as_the_unbroken_one(told: Teller) -> None:
        verdicts = [told(each) for each in BROKEN]
        assert all(verdict.ok for verdict in verdicts), "\n".join(verdict.line() for verdict in verdicts)
        assert [verdict.ended[-1] for verdict in verdicts] == ["done"] * len(FAULTS)
