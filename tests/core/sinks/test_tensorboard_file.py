"""TensorBoard's file while the disk is full: whole, and each row once."""

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hpc_gpt.core.sinks import ShownRun
from hpc_gpt.core.sinks.tensorboard import EVENT_FILE, TensorBoard
from tests.trainer.filling import fill


def test_rows_that_a_full_disk_refuses_can_be_added_again(small_disk):
    rows = [(step, 100.0 + step, {"loss": float(step)}) for step in range(1, 5000)]
    sink = TensorBoard(ShownRun("a", "demo", "demo/a", 100.0, {"lr": 0.5}), small_disk / EVENT_FILE.format(number=1))
    sink.add(rows[:2])
    filler = fill(small_disk)
    with pytest.raises(OSError, match="No space left"):
        sink.add(rows[2:])
    filler.unlink()
    sink.add(rows[2:])
    sink.close()
    events = EventAccumulator(str(small_disk), size_guidance={"scalars": 0})
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(step, step) for step in range(1, 5000)]
