"""Bytes that an action allocates on a CPU, by torch's profiler: it sees every allocation, also those in operators."""

import contextlib
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode


def profiled(action: Callable[[], Any]) -> list[Any]:
    """The profiler's events while the action runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    return list(profile.profiler.kineto_results.events())  # type: ignore[union-attr]


def profiled_whole(action: Callable[[], Any], tries: int = 8) -> list[Any]:
    """As `profiled`, of an action that leaves as many bytes as it found; where a free was not seen by rank 0, which is
    read, all ranks do it again.

    gloo's thread, where it is the last to let go of a collective's tensor, frees it beyond the profiler's sight. What
    is allocated next then seems to come on top: on a busy machine the peak of ZeRO-3 was an eighth too high. So from
    the second try on each collective is given a moment in which that thread lets go, in each try twice as long. Not in
    the first: under the mode that gives it nothing compiled runs.
    """

    def unhurried() -> None:
        with _Unhurried(pause_s) if pause_s else contextlib.nullcontext():
            action()

    for number in range(tries):
        pause_s = 0.001 * 2**number if number else 0.0
        events = profiled(unhurried)
        left = sum(event.nbytes() for event in events if event.name() == "[memory]")
        unseen = torch.tensor(abs(left) > peak(events) / 100, dtype=torch.uint8)
        dist.broadcast(unseen, 0)
        if not unseen:
            return events
    raise RuntimeError(f"{left:,} bytes seem to be left in each of {tries} tries")


class _Unhurried(TorchDispatchMode):
    """Waits for each collective, and a moment more."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.pause_s = pause_s

    def __torch_dispatch__(self, called: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = called(*args, **(kwargs or {}))
        if called.namespace == "c10d":
            if isinstance(made, tuple) and isinstance(made[-1], torch.ScriptObject):
                dist.Work.unbox(made[-1]).wait()
            time.sleep(self.pause_s)
        return made


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
