"""A sink in its thread: whatever it does, nobody waits for it, and what it did not get is counted."""

import threading
import time

import pytest

from hpc_gpt.core.sinks import background
from hpc_gpt.core.sinks.background import Background
from tests.waiting import patient, wait_for

ROWS = [(step, 0.0, {"loss": float(step)}) for step in range(1, 6)]


class Kept:
    """A sink that keeps its steps, after `faults` of its adds have failed."""

    def __init__(self, faults: int = 0) -> None:
        self.steps: list[int] = []
        self.is_closed = False
        self._faults = faults

    def add(self, rows) -> None:
        if self._faults and rows:
            self._faults -= 1
            raise RuntimeError("no\nnetwork for https://me:abc123@host/x")
        self.steps += [step for step, _, _ in rows]

    def close(self) -> None:
        self.is_closed = True


def end(sink: Background, limit_s: float) -> None:
    sink.add((), ends=True)
    sink.wait(limit_s)


def test_every_row_arrives_before_the_end(capsys):
    kept = Kept()
    sink = Background("wandb", [lambda: kept])
    for row in ROWS:
        sink.add([row])
    end(sink, patient(60))
    assert (kept.steps, kept.is_closed, capsys.readouterr().out) == ([1, 2, 3, 4, 5], True, "")


def test_refused_rows_come_again_with_the_next_ones(capsys):
    kept = Kept(faults=2)
    sink = Background("wandb", [lambda: kept])
    for row in ROWS:
        sink.add([row])
        wait_for("the thread has taken it", lambda: not sink._news)
    end(sink, patient(60))
    assert (kept.steps, capsys.readouterr().out) == ([1, 2, 3, 4, 5], "")


def test_a_service_that_always_fails_is_one_line_without_secrets(capsys):
    sink = Background("wandb", [lambda: Kept(faults=99)])
    for row in ROWS:
        sink.add([row])
    end(sink, patient(60))
    why = "no network for https://[removed]@host/x"
    assert capsys.readouterr().out == f"track: wandb: 5 of 5 steps are not there, but in metrics.jsonl: {why}\n"


@pytest.mark.parametrize("where", ["open", "add"])
def test_a_service_that_blocks_keeps_nobody_waiting(where, capsys, monkeypatch):
    monkeypatch.setattr(background, "MOST_ROWS", 3)
    forever = threading.Event()

    class Blocking(Kept):
        def add(self, rows) -> None:
            forever.wait()

    sink = Background("wandb", [lambda: Blocking() if where == "add" else forever.wait()])
    began = time.monotonic()
    for _ in range(20_000):
        sink.add(ROWS)
    assert time.monotonic() - began < patient(5)
    assert len(sink._rows) == 3
    end(sink, 0.1)
    line = "100,000 of 100,000 steps are not there, but in metrics.jsonl: it has not ended in time"
    assert capsys.readouterr().out == f"track: wandb: {line}\n"
    forever.set()


def test_an_end_that_fails_is_said(capsys):
    class Unfinished(Kept):
        def close(self) -> None:
            raise SystemExit("killed")

    sink = Background("wandb", [lambda: Unfinished()])
    sink.add(ROWS)
    end(sink, patient(60))
    line = "its last steps may not be there, but in metrics.jsonl: killed"
    assert capsys.readouterr().out == f"track: wandb: {line}\n"


def test_a_service_without_a_network_has_its_folder_in_its_place(capsys):
    def online():
        raise OSError("no route\nto host")

    kept = Kept()
    sink = Background("wandb", [online, lambda: kept])
    sink.add(ROWS)
    end(sink, patient(60))
    assert kept.steps == [1, 2, 3, 4, 5]
    assert capsys.readouterr().out == "track: wandb: it writes into the run folder alone: no route to host\n"
