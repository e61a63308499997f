"""What makes a checkpoint, which one is resumed from, and what becomes of the others. The ranks' part is in
test_interruptions."""

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.runs.full_disk import Refusal
from hpc_gpt.trainer.checkpoints.checkpoint import Background, Checkpoints, Progress
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.save import _Part
from hpc_gpt.trainer.ranks import Peers
from tests.trainer.alone import ALONE, CountingEngine


def saved_twice(folder: Path) -> tuple[Checkpoints, CountingEngine]:
    """Checkpoints of steps 10 and 20."""
    checkpoints, engine = Checkpoints(folder, ALONE), CountingEngine()
    for engine.step in (10, 20):
        checkpoints.save(engine, Progress(engine.step))
    return checkpoints, engine


def test_a_checkpoint_of_bad_bytes_gives_way_to_the_one_before(tmp_path, capsys):
    """Of the right size, so that only reading it tells."""
    checkpoints, engine = saved_twice(tmp_path)
    bad = tmp_path / "step-00000020" / "step"
    bad.write_bytes(bytes(bad.stat().st_size))
    assert checkpoints.resume(engine, is_own=True).step == 10
    assert "; set aside as .damaged-step-00000020-1" in capsys.readouterr().out
    assert (tmp_path / ".damaged-step-00000020-1" / "step").read_bytes() == bytes(8)
    engine.step = 20
    checkpoints.save(engine, Progress(20))
    assert checkpoints.resume(CountingEngine()).step == 20


class ManyFiles(CountingEngine):
    def save(self, files: RankFiles) -> None:
        for number in range(200):
            files.put_bytes(f"file-{number}", b"")
        super().save(files)


def test_the_list_of_a_ranks_files_goes_to_rank_0_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On all ranks it would take as much memory and time as there are ranks, squared."""
    shared: list[int] = []

    def note(value: Any) -> Any:
        shared.append(len(pickle.dumps(value)))
        return value

    monkeypatch.setattr(ALONE, "broadcast", note)
    monkeypatch.setattr(ALONE, "all_gather", lambda value: [note(value)])
    assert not Checkpoints(tmp_path, ALONE).save(ManyFiles(), Progress(1)).refusal
    assert len(list(tmp_path.glob("step-00000001/file-*"))) == 200
    assert 0 < max(shared) < 1000


def other_schema(folder: Path) -> None:
    marker = folder / "complete.json"
    marker.write_text(json.dumps(json.loads(marker.read_text()) | {"schema": 99}))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "step").write_text("0000"), "step has 4 bytes, not 8"),
        (lambda folder: (folder / "step").write_bytes(bytes(8)), "step has CRC-32 "),
        (lambda folder: (folder / "step").unlink(), "step: No such file or directory"),
        (lambda folder: (folder / "complete.json").unlink(), "complete.json is missing or damaged"),
        (other_schema, "complete.json is missing or damaged"),
    ],
)
def test_what_is_wrong_is_said_and_the_one_before_taken(tmp_path, capsys, damage, words):
    """By a reader to whom the checkpoints do not belong: it leaves them where they are."""
    checkpoints, engine = saved_twice(tmp_path)
    damage(tmp_path / "step-00000020")
    assert checkpoints.resume(engine).step == engine.step == 10
    assert f"skipping checkpoint {tmp_path / 'step-00000020'}: {words}" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_one_that_cannot_be_read_here_is_passed_over_and_stays(tmp_path, capsys):
    checkpoints, engine = saved_twice(tmp_path)
    (link := tmp_path / "step-00000020" / "step").unlink()
    link.symlink_to(link)
    assert checkpoints.resume(engine, is_own=True).step == 10
    assert "step: Too many levels of symbolic links" in capsys.readouterr().out
    assert (tmp_path / "step-00000020").is_dir()


def test_a_marker_that_cannot_be_read_here_is_no_damage(tmp_path, capsys):
    checkpoints, engine = saved_twice(tmp_path)
    (link := tmp_path / "step-00000020" / "complete.json").unlink()
    link.symlink_to(link)
    assert checkpoints.resume(engine, is_own=True).step == 10
    assert "complete.json: Too many levels of symbolic links" in capsys.readouterr().out
    assert (tmp_path / "step-00000020").is_dir()


def test_progress_comes_back_whole_and_a_step_can_be_asked_for(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    for engine.step in (10, 20):
        progress = Progress(engine.step, 12.5 * engine.step, "the same", {0: {"at": engine.step}, 11: {"at": 3}})
        checkpoints.save(engine, progress)
    assert checkpoints.resume(CountingEngine()) == progress
    assert [path.name for path, _ in checkpoints.sound()] == ["step-00000020", "step-00000010"]
    assert [path.name for path, _ in checkpoints.sound(10)] == ["step-00000010"]
    assert list(checkpoints.sound(15)) == []


def test_a_save_begins_in_an_empty_folder(tmp_path: Path) -> None:
    """What was never completed goes, and what retention had begun to take away."""
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    for name in (".writing-step-00000010", ".writing-step-00000015", ".deleting-step-00000005"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "half").write_text("written")
    engine.step = 10
    checkpoints.save(engine, Progress(10))
    checkpoints.await_removal()
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "step-00000010",
        "step-00000010/complete.json",
        "step-00000010/step",
    ]


def test_in_the_background_it_completes_later_with_what_was(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path, ALONE, Background(wanted=True)), CountingEngine()
    engine.step = 10
    assert checkpoints.begin(engine, Progress(10)) is None
    assert checkpoints.is_saving
    engine.step = 11
    edges = 0
    # The word heard at the first edge was said before the save began, at the first after each turn likewise.
    while (outcome := checkpoints.poll(checkpoints.busy)) is None:
        edges += 1
    assert edges >= 3
    assert not outcome.refusal
    assert not checkpoints.is_saving
    assert checkpoints.resume(CountingEngine()).step == 10


def test_a_disk_that_refuses_leaves_the_save_out_and_others_stay(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path / "here", ALONE, Background(wanted=True)), CountingEngine()
    engine.step = 10
    checkpoints.save(engine, Progress(10))
    engine.step = 20
    assert checkpoints.begin(engine, Progress(20)) is None
    # Somebody takes the folder away while it is written, or just before complete.json is.
    os.rename(tmp_path / "here", tmp_path / "there")
    (tmp_path / "here").mkdir()
    outcome = checkpoints.finish()
    assert "No such file or directory" in outcome.refusal.text
    assert not outcome.refusal.is_full
    assert not list((tmp_path / "here").iterdir())
    assert not checkpoints.is_saving


def test_all_bytes_are_on_disk_before_the_name_is_and_is_told(tmp_path, monkeypatch):
    """A node that loses power must not leave a checkpoint that looks complete and holds nothing."""
    events: list[tuple[str, Path]] = []
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(number: int) -> None:
        fsync(number)
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{number}"))))

    def noted_rename(path: Path, target: Path) -> Path:
        events.append(("rename", path))
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted_rename)
    engine = CountingEngine()
    engine.step = 10
    assert not Checkpoints(tmp_path, ALONE).save(engine, Progress(10)).refusal
    aside = tmp_path / ".writing-step-00000010"
    at = events.index(("rename", aside))
    before = [path for kind, path in events[:at] if kind == "fsync"]
    assert {aside / "step", aside / "complete.json", aside} <= set(before)
    # The marker vouches for the files, so it comes behind them, and the folders that name all of them behind it.
    marked = before.index(aside / "complete.json")
    assert aside / "step" in before[:marked]
    assert aside in before[marked:]
    assert ("fsync", tmp_path) in events[at:]


class _OtherFails(Peers):
    """Rank 0 of two, of which the other's disk was full."""

    def gather(self, value: Any) -> list[Any]:
        refusal = Refusal("No space left on device: its file", errno.ENOSPC)
        return [value, _Part(refusal=refusal) if isinstance(value, _Part) else value]


def test_what_another_rank_could_not_write_makes_no_checkpoint(tmp_path: Path) -> None:
    engine = CountingEngine()
    engine.step = 10
    checkpoints = Checkpoints(tmp_path, _OtherFails())
    outcome = checkpoints.save(engine, Progress(10))
    assert outcome.refusal.is_full
    assert "its file" in outcome.refusal.text
    assert not list(tmp_path.glob("step-*"))
    assert checkpoints.resume(CountingEngine()).step == 0
