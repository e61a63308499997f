"""A row of each published folder trains here, shrunken, with its switches."""

import math

import pytest

from hpc_gpt.core.files import read_json_lines
from hpc_gpt.report.published_tables import only_sweep, sweep_lines
from tests.cli.command import hpc_gpt
from tests.launcher.local.conftest import newest
from tests.made_runs import read_run

# The row of each folder with the most switches on, and what must be seen of it: settings by table and key.
ROWS = {
    "gpt2-meg-ds-3d": ("48b", 4, {"engine.name": "deepspeed-3d", "engine.recompute": "full"}),
    "gpt2-meg-ds-zero": ("full-48b", 4, {"engine.offload": "full", "engine.zero_stage": 3, "data.source": "megatron"}),
    "gpt2-hf-ds": ("max-23b", 2, {"engine.name": "hf-deepspeed", "engine.offload": "full"}),
    "mingpt-fsdp": ("ckpt-prefetch-b64", 2, {"engine.prefetch": True, "train.dtype": "fp16", "model.tied": False}),
    "colab-ladder": ("workers", 1, {"engine.compile": "whole", "data.source": "stream", "data.workers": 2}),
    "training-parallelism": ("sharded-optimizer", 2, {"engine.sharded_optimizer": True, "train.dtype": "bf16"}),
    "memory-ladder": ("fsdp", 2, {"engine.name": "fsdp", "train.optimizer_mode": "for-loop", "data.source": "random"}),
}


@pytest.mark.long
@pytest.mark.parametrize("folder", ROWS)
def test_a_row_trains_and_keeps_its_switches(folder):
    row, ranks, switches = ROWS[folder]
    done = hpc_gpt("submit", folder, "--row", row, "--smoke", "--wait")
    run = newest()
    logs = "\n".join(attempt.log.read_text(errors="replace") for attempt in run.attempts() if attempt.log.exists())
    assert done.code == 0, done.stderr + logs
    # The shrunken layout beside the real one.
    assert f"smoke: {folder}-{row}" in done.stderr
    assert "->" in done.stderr
    record = read_run(run)
    assert (record.ended, record.gpus) == ("done", ranks)
    for key, value in switches.items():
        table, name = key.split(".")
        assert record.settings[table][name] == value, key
    losses = [line["loss"] for attempt in run.attempts() for line in read_json_lines(attempt.metrics)]
    assert len(losses) == 5
    assert all(map(math.isfinite, losses))
    # And its row is found again, with the source's figures in a line of their own.
    assert only_sweep([record]) == folder
    [line] = [line for line in sweep_lines(folder, [record]).lines if line.record]
    assert (line.row.name, line.notes) == (row, "smoke run")
