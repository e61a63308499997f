"""Bytes that an action allocates on a CPU, by torch's profiler: it sees every allocation, also those in operators."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def profiled(action: Callable[[], Any]) -> list[Any]:
    """The profiler's events while the action runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    return list(profile.profiler.kineto_results.events())  # type: ignore[union-attr]


def profiled_whole(action: Callable[[], Any], tries: int = 20) -> list[Any]:
    """As `profiled`, of an action that leaves as many bytes as it found; where a free was not seen by a rank, all ranks
    do it again.

    gloo's thread, where it is the last to let go of a collective's tensor, frees it beyond the profiler's sight. What
    is allocated next then seems to come on top: on a busy machine the peak of ZeRO-3 was an eighth too high.
    """
    for _ in range(tries):
        events = profiled(action)
        left = sum(event.nbytes() for event in events if event.name() == "[memory]")
        unseen = torch.tensor(abs(left) > peak(events) / 100, dtype=torch.uint8)
        dist.all_reduce(unseen, dist.ReduceOp.MAX)
        if not unseen:
            return events
    raise RuntimeError(f"{left:,} bytes seem to be left in each of {tries} tries")


def peak(events: list[Any]) -> int:
    """The most bytes at once, in addition to those before the first event."""
    moves = [
        (event.start_ns(), place, event.nbytes()) for place, event in enumerate(events) if event.name() == "[memory]"
    ]
    rise = most = 0
    for _, _, moved in sorted(moves):
        rise += moved
        most = max(most, rise)
    return most
