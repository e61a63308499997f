"""Which checkpoint is resumed from, and what becomes of the others. The ranks' part is in test_interruptions."""

from __future__ import annotations

from pathlib import Path

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
