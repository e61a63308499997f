"""How long a phase may last, by what the attempt has seen and by the floor; and the verdict over all heartbeats."""

import bisect
import itertools
from dataclasses import replace

import pytest

from hpc_gpt.core.processes.heartbeats import RankHeartbeat
from hpc_gpt.trainer.supervision.heartbeat import (
    COMPILING,
    EVALUATING,
    LEAVING,
    SAVING,
    STARTING,
    TRAINING,
    HangVerdict,
    Heartbeat,
    LastHeartbeat,
    judge_heartbeats,
    next_watch_s,
)

HOUR = 3600.0


@pytest.fixture
def heart(monkeypatch: pytest.MonkeyPatch) -> Heartbeat:
    """A heart of the defaults, whose steps take 20 s but for two first ones of 200 s; evaluations take 100 s."""
    now = [0.0]
    monkeypatch.setattr("hpc_gpt.trainer.supervision.heartbeat.time.monotonic", lambda: now[0])
    heart = Heartbeat(20.0, 300.0)
    heart.tick = lambda seconds: now.__setitem__(0, now[0] + seconds)
    return heart


def steps(heart: Heartbeat, first: int, last: int, seconds: float) -> None:
    for step in range(first, last + 1):
        heart.enter(TRAINING)
        heart.tick(seconds)
        heart.stepped(step)


def test_start_up_and_the_first_steps_which_compile_have_an_hour(heart: Heartbeat) -> None:
    assert (heart.phase, heart.limit_s()) == (STARTING, HOUR)
    heart.enter(TRAINING)
    assert (heart.phase, heart.limit_s()) == (COMPILING, HOUR)
    steps(heart, 1, 1, 200.0)
    assert (heart.phase, heart.limit_s()) == (COMPILING, HOUR)
    steps(heart, 2, 2, 200.0)
    assert (heart.phase, heart.limit_s()) == (TRAINING, HOUR), "nothing tells yet what a step takes"


def test_a_step_has_20_medians_and_300_s_at_least(heart: Heartbeat) -> None:
    steps(heart, 1, 2, 200.0)
    steps(heart, 3, 12, 20.0)
    assert heart.limit_s() == 400.0
    steps(heart, 13, 100, 0.1)
    assert heart.limit_s() == 300.0
    heart.multiple = 0.0
    assert heart.limit_s() == 0.0, "for ever"


def test_an_evaluation_has_an_hour_then_20_of_the_longest(heart: Heartbeat) -> None:
    steps(heart, 1, 10, 1.0)
    heart.enter(EVALUATING, as_steps=400)
    assert heart.limit_s() == 20 * 400, "as many steps as it has batches"
    heart.tick(100.0)
    steps(heart, 11, 12, 1.0)
    assert heart.limit_s() == 300.0, "no step holds it"
    heart.enter(EVALUATING, as_steps=4)
    assert heart.limit_s() == 2000.0


def test_saves_and_the_leaving_have_an_hour_or_more(heart: Heartbeat) -> None:
    steps(heart, 1, 10, 1.0)
    for seconds, limit in ((600.0, HOUR), (1.0, 20 * 600.0)):
        heart.enter(SAVING)
        assert heart.limit_s() == limit
        heart.tick(seconds)
        steps(heart, 11, 11, 1.0)
    heart.enter(LEAVING)
    assert heart.limit_s() == HOUR


def test_however_low_the_floor_a_save_has_a_minute() -> None:
    heart = Heartbeat(20.0, 0.0)
    steps = [heart.stepped(step) for step in range(1, 9)]
    assert len(steps) == 8
    heart.enter(SAVING)
    assert heart.limit_s() == 60.0


def test_steps_that_come_several_at_a_time_are_counted_each(heart: Heartbeat) -> None:
    for step in range(10, 100, 10):
        heart.tick(200.0)
        heart.stepped(step, count=10)
    assert heart.limit_s() == 20 * 20.0 + 9 * 20.0


def test_collectives_are_more_patient_than_the_watch() -> None:
    for floor_s in (1.0, 300.0, 3600.0):
        heart = Heartbeat(20, floor_s)
        assert heart.patience_s > heart.limit_s()
        assert heart.patience_s == Heartbeat(0, floor_s).patience_s


STUCK = RankHeartbeat(0, "n1", 1, 9, 17, "training", 320.0, 300.0, 0.0, True, "all_reduce", "loop.py:96 in run")


def seen(*changes: dict[str, object], unchanged: dict[int, float] | None = None) -> dict[int, LastHeartbeat]:
    return {
        rank: LastHeartbeat(
            replace(STUCK, rank=rank, host=f"n{1 + rank // 2}", **change), (unchanged or {}).get(rank, 0.0)
        )
        for rank, change in enumerate(changes)
    }


def test_nobody_is_judged_while_one_that_lives_may_be_at_work() -> None:
    everyone = [{}, {}, {}, {}]
    assert judge_heartbeats(seen(*everyone), 33, 320) is not None
    for change in (
        {"quiet_s": 299.0},  # a step not long ago
        {"phase": "evaluating", "limit_s": 3600.0},  # an evaluation that the others wait for
        {"phase": "saving", "limit_s": 3600.0},
        {"limit_s": 0.0},  # a rank that is never one
    ):
        assert judge_heartbeats(seen(*everyone[:3], change), 33, 320) is None, change


@pytest.mark.parametrize("size", [1, 4, 16, 100, 1000])
def test_ranks_that_come_to_no_verdict_watch_in_turns(size: int) -> None:
    """No storm of all ranks on the disk, and yet somebody watches soon."""
    silent_s = 33.0
    begun: list[float] = []
    for rank in range(size):
        at, watches = 0.0, 0
        while (at := at + next_watch_s(rank, size, watches, silent_s)) < 40 * silent_s * max(1, size / 4):
            begun.append(at)
            at, watches = at + silent_s, watches + 1
    begun.sort()
    assert begun[0] == 0
    at_once = [bisect.bisect(begun, at) - bisect.bisect_left(begun, at - silent_s) for at in begun]
    # The first ones may follow each other closely, as none before may live; all of a small run may.
    assert max(at_once) <= 40
    late = begun[len(begun) // 2 :]
    assert max(at_once[len(begun) // 2 :]) <= 16
    assert max(after - before for before, after in itertools.pairwise(late)) <= 3 * silent_s
    assert max(next_watch_s(rank, size, 1, silent_s) for rank in range(size)) <= 1.5 * silent_s


READS, SPINS = {"step": 16, "collective": "", "place": "data.py:9 in read"}, {"collective": "", "place": "x.py:1 in f"}
SAVES, IN = {"phase": "saving"}, "all_reduce after step 17 (loop.py:96 in run)"


@pytest.mark.parametrize(
    ("changes", "silent", "rank", "node", "words"),
    [
        # Those that do not beat, with their node if it is one, and what the others wait in.
        (({}, {}, {}, {"step": 16}), (3,), 3, "n2",
         f"rank 3 on n2 is silent, last seen after step 16; ranks 0-2 wait in {IN}"),
        (({}, {}, SAVES, {}), (2, 3), 2, "n2",
         f"ranks 2, 3 on n2 are silent, last seen after step 17, saving; ranks 0, 1 wait in {IN}"),
        (({}, {}, {}, {}), (1, 3), 1, None,
         f"ranks 1, 3 on n1, n2 are silent, last seen after step 17; ranks 0, 2 wait in {IN}"),
        (({}, {}, None), (2,), 2, None, f"rank 2 is silent from the start; ranks 0, 1 wait in {IN}"),
        (({},), (0,), 0, "n1", "rank 0 on n1 is silent, last seen after step 17"),
        ((SPINS, {}), (1,), 1, "n1", "rank 1 on n1 is silent, last seen after step 17; rank 0 at x.py:1 in f"),
        # If all live, those behind, in steps or in a step, else those in no collective.
        (({}, {}, READS, {}), (), 2, "n2", "rank 2 on n2 is behind, after step 16, others after step 17, at data.py:9 "
         f"in read; ranks 0, 1, 3 wait in {IN}"),
        ((READS, {}, {**READS, "place": ""}, SAVES), (), 0, None, "ranks 0, 2 on n1, n2 are behind, after step 16, "
         f"others after step 17, saving, at data.py:9 in read; ranks 1, 3 wait in {IN}"),
        ((SAVES, SAVES, {}), (), 2, "n2", "rank 2 on n2 is behind, after step 17, others after step 17, saving, at "
         "loop.py:96 in run; ranks 0, 1 wait in all_reduce after step 17, saving (loop.py:96 in run)"),
        (({}, SPINS, {}, {}), (), 1, "n1", "rank 1 on n1 is in no collective, after step 17, at x.py:1 in f; ranks 0, "
         f"2, 3 wait in {IN}"),
        (({}, {"collective": "broadcast"}, {}), (), None, None, f"ranks 0, 2 wait in {IN}"),
    ],
)  # fmt: skip
def test_who_is_at_fault_and_what_the_others_do(changes, silent, rank, node, words) -> None:
    found = seen(*(change or {} for change in changes), unchanged=dict.fromkeys(silent, 33.0))
    found |= {number: LastHeartbeat(None, 0.0) for number, change in enumerate(changes) if change is None}
    late = [*silent] or ([] if rank is None else [0, 2] if rank == 0 else [rank])
    cause = f"no rank made a step for 320 s; {words}; of {late}"
    assert judge_heartbeats(found, 33, 320, lambda late: f"of {late}") == HangVerdict(cause, rank, node, silent)
