"""`hpc-gpt bench --ladder`, run small on this machine."""

import json

import pytest

from tests.cli.command import hpc_gpt, in_process

SMALL = ("--smoke", "--steps", "3", "--set", "engine.compile=none",
         "--set", "train.dtype=fp32")  # fmt: skip


@pytest.mark.long
def test_rungs_run_in_turn_and_are_records_of_their_sweep(tmp_path):
    done = hpc_gpt("bench", "--ladder", "memory", "--row", "batch128,for-loop", *SMALL, "--json", code=0)
    page = json.loads(done.stdout)
    assert [record["settings"]["sweep"]["row"] for record in page["records"]] == ["batch128", "for-loop"]
    assert [record["ended"] for record in page["records"]] == ["done", "done"]
    assert all(record["tokens_per_s"] > 0 for record in page["records"])
    assert {record["steps_used"] + record["warmup_steps"] for record in page["records"]} == {3}
    # There is no device memory on a CPU, and a shrunken run is no measure.
    assert {str(record["memory_allocated_gib"]) for record in page["records"]} == {"None"}
    assert (page["ladder"]["ratio"], page["ladder"]["time"]) == (None, None)
    assert [saving["switched_on"] for saving in page["ladder"]["savings"]][1].endswith("for-loop optimizer")
    assert "no GPU here, so no memory is measured" in done.stderr
    shown = in_process("report", tmp_path / "logs")
    assert "GPU Memory Peak (MB)" in shown.stdout
    assert shown.stdout.count("smoke run") == 2
