"""A run goes on in another layout, stage and engine, as a new run that its parent's newest sound checkpoint begins."""

from __future__ import annotations

import json

import pytest

from hpc_gpt.files import read_json_lines
from hpc_gpt.runs.run_folder import RunFolder
from tests.cli.command import hpc_gpt
from tests.local.conftest import SMALL, newest


def losses(run: RunFolder) -> dict[int, float]:
    lines = [line for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    return {line["step"]: line["loss"] for line in lines}


def test_submit_resume_with_another_layout():
    settings = ("--set", "train.steps=4", "--set", "train.save_every=2", "--set", "train.dtype=fp32",
                "--set", "train.decay=constant")  # fmt: skip
    first = hpc_gpt("submit", *SMALL, *settings, "--wait")
    assert first.code == 0, first.stderr
    parent = newest()
    before = {path: path.stat().st_mtime_ns for path in parent.checkpoints.rglob("*")}

    further = ("--until", "steps=6")
    shown = hpc_gpt("submit", "--resume", parent.run_id, *further, "--tp", "1", "--pp", "2", "--dry-run", "--script")
    assert shown.code == 0, shown.stderr
    assert '"pp": 2' in shown.stdout
    refused = hpc_gpt("submit", "--resume", parent.run_id, "--gbs", "64")
    assert (refused.code, newest().run_id) == (2, parent.run_id)
    assert "4 steps x" in refused.stderr

    # The newest is damaged, which the submission says and the trainer finds; it goes on from the one before.
    kept = sorted((parent.checkpoints / "step-00000004").rglob("*optim_states.pt"))[0]
    with kept.open("r+b") as file:
        file.truncate(kept.stat().st_size // 2)
    before[kept] = kept.stat().st_mtime_ns

    options = ("--gpus", "1", "--tp", "1", "--dp", "1", "--zero-stage", "3", "--set", "engine.name=deepspeed-zero")
    done = hpc_gpt("submit", "--resume", parent.run_id, *further, *options, "--wait")
    assert done.code == 0, done.stderr
    assert f"resumes {parent.run_id} after step 2, as tp1-pp1-dp1" in done.stderr
    assert "note: checkpoint step-00000004 is not sound, and is passed over: " in done.stderr
    run = newest()
    assert run.path != parent.path
    said = run.attempts()[0].log.read_text()
    assert "passing over checkpoint" in said
    assert "resumed after step 2 of 6" in said
    unbroken, found = losses(parent), losses(run)
    assert sorted(found) == [3, 4, 5, 6]
    assert [found[3], found[4]] == pytest.approx([unbroken[3], unbroken[4]], abs=2e-6)

    # The parent's checkpoints are as they were, and the new run says where it comes from.
    assert {path: path.stat().st_mtime_ns for path in parent.checkpoints.rglob("*")} == before
    assert json.loads((run.path / "resumed_from.json").read_text())["path"] == str(parent.path)
    record = json.loads((run.path / "record.json").read_text())
    assert record["settings"]["resumed_from"] == {"run": parent.run_id, "step": 2}
    assert (record["tp"], record["dp"], record["zero_stage"]) == (1, 1, 3)
    status = json.loads(hpc_gpt("status", run.run_id, "--json").stdout)["runs"][0]
    assert (status["state"], status["step"]) == ("done", 6)

    # It has checkpoints of its own by now, and it is from those that another one goes on.
    again = hpc_gpt("submit", "--resume", run.run_id, "--set", "train.steps=7", "--wait")
    assert again.code == 0, again.stderr
    assert "resumed after step 6 of 7" in newest().attempts()[0].log.read_text()
