"""Which checkpoints stay, however a deletion ends."""

import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.checkpoints.retention import Retention
from hpc_gpt.core.runs.full_disk import Refusal
from hpc_gpt.trainer.checkpoints import checkpoint
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from tests.trainer.alone import ALONE, CountingEngine


def save(folder: Path, steps: list[int], retention: Retention) -> None:
    checkpoints, engine = Checkpoints(folder, ALONE, retention=retention), CountingEngine()
    for engine.step in steps:
        assert not (checkpoints.begin(engine, Progress(engine.step)) or checkpoints.finish()).refusal
        checkpoints.await_removal()


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("retention", "stay"),
    [
        (Retention(), [10, 20, 30, 40, 50]), (Retention(keep_every=30), [10, 20, 30, 40, 50]),
        (Retention(keep_last=2), [40, 50]), (Retention(keep_last=1, keep_every=20), [20, 40, 50]),
        (Retention(keep_last=9), [10, 20, 30, 40, 50]),
    ],
)  # fmt: skip
def test_the_last_and_every_nth_stay(tmp_path: Path, retention: Retention, stay: list[int]) -> None:
    save(tmp_path, [10, 20, 30, 40, 50], retention)
    assert kept(tmp_path) == [f"step-{step:08d}" for step in stay]


def test_one_that_lacks_bytes_is_none_and_the_good_one_stays(tmp_path: Path) -> None:
    save(tmp_path, [10, 20, 30], Retention())
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / "step").write_text("cut")
    assert Retention(keep_last=1).apply(tmp_path, 30) == []
    assert kept(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    save(tmp_path, [40], Retention(keep_last=1))
    assert kept(tmp_path) == ["step-00000040"]


def test_one_a_resume_passed_over_stands_for_none_after_it(tmp_path: Path) -> None:
    """A read that fails once, and not for its bytes, leaves it where it is; the run goes on from 20."""
    save(tmp_path, [10, 20, 30], Retention())
    save(tmp_path, [25], Retention(keep_last=1))
    assert kept(tmp_path) == ["step-00000025", "step-00000030"]


def test_a_deletion_cut_short_is_ended_by_the_next_save(tmp_path: Path) -> None:
    save(tmp_path, [10], Retention())
    (tmp_path / "step-00000010").rename(tmp_path / ".deleting-step-00000010")
    save(tmp_path, [20], Retention())
    assert kept(tmp_path) == ["step-00000020"]


def test_a_last_save_takes_none_away_and_the_next_attempt_does(tmp_path: Path) -> None:
    """What Slurm leaves after a SIGTERM is for ended.json, and for the job's way back to the queue."""
    save(tmp_path, [10, 20], Retention())
    first = Checkpoints(tmp_path, ALONE, retention=Retention(keep_last=1))
    engine = CountingEngine()
    engine.step = 30
    assert first.save(engine, Progress(30)).removed == ()
    assert kept(tmp_path) == ["step-00000010", "step-00000020", "step-00000030"]
    next_ = Checkpoints(tmp_path, ALONE, retention=Retention(keep_last=1))
    next_.retain()
    assert len(kept(tmp_path)) == 3, "before it knows of a sound one"
    (tmp_path / "step-00000030" / "step").write_bytes(b"damaged!")
    assert next_.resume(engine, is_own=True).step == 20
    next_.retain()
    next_.await_removal()
    assert kept(tmp_path) == [".damaged-step-00000030-1", "step-00000020"]


def test_nobody_waits_for_a_removal_but_a_save_that_has_no_room(tmp_path, monkeypatch):
    free, remove = threading.Event(), shutil.rmtree

    def slow(path: Path, **how: Any) -> None:
        free.wait()
        remove(path, **how)

    monkeypatch.setattr(shutil, "rmtree", slow)
    checkpoints, engine = Checkpoints(tmp_path, ALONE, retention=Retention(keep_last=1)), CountingEngine()
    (tmp_path / ".writing-step-00000010").mkdir()
    for engine.step in (10, 20):
        assert not (checkpoints.begin(engine, Progress(engine.step)) or checkpoints.finish()).refusal
    assert [name for name in kept(tmp_path) if name.startswith("step-")] == ["step-00000020"]
    assert len(kept(tmp_path)) == 3

    def find_disk_space(folder: Path, needed_bytes: int) -> Refusal:
        full = any(name.startswith(".") for name in kept(folder))
        free.set()
        return Refusal("full" if full else "")

    monkeypatch.setattr(checkpoint, "find_disk_space", find_disk_space)
    engine.step = 30
    assert not checkpoints.save(engine, Progress(30)).refusal
    assert kept(tmp_path) == ["step-00000020", "step-00000030"]


def test_a_damaged_one_goes_once_as_many_newer_ones_are_there(tmp_path: Path) -> None:
    save(tmp_path, [10], Retention())
    (tmp_path / "step-00000010").rename(tmp_path / ".damaged-step-00000010-1")
    save(tmp_path, [20], Retention(keep_last=2))
    assert kept(tmp_path) == [".damaged-step-00000010-1", "step-00000020"]
    save(tmp_path, [30], Retention(keep_last=2))
    assert kept(tmp_path) == ["step-00000020", "step-00000030"]


def test_what_is_no_checkpoint_of_ours_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "step-of-mine").mkdir()
    save(tmp_path, [10, 20], Retention(keep_last=1))
    assert kept(tmp_path) == ["step-00000020", "step-of-mine"]


def test_from_step_100000000_on_steps_decide_not_names(tmp_path: Path) -> None:
    last = 99_999_999
    save(tmp_path, [10, last - 1], Retention())
    (tmp_path / "step-00000010").rename(tmp_path / ".damaged-step-00000010-1")
    save(tmp_path, [last, last + 1, last + 2], Retention(keep_last=2))
    assert kept(tmp_path) == ["step-100000000", "step-100000001"]
    save(tmp_path, [last], Retention(keep_last=1))
    assert kept(tmp_path) == ["step-100000000", "step-100000001", "step-99999999"], "those of later steps stay"
    assert Checkpoints(tmp_path, ALONE).resume(CountingEngine()).step == last + 2
    (tmp_path / "step-100000001").rename(tmp_path / ".damaged-step-100000001-1")
    assert Checkpoints(tmp_path, ALONE).resume(CountingEngine()).step == last + 1
