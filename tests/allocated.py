"""Bytes that an action allocates on a CPU, by torch's profiler: it sees every allocation, also those in operators."""

import math
from collections.abc import Callable
from typing import Any

import torch


def profiled(action: Callable[[], Any]) -> list[Any]:
    """The profiler's events while the action runs."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        action()
    return list(profile.profiler.kineto_results.events())  # type: ignore[union-attr]


def peak(events: list[Any], until_ns: float = math.inf) -> int:
    """The most bytes at once, in addition to those before the first event."""
    moves = [
        (event.start_ns(), place, event.nbytes()) for place, event in enumerate(events) if event.name() == "[memory]"
    ]
    rise = most = 0
    for at_ns, _, moved in sorted(moves):
        rise += moved
        most = max(most, rise) if at_ns < until_ns else most
    return most
