"""Waiting for a state, with one generous limit for all tests; TESTS_PATIENCE=4 is four times as patient."""

import os
import time
from collections.abc import Callable
from typing import TypeVar

import pytest

T = TypeVar("T")
PATIENCE = float(os.environ.get("TESTS_PATIENCE", "1"))
LIMIT_S = 300.0 * PATIENCE


def patient(seconds: float) -> float:
    """A limit of the product's own that a test has made short, on a machine that is as slow as TESTS_PATIENCE says."""
    return seconds * PATIENCE


def wait_for(what: str, state: Callable[[], T], said: Callable[[], object] = str, limit_s: float = LIMIT_S) -> T:
    """The first true value of `state`; fails with `what` and what is `said` if none comes within the limit."""
    begun = time.monotonic()
    while True:
        looked = time.monotonic()
        if value := state():
            return value
        if time.monotonic() - begun > limit_s:
            pytest.fail(f"not within {limit_s:.0f} s: {what}\n{said()}")
        pause(looked)


def pause(since: float) -> None:
    """Sleeps between two looks at a state, of which the last began at `since`: one that starts a process is rarer."""
    time.sleep(min(0.25, max(0.05, 5 * (time.monotonic() - since))))
