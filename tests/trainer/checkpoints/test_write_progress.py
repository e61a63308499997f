"""A disk that no longer answers: neither a save nor the end of an attempt waits for it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpc_gpt.core.runs.full_disk import Refusal
from hpc_gpt.trainer.checkpoints import write_progress
from hpc_gpt.trainer.checkpoints.checkpoint import Background, Checkpoints, Progress
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.save import SaveOutcome
from hpc_gpt.trainer.checkpoints.write_progress import WriteProgress, start
from tests.conftest import Disk
from tests.trainer.alone import ALONE, CountingEngine
from tests.waiting import wait_for


class StoppedEngine(CountingEngine):
    """Its files are written once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def save(self, files: RankFiles) -> None:
        super().save(files)
        write = files.write
        files.write = lambda folder: write(folder) if self.go.wait() else {}  # type: ignore[method-assign]


class Clock:
    """Stands for the module `time` in write_progress: the test says what time it is; CPU time is the thread's own."""

    thread_time, clock_gettime = staticmethod(time.thread_time), staticmethod(time.clock_gettime)
    pthread_getcpuclockid = staticmethod(time.pthread_getcpuclockid)
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(write_progress, "time", clock := Clock())
    return clock


@contextlib.contextmanager
def frozen(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only meanwhile is a wait of half a second a hang: a busy machine's disk may take as long."""
    disk.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(write_progress, "HUNG_S", 0.5)
        yield
    disk.thaw()


def test_a_hanging_write_is_named_and_completed_by_an_answer(disk_that_hangs, monkeypatch):
    checkpoints = Checkpoints(disk_that_hangs.folder, ALONE, Background(wanted=True))
    engine = StoppedEngine()
    engine.step = 10
    assert checkpoints.begin(engine, Progress(10)) is None
    with frozen(disk_that_hangs, monkeypatch):
        engine.go.set()
        # A thread that has not come to the file yet may be said to hang before it.
        file = f"{disk_that_hangs.folder}/.writing-step-00000010/step"
        wait_for("the file that hangs to be named", lambda: f"s for {file}" in str(checkpoints.finish()))
        assert str(checkpoints.finish()).startswith("rank 0 of ")
        assert checkpoints.is_saving
        assert checkpoints.hangs
    outcomes: list[str | SaveOutcome] = []
    # The file that it waits for is still one that may wait for half a second.
    wait_for("the save's end", lambda: outcomes.append(checkpoints.finish()) or isinstance(outcomes[-1], SaveOutcome))
    outcome = outcomes[-1]
    assert isinstance(outcome, SaveOutcome)
    assert (outcome.step, outcome.refusal) == (10, Refusal())
    assert not checkpoints.hangs
    assert checkpoints.resume(CountingEngine()).step == 10


def test_a_save_without_a_folder_is_refused_the_next_at_once(disk_that_hangs, monkeypatch):
    checkpoints = Checkpoints(disk_that_hangs.folder / "checkpoints", ALONE, Background(wanted=True))
    engine = CountingEngine()
    engine.step = 10
    with frozen(disk_that_hangs, monkeypatch):
        for _ in range(2):
            outcome = checkpoints.begin(engine, Progress(10))
            assert outcome is not None
            assert f"s for {disk_that_hangs.folder}/checkpoints" in outcome.refusal.text
            assert not checkpoints.is_saving
            assert checkpoints.hangs
    wait_for("an answer of the disk", lambda: not checkpoints.hangs)
    assert not checkpoints.save(engine, Progress(10)).refusal
    assert checkpoints.resume(CountingEngine()).step == 10


def test_a_thread_that_computes_or_gets_on_does_not_hang(tmp_path: Path, clock: Clock) -> None:
    progress, begun, end = WriteProgress(), threading.Event(), threading.Event()

    def compute() -> None:
        progress.reached(tmp_path)
        begun.set()
        while not end.is_set():
            pass

    computing, waiting = start(compute), start(end.wait)
    begun.wait()
    clock.now = 11
    wait_for("CPU time of the thread that computes", lambda: not progress.hangs(computing))
    progress.reached(tmp_path)
    clock.now = 20
    assert not progress.hangs(waiting)
    clock.now = 22
    assert progress.hangs(waiting)
    end.set()
    computing.join()


@pytest.mark.parametrize(("size", "limit_s"), [(0, 10), (10**9, 110)])
def test_a_wait_hangs_and_syncing_a_large_file_may_be_longer(tmp_path: Path, clock: Clock, size, limit_s) -> None:
    progress, begun, end = WriteProgress(), threading.Event(), threading.Event()

    def sync() -> None:
        progress.reached(tmp_path, size)
        begun.set()
        end.wait()

    thread = start(sync)
    begun.wait()
    clock.now = limit_s - 1
    assert not progress.hangs(thread)
    clock.now = limit_s + 1
    assert progress.hangs(thread) == f"has waited {limit_s + 1} s for {tmp_path}"
    end.set()
    thread.join()
    assert not progress.hangs(thread)
