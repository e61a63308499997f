"""A checkpoint has its name only once all of it is on the disk, and only if every rank could write its part."""

import errno
import os
from pathlib import Path
from typing import Any

from hpc_gpt.core.runs.full_disk import Refusal
from hpc_gpt.trainer.checkpoints.checkpoint import Checkpoints, Progress
from hpc_gpt.trainer.checkpoints.rank_files import RankFiles
from hpc_gpt.trainer.checkpoints.save import _Part
from hpc_gpt.trainer.ranks import Peers
from tests.trainer.alone import ALONE, CountingEngine


class Nested(CountingEngine):
    def save(self, files: RankFiles) -> None:
        super().save(files)
        files.put_text("below/more", "more")


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
    engine = Nested()
    engine.step = 10
    assert not Checkpoints(tmp_path, ALONE).save(engine, Progress(10)).refusal
    aside = tmp_path / ".writing-step-00000010"
    at = events.index(("rename", aside))
    before = [path for kind, path in events[:at] if kind == "fsync"]
    files = {aside / "step", aside / "below" / "more", aside / "complete.json"}
    assert files | {aside, aside / "below"} <= set(before)
    # The marker vouches for the files, so it comes behind them, and the folders that name all of them behind it.
    marked = before.index(aside / "complete.json")
    assert {aside / "step", aside / "below" / "more"} <= set(before[:marked])
    assert {aside, aside / "below"} <= set(before[marked:])
    assert ("fsync", tmp_path) in events[at:]


class _OtherFails(Peers):
    """Rank 0 of two, of which the other's disk was full."""

    def gather(self, value: Any) -> list[Any]:
        return [value, _Part(refusal=Refusal("No space left on device: its file", errno.ENOSPC))]


def test_what_another_rank_could_not_write_makes_no_checkpoint(tmp_path: Path) -> None:
    engine = CountingEngine()
    engine.step = 10
    checkpoints = Checkpoints(tmp_path, _OtherFails())
    outcome = checkpoints.save(engine, Progress(10))
    assert outcome.refusal.is_full
    assert "its file" in outcome.refusal.text
    assert not list(tmp_path.glob("step-*"))
    assert checkpoints.resume(CountingEngine()).step == 0
