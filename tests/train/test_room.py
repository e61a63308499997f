"""Room for an attempt's last word, and notes that wait for room: on a small file system that is really full."""

from __future__ import annotations

import errno
import time
from pathlib import Path

import pytest

from hpc_gpt.errors import RunFolderError
from hpc_gpt.runs.run_folder import RunFolder
from hpc_gpt.small_files import write_once
from hpc_gpt.train import room
from hpc_gpt.train.ending import STOPPED, write_end
from tests.train.filling import fill
from tests.train.launch import new_run, settings


def test_an_attempt_says_how_it_ended_though_the_disk_is_full(small_disk: Path) -> None:
    run: RunFolder = new_run(small_disk, settings(Path("none.tokens"), {"tp": 1, "pp": 1, "dp": 1}))
    killed, attempt = run.new_attempt(), run.new_attempt()
    room.reserve(killed)
    room.reserve(attempt)
    assert [path.parent.name for path in run.path.glob("attempts/*/.reserve")] == ["2"]
    fill(small_disk)
    with pytest.raises(RunFolderError):
        killed.write_ended("error", None, 3)
    write_end(run, attempt, STOPPED, 7)
    assert attempt.ended()["ended"] == "stopped"
    assert not list(run.path.glob("attempts/*/.reserve"))


def test_a_note_waits_for_room(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "_PAUSE_S", 0.01)
    note = small_disk / "note"
    filler = fill(small_disk)
    room.when_there_is_room(lambda: write_once(note, "words" * 2000), "note")
    assert not note.exists()
    filler.unlink()
    until = time.monotonic() + 240
    while not note.exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    assert note.read_text() == "words" * 2000


def test_another_refusal_is_an_error() -> None:
    def refuse() -> None:
        raise RunFolderError("cannot write note: Read-only file system") from OSError(errno.EROFS, "Read-only")

    with pytest.raises(RunFolderError, match="Read-only file system"):
        room.when_there_is_room(refuse, "note")
