"""Which checkpoint is resumed from, and what becomes of the others. The ranks' part is in test_interruptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hpc_gpt.errors import CheckpointError
from hpc_gpt.train.checkpoints.checkpoint import Checkpoints, Progress
from tests.train.alone import ALONE, CountingEngine


def test_a_checkpoint_whose_bytes_went_bad_is_replaced(tmp_path: Path) -> None:
    """Of the right size, so that only reading it tells: passed over at the resume, it must not stay the newest."""
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    for engine.step in (10, 20):
        checkpoints.save(engine, Progress(engine.step))
    bad = tmp_path / "step-00000020" / "step"
    bad.write_bytes(bytes(bad.stat().st_size))
    assert checkpoints.resume(engine).step == 10
    engine.step = 20
    checkpoints.save(engine, Progress(20))
    assert checkpoints.resume(CountingEngine()).step == 20
    assert (tmp_path / ".damaged-step-00000020-1" / "step").read_bytes() == bytes(8)


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
def test_what_is_wrong_with_a_checkpoint_is_said_and_the_one_before_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], object], words: str
) -> None:
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    for engine.step in (10, 20):
        checkpoints.save(engine, Progress(engine.step))
    damage(tmp_path / "step-00000020")
    assert checkpoints.resume(engine).step == engine.step == 10
    assert f"passing over checkpoint {tmp_path / 'step-00000020'}: {words}" in capsys.readouterr().out


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
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    for step in (10, 15):
        (tmp_path / f".writing-step-{step:08d}").mkdir()
        (tmp_path / f".writing-step-{step:08d}" / "half").write_text("written")
    engine.step = 10
    checkpoints.save(engine, Progress(10))
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")) == [
        "step-00000010",
        "step-00000010/complete.json",
        "step-00000010/step",
    ]


def test_a_checkpoint_that_holds_another_step_than_it_says_is_refused(tmp_path: Path) -> None:
    checkpoints, engine = Checkpoints(tmp_path, ALONE), CountingEngine()
    engine.step = 9
    checkpoints.save(engine, Progress(10))
    with pytest.raises(CheckpointError, match="says step 10, but holds step 9"):
        checkpoints.resume(engine)
