"""`make torture` in short: runs broken in different ways, side by side with one that is left alone."""

import pytest

from tests.slurm.stories import Story, Teller, story
from tests.torture import campaign
from tests.torture.campaign import Verdict, break_one
from tests.torture.order import Planned

# tp2 x pp2. No fault touches a daemon of the cluster, which other tests use too.
RANKS, NODES = 4, 2
FAULTS = [
    Planned(1, "kill-during-a-save", 11, NODES, salt=1),
    Planned(2, "flip-a-bit-in-the-newest-checkpoint", 13, NODES, salt=2),
    Planned(3, "scancel-signal-usr2", 8, NODES, salt=3),
    Planned(4, "two-requeues-at-once", 17, NODES, salt=4),
]


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


@pytest.mark.long
@pytest.mark.story(left_alone, *BROKEN)
def test_broken_runs_end_as_the_unbroken_one(told: Teller) -> None:
    verdicts = [told(each) for each in BROKEN]
    assert all(verdict.ok for verdict in verdicts), "\n".join(verdict.line() for verdict in verdicts)
    assert [verdict.ended[-1] for verdict in verdicts] == ["done"] * len(FAULTS)
