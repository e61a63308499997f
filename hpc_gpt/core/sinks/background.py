"""A sink in a thread of its own: the training never waits for it and never sees its faults."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from hpc_gpt.core.format import plain
from hpc_gpt.core.secrets import hide_secrets
from hpc_gpt.core.sinks import CurveRow, Sink

MOST_ROWS = 10_000  # that wait for a service; beyond that the oldest ones are lost


class Background:
    """Hands rows to one service. Those that it refuses are tried again with the next ones; how many it never got is
    said at the end, in one line.

    `openers` open the sink: the service itself, and what takes its place if that fails.
    """

    def __init__(self, name: str, openers: Sequence[Callable[[], Sink]]) -> None:
        self._name, self._openers = name, openers
        self._rows: deque[CurveRow] = deque()
        self._all = self._lost = self._taken = 0  # numbers of rows; `taken` are those in the sink's hands
        self._fault = ""
        self._news, self._ends = True, False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name=f"track-{name}", daemon=True)
        self._thread.start()

    def add(self, rows: Iterable[CurveRow], ends: bool = False) -> None:
        """Takes rows by ascending step, and waits for nothing. `ends`: the sink is closed after them."""
        with self._changed:
            before = len(self._rows)
            self._rows.extend(rows)
            self._all += len(self._rows) - before
            self._drop()
            self._news, self._ends = True, ends
            self._changed.notify()

    def wait(self, limit_s: float) -> None:
        """Waits at most `limit_s` until the sink is closed, and prints a line if the service lacks anything."""
        self._thread.join(limit_s)
        with self._changed:
            lost = self._lost + self._taken + len(self._rows)
            fault = "it has not ended in time" if self._thread.is_alive() else self._fault
        if lost or fault:
            what = f"{lost:,} of {self._all:,} steps are not there" if lost else "its last steps may not be there"
            fault = fault or "it was slower than the training"
            print(f"track: {self._name}: {what}, but in metrics.jsonl: {fault}", flush=True)

    def _drop(self) -> None:
        while len(self._rows) > MOST_ROWS:
            self._rows.popleft()
            self._lost += 1

    def _work(self) -> None:
        sink: Sink | None = None
        ends = False
        while not ends:
            with self._changed:
                self._changed.wait_for(lambda: self._news)
                self._news, ends = False, self._ends
                rows = list(self._rows)
                self._rows.clear()
                self._taken = len(rows)
            fault = ""
            try:
                sink = sink or self._open()
                sink.add(rows)
                rows, self._taken = [], 0
                if ends:
                    sink.close()
            except BaseException as error:  # the libraries may raise anything
                fault = _text_of(error)
            with self._changed:
                self._fault, self._taken = fault, 0
                self._rows.extendleft(reversed(rows))
                self._drop()

    def _open(self) -> Sink:
        first, *others = self._openers
        try:
            return first()
        except Exception as error:
            if not others:
                raise
            sink = others[0]()
            print(f"track: {self._name}: it writes into the run folder alone: {_text_of(error)}", flush=True)
            return sink


def _text_of(error: BaseException) -> str:
    return hide_secrets(plain(" ".join(f"{error}".split()), " "))[:400] or type(error).__name__
