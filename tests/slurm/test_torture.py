"""`make torture` in short: six faults of the day, each of a run of its own, beside one that is left alone."""

import os
from dataclasses import replace

import pytest

from bench.torture import campaign
from bench.torture.campaign import Verdict, break_one
from bench.torture.faults import EARLIEST, KINDS
from bench.torture.order import planned
from tests.slurm.cluster import LANES
from tests.slurm.stories import Story, Teller, story

RANKS, NODES = 2, 2
SEED = int(os.environ.get("CI_DAY", "2026-11-29").replace("-", ""))
# None takes away a daemon of the cluster, which other tests use too. Dead nodes are in test_runs, test_race and
# test_restarts_in_job.
MAY = sorted(name for name, kind in KINDS.items() if not kind.shared and not kind.small_disk)
FAULTS = [replace(fault, nodes=NODES) for fault in planned(MAY, SEED, 6, EARLIEST)]


@story
def left_alone(teller: Teller) -> dict[int, float]:
    """Step -> loss of the run that nobody breaks."""
    return campaign.unbroken(teller.cluster, teller.launcher.folder / "left-alone", "low", NODES, RANKS)


def broken(lane: int) -> Story[list[Verdict]]:
    """The story of the runs of a lane, one after the other: each waits until its nodes are idle again."""

    def tell(teller: Teller) -> list[Verdict]:
        return [
            break_one(
                teller.cluster,
                teller.launcher.folder / fault.kind,
                f"lane{lane + 1}",
                fault,
                lambda: teller(left_alone),
                RANKS,
            )
            for fault in FAULTS[lane::LANES]
        ]

    return Story(tell, first=True)


BROKEN = [broken(lane) for lane in range(LANES)]


@pytest.mark.long(always=True)
@pytest.mark.story(left_alone, *BROKEN)
def test_broken_runs_end_as_the_unbroken_one(told: Teller) -> None:
    verdicts = [verdict for each in BROKEN for verdict in told(each)]
    assert [verdict for verdict in verdicts if not verdict.ok] == [], "\n".join(each.line() for each in verdicts)
    assert [verdict.ended[-1] for verdict in verdicts] == ["done"] * len(FAULTS)
