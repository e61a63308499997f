"""A disk that no longer answers: neither a save nor the end of an attempt waits for it."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
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


class StoppedEngine(CountingEngine):
    """Its files are written once `go` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def save(self, files: RankFiles) -> None:
        files.put_by([], lambda *_: (self.go.wait(60) and {}, None), lambda *_: None)
        super().save(files)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """For threads that wait for nothing but the test."""
    monkeypatch.setattr(write_progress, "HUNG_S", 0.5)


@contextlib.contextmanager
def frozen(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Only meanwhile is a wait of half a second a hang: a busy machine's disk may take as long."""
    disk.freeze()
    with monkeypatch.context() as patch:
        patch.setattr(write_progress, "HUNG_S", 0.5)
        yield
    disk.thaw()


def comes(happened: Callable[[], bool], patience_s: float = 60.0) -> bool:
    """Whether it happens within the time."""
    until = time.monotonic() + patience_s
    while not happened():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def test_a_hanging_write_is_named_and_completed_by_an_answer(disk_that_hangs, monkeypatch):
    checkpoints = Checkpoints(disk_that_hangs.folder, ALONE, Background(wanted=True))
    engine = StoppedEngine()
    engine.step = 10
    assert checkpoints.begin(engine, Progress(10)) is None
    with frozen(disk_that_hangs, monkeypatch):
        engine.go.set()
        hung = checkpoints.finish()
        assert isinstance(hung, str)
        assert hung.startswith("rank 0 of ")
        assert f"s for {disk_that_hangs.folder}/.writing-step-00000010/step" in hung
        assert checkpoints.is_saving
        assert checkpoints.hangs
        # What is known is known at once, and the save may still end.
        assert isinstance(checkpoints.finish(), str)
    outcomes: list[str | SaveOutcome] = []
    # The file that it waits for is still one that may wait for half a second.
    assert comes(lambda: outcomes.append(checkpoints.finish()) or isinstance(outcomes[-1], SaveOutcome))
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
    assert comes(lambda: not checkpoints.hangs)
    assert not checkpoints.save(engine, Progress(10)).refusal
    assert checkpoints.resume(CountingEngine()).step == 10


@pytest.mark.usefixtures("soon")
def test_a_thread_that_computes_or_gets_on_does_not_hang(tmp_path: Path) -> None:
    progress, end = WriteProgress(), threading.Event()

    def compute() -> None:
        progress.reached(tmp_path)
        while not end.is_set():
            pass

    def get_on() -> None:
        while not end.wait(0.05):
            progress.reached(tmp_path)

    for work in (compute, get_on):
        progress.reached("before")
        thread = start(work)
        time.sleep(0.8)
        # One that has had no turn since looks as if it did.
        assert comes(lambda thread=thread: not progress.hangs(thread), 10)
        end.set()
        thread.join()
        end.clear()


@pytest.mark.usefixtures("soon")
def test_syncing_a_large_file_may_take_longer(tmp_path: Path) -> None:
    progress, begun, end = WriteProgress(), threading.Event(), threading.Event()

    def sync(size: int) -> None:
        progress.reached(tmp_path, size)
        begun.set()
        end.wait()

    for size, expected in ((10**9, ""), (0, str(tmp_path))):
        begun.clear()
        thread = start(lambda size=size: sync(size))  # type: ignore[misc]
        begun.wait()
        time.sleep(0.8)
        said = progress.hangs(thread)
        assert expected in said
        assert bool(said) == bool(expected)
        end.set()
        thread.join()
        assert not progress.hangs(thread)
        end.clear()
