"""What a main thread's stack says of where it waits, and what the ranks' flight recorders say together.
And how long a rank may stand still.
"""

import itertools
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpc_gpt.core.runs.run_folder import RunFolder
from hpc_gpt.trainer.supervision import watchdog as module
from hpc_gpt.trainer.supervision.heartbeat import Heartbeat
from hpc_gpt.trainer.supervision.stacks import Frame, find_open_collective, find_wait, main_frames
from hpc_gpt.trainer.supervision.watchdog import Watchdog


def test_where_a_main_thread_stands() -> None:
    c10d = "/v/site-packages/torch/distributed/distributed_c10d.py"
    ours = Frame("/r/hpc_gpt/trainer/loop.py", 96, "run")
    assert find_wait([Frame(c10d, 1, "all_reduce"), Frame("/v/deepspeed/comm.py", 2, "all_reduce"), ours]) == (
        "all_reduce",
        "loop.py:96 in run",
    )
    words = Frame("/r/hpc_gpt/trainer/ranks.py", 79, "finish")
    assert find_wait([words, ours]) == ("the all_reduce of a step's reports", "ranks.py:79 in finish")
    rows = Frame("/r/hpc_gpt/trainer/model/dispatch.py", 56, "route")  # on a GPU: it waits for the numbers of rows
    assert find_wait([rows, ours]) == ("the all_to_all of rows for experts", "dispatch.py:56 in route")
    assert find_wait([Frame("/r/mine.py", 5, "spin"), ours]) == ("", "mine.py:5 in spin")
    assert find_wait([]) == ("", "")


def test_the_main_thread_of_a_dump_is_its_last() -> None:
    dump = """Timeout (0:00:03)!
Thread 0x00007f051bfff6c0 (most recent call first):
  File "/r/hpc_gpt/trainer/supervision/watchdog.py", line 98 in _run

Thread 0x00007f0551fc1b80 (most recent call first):
  File "/r/a path/mine.py", line 5 in spin
  File "/r/hpc_gpt/trainer/loop.py", line 96 in run
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


def test_a_recorded_flight_names_the_collective_and_who_lacks() -> None:
    """In the shape of torch 2.10's records of NCCL's groups; a rank numbers its groups by itself."""
    world, dp = ("0", "default_pg"), ("3", "dp")
    ahead = record(entry(812, True, 0, world), entry(41, False, 1, dp), pg0=812, pg1=41)
    behind = record(entry(812, True, 0, world), entry(40, True, 2, dp), pg0=812, pg2=40)
    assert find_open_collective({0: ahead, 1: ahead, 2: behind}) == (
        "flight recorder: nccl:all_reduce 41 of group dp, sizes [[34688]], is open on ranks 0, 1; rank 2 is at 40"
    )
    assert find_open_collective({0: record(entry(812, True, 0, world), pg0=812)}) == ""
    receiving = record(entry(5, False, 0, world, is_p2p=True, profiling_name="nccl:recv 0<-1"))
    assert find_open_collective({0: receiving}) == "flight recorder: nccl:recv 0<-1 is open on rank 0"


def test_a_silent_rank_is_in_what_late_ranks_wait_in() -> None:
    """Rank 1 has no record. Rank 3 waits for it, and rank 2 for rank 3."""
    tp, dp = ("7", "tp"), ("11", "dp")
    two = record(entry(684, False, 3, tp), pg3=684)
    three = record(entry(683, True, 3, tp), entry(412, False, 4, dp), pg3=683, pg4=412)
    of_two = "flight recorder: nccl:all_reduce 684 of group tp, sizes [[34688]], is open on rank 2; rank 3 is at 683"
    assert find_open_collective({2: two, 3: three}) == of_two
    of_three = "flight recorder: nccl:all_reduce 412 of group dp, sizes [[34688]], is open on rank 3"
    assert find_open_collective({2: two, 3: three}, some_silent=True) == of_three


def test_a_record_of_another_shape_says_nothing() -> None:
    for odd in ({}, {"entries": [{}]}, {"entries": [{"pg_id": 1, "process_group": 3}]}, {"entries": [None]}):
        assert find_open_collective({0: odd}) == ""


@pytest.mark.parametrize(("multiple", "hangs"), [(20.0, True), (0.0, False)])
def test_a_rank_still_for_a_day_hangs_unless_without_a_limit(tmp_path: Path, multiple, hangs) -> None:
    attempt = RunFolder(tmp_path).new_attempt()
    attempt.heartbeats.mkdir()
    watchdog = Watchdog(attempt, 0, 1, Heartbeat(multiple, 300.0), print)
    watchdog._awake_s = 86_400.0
    watchdog._turn()
    assert attempt.stacks.exists() is hangs


def test_days_in_which_it_was_stopped_are_no_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    attempt = RunFolder(tmp_path).new_attempt()
    attempt.heartbeats.mkdir()
    watchdog = Watchdog(attempt, 0, 1, Heartbeat(20.0, 300.0), print)
    clock, turns = itertools.count(step=86_400.0), iter([False, False, True])
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    monkeypatch.setattr(watchdog._over, "wait", lambda _: next(turns))
    watchdog._run()
    assert next(clock) == 3 * 86_400.0
    assert not attempt.stacks.exists()
