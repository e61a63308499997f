"""Figures of whole logs made to a known truth, where a plain reading of them goes wrong."""

import json

import pytest

from hpc_gpt.report.gather import gather_paths
from tests.readers.made_logs import write_log


def record_of(tmp_path, *lines):
    write_log(tmp_path / "lab" / "train.log", *lines)
    (run,) = gather_paths([str(tmp_path / "lab")], tmp_path / "logs").runs
    return run.record


def event(key, value, at_s, kind="POINT_IN_TIME", **metadata):
    words = {"namespace": "", "time_ms": int(1.7e12 + 1000 * at_s), "event_type": kind, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**words, "metadata": {"file": "/workspace/train.py", "lineno": 1, **metadata}})


@pytest.mark.parametrize("timed", [True, False])
def test_blocks_of_samples_are_steps_of_the_batch(tmp_path, timed):
    lines = [event("global_batch_size", 1536, 0), event("init_start", None, 0, "INTERVAL_START")]
    for block in range(1, 31):
        samples = block * 16 * 1536
        if timed:
            lines.append(event("tracked_stats", {"train_step_timing": 9.0}, 144 * block, step=samples))
        lines.append(event("block_stop", None, 144 * block, "INTERVAL_END", samples_count=samples))
        lines.append(event("eval_accuracy", 4 - block / 100, 144 * block, samples_count=samples))
    record = record_of(tmp_path, lines)
    assert record.step_s == pytest.approx(9.0)
    assert "lines, 16 steps apart" in record.sources["step_s"]
    assert record.loss_eval == pytest.approx(3.7)
    assert not any("no step numbers" in flag for flag in record.flags)
