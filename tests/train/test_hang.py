"""The verdict over the beats of all ranks, and what a stack and a flight recorder tell."""

from __future__ import annotations

import bisect
import itertools
from dataclasses import replace

import pytest

from hpc_gpt.runs.beats import Beat
from hpc_gpt.train.flight_recorder import stuck_in
from hpc_gpt.train.hang import Frame, Seen, judge, main_frames, next_watch_s, stands_at

STUCK = Beat(0, "n1", 1, 9, 17, "training", 320.0, 300.0, 0.0, True, "all_reduce", "loop.py:96 in run")


def seen(*changes: dict[str, object], unchanged: dict[int, float] | None = None) -> dict[int, Seen]:
    return {
        rank: Seen(replace(STUCK, rank=rank, host=f"n{1 + rank // 2}", **change), (unchanged or {}).get(rank, 0.0))
        for rank, change in enumerate(changes)
    }


def test_nobody_is_judged_while_one_that_lives_may_be_at_work() -> None:
    everyone = [{}, {}, {}, {}]
    assert judge(seen(*everyone), 33, 320) is not None
    for change in (
        {"quiet_s": 299.0},  # a step not long ago
        {"phase": "evaluating", "limit_s": 3600.0},  # an evaluation that the others wait for
        {"phase": "saving", "limit_s": 3600.0},
        {"limit_s": 0.0},  # a rank that is never one
    ):
        assert judge(seen(*everyone[:3], change), 33, 320) is None, change


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


def test_those_that_do_not_beat_are_named_with_their_node_and_what_the_others_wait_in() -> None:
    verdict = judge(seen({}, {}, {}, {"quiet_s": 0.0, "step": 16}, unchanged={3: 40.0}), 33, 320)
    assert verdict is not None
    assert (verdict.rank, verdict.node, verdict.silent) == (3, "n2", (3,))
    assert verdict.cause == (
        "no rank made a step for 320 s; rank 3 on n2 is silent, last seen after step 16; "
        "ranks 0-2 wait in all_reduce after step 17 (loop.py:96 in run)"
    )
    node = judge(seen({}, {}, {}, {}, unchanged={2: 40.0, 3: 40.0}), 33, 320)
    assert node is not None
    assert (node.rank, node.node) == (2, "n2")
    assert "ranks 2, 3 on n2 are silent" in node.cause
    both = judge(seen({}, {}, {}, {}, unchanged={1: 40.0, 3: 40.0}), 33, 320)
    assert both is not None
    assert (both.rank, both.node) == (1, None), "two nodes: neither is known to be at fault"


def test_a_rank_that_never_came_is_silent_from_the_start() -> None:
    found = {**seen({}, {}), 2: Seen(None, 40.0)}
    verdict = judge(found, 33, 320)
    assert verdict is not None
    assert (verdict.rank, verdict.node) == (2, None)
    assert "rank 2 is silent from the start" in verdict.cause


def test_where_all_live_the_one_behind_is_named_then_the_one_in_no_collective() -> None:
    behind = judge(seen({}, {}, {"step": 16, "collective": "", "place": "data.py:9 in read"}, {}), 33, 320, "flight")
    assert behind is not None
    assert (behind.rank, behind.node) == (2, "n2")
    assert "; rank 2 on n2 is behind, after step 16, others after step 17, at data.py:9 in read;" in behind.cause
    assert behind.cause.endswith("; flight")
    apart = judge(seen({}, {"collective": "", "place": "x.py:1 in spin"}, {}, {}), 33, 320)
    assert apart is not None
    assert (apart.rank, apart.node) == (1, "n1")
    assert "rank 1 on n1 is in no collective, after step 17, at x.py:1 in spin" in apart.cause
    saving = judge(seen({"phase": "saving"}, {"phase": "saving"}, {}, {"phase": "saving"}), 33, 320)
    assert saving is not None
    assert saving.rank == 2, "it has not come to the save that the others are in"
    nobody = judge(seen({}, {}, {}, {}), 33, 320)
    assert nobody is not None
    assert (nobody.rank, nobody.node) == (None, None)


def test_where_a_main_thread_stands() -> None:
    c10d = "/v/site-packages/torch/distributed/distributed_c10d.py"
    ours = Frame("/r/hpc_gpt/train/loop.py", 96, "run")
    assert stands_at([Frame(c10d, 1, "all_reduce"), Frame("/v/deepspeed/comm.py", 2, "all_reduce"), ours]) == (
        "all_reduce",
        "loop.py:96 in run",
    )
    words = Frame("/r/hpc_gpt/train/agreement.py", 79, "finish")
    assert stands_at([words, ours]) == ("the all_reduce of a step's words", "agreement.py:79 in finish")
    assert stands_at([Frame("/r/mine.py", 5, "spin"), ours]) == ("", "mine.py:5 in spin")
    assert stands_at([]) == ("", "")


def test_the_main_thread_of_a_dump_is_its_last() -> None:
    dump = """Timeout (0:00:03)!
Thread 0x00007f051bfff6c0 (most recent call first):
  File "/r/hpc_gpt/train/watchdog.py", line 98 in _run

Thread 0x00007f0551fc1b80 (most recent call first):
  File "/r/a path/mine.py", line 5 in spin
  File "/r/hpc_gpt/train/loop.py", line 96 in run
"""
    assert [str(frame) for frame in main_frames(dump)] == ["mine.py:5 in spin", "loop.py:96 in run"]


def entry(number: int, retired: bool, pg_id: int, group: tuple[str, str], **more: object) -> dict[str, object]:
    return {
        "frames": [{"name": "train_step", "filename": "ddp.py", "line": 99}],
        "record_id": number, "pg_id": pg_id, "process_group": list(group), "collective_seq_id": number, "p2p_seq_id": 0,
        "op_id": number, "profiling_name": "nccl:all_reduce", "time_created_ns": 1, "input_sizes": [[34688]],
        "state": "completed" if retired else "started", "retired": retired, "timeout_ms": 600000, "is_p2p": False,
        **more,
    }  # fmt: skip


def record(*entries: dict[str, object], **last: int) -> dict[str, object]:
    status = {number[2:]: {"last_enqueued_collective": begun} for number, begun in last.items()}
    return {"version": "2.10", "pg_status": status, "entries": list(entries)}


def test_a_recorded_flight_of_nccl_names_the_collective_and_who_has_not_begun_it() -> None:
    """In the shape of torch 2.10's records of NCCL's groups; a rank numbers its groups by itself."""
    world, dp = ("0", "default_pg"), ("3", "dp")
    ahead = record(entry(812, True, 0, world), entry(41, False, 1, dp), pg0=812, pg1=41)
    behind = record(entry(812, True, 0, world), entry(40, True, 2, dp), pg0=812, pg2=40)
    assert stuck_in({0: ahead, 1: ahead, 2: behind}) == (
        "flight recorder: nccl:all_reduce 41 of group dp, sizes [[34688]], is open on ranks 0, 1; rank 2 is at 40"
    )
    assert stuck_in({0: record(entry(812, True, 0, world), pg0=812)}) == ""
    receiving = record(entry(5, False, 0, world, is_p2p=True, profiling_name="nccl:recv 0<-1"))
    assert stuck_in({0: receiving}) == "flight recorder: nccl:recv 0<-1 is open on rank 0"


def test_a_record_of_another_shape_says_nothing() -> None:
    for odd in ({}, {"entries": [{}]}, {"entries": [{"pg_id": 1, "process_group": 3}]}, {"entries": [None]}):
        assert stuck_in({0: odd}) == ""
