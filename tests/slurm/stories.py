"""Stories: what happens to a run, told in a thread of its own, so that many runs are under way together.

Most of a run's time on the test cluster is waiting: for Slurm's timers, for a requeue, for Python to start. A story
submits a run, breaks it, waits for its end and gives what there is to look at. A test names its story, in
`pytest.mark.story` or as a parameter, and looks at it afterwards: `told(STORY)`; or it is one itself (`storied`). The
stories of all tests that were selected begin with the first of them, a few at a time, those that wait for Slurm's
timers first.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import pytest

from tests.processes import send
from tests.slurm.launcher import Launcher

T = TypeVar("T")
# More would only compete for the cores: a story computes while its ranks start, and waits after that.
AT_ONCE = 6


@dataclass(frozen=True)
class Story(Generic[T]):
    """`tell` makes the run; `first`: it waits for a timer of Slurm, so it begins before the others."""

    tell: Callable[[Teller], T]
    first: bool = False


def story(tell: Callable[[Teller], T]) -> Story[T]:
    """Makes a story of a function."""
    return Story(tell)


def storied(tell: Callable[[Teller], None], first: bool = False) -> Callable[[Teller], None]:
    """Makes a test of a story that no other test looks at: it tells it, and fails if that does."""
    own = Story(tell, first)

    def look(told: Teller) -> None:
        told(own)

    look.__name__, look.__doc__, look.__module__ = tell.__name__, tell.__doc__, tell.__module__
    return pytest.mark.story(own)(look)


slow_storied = partial(storied, first=True)  # of one that waits for one of Slurm's timers


def stories_of(items: Iterable[pytest.Item]) -> list[Story[Any]]:
    """The stories that these tests look at, in the order in which they should begin."""
    found: dict[Story[Any], None] = {}
    for item in items:
        named = [each for mark in item.iter_markers("story") for each in mark.args]
        callspec = getattr(item, "callspec", None)
        named += [each for each in callspec.params.values() if isinstance(each, Story)] if callspec else []
        found |= dict.fromkeys(named)
    return sorted(found, key=lambda each: not each.first)


class Teller:
    """Tells stories on one cluster. Called with a story it gives its end, whatever it still takes.

    A story may call it for another one that it needs.
    """

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self.cluster = launcher.cluster
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="story")
        self._futures: dict[Story[Any], Future[Any]] = {}
        self._lock = threading.Lock()

    def begin(self, stories: Iterable[Story[Any]]) -> None:
        """Begins stories unless they have begun."""
        with self._lock:
            for each in stories:
                if each not in self._futures:
                    self._futures[each] = self._pool.submit(each.tell, self)

    def __call__(self, wanted: Story[T]) -> T:
        with self._lock:
            future = self._futures.get(wanted)
            here = future is None or future.cancel()
            if here:  # it waits for its turn: whoever needs it now tells it
                self._futures[wanted] = Future()
                self._futures[wanted].set_running_or_notify_cancel()  # nobody else tells it
            told: Future[T] = self._futures[wanted]
        if here:
            try:
                told.set_result(wanted.tell(self))
            except BaseException as error:
                told.set_exception(error)
        return told.result()

    def stop(self) -> None:
        """Ends what is still under way, as nobody looks at it any more: also the commands that it waits for."""
        self.cluster.ending.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        while not all(future.done() for future in self._futures.values()):
            for pid in self.launcher.commands():
                send(pid, signal.SIGKILL)
            time.sleep(0.1)
