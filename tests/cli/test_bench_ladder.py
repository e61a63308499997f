"""`hpc-gpt bench --ladder`, run small on this machine."""

import json

import pytest

from tests.cli.command import error_of, hpc_gpt, in_process

SMALL = ("--smoke", "--steps", "3", "--set", "engine.compile=none", "--set", "train.matmul_rate=false",
         "--set", "train.dtype=fp32")  # fmt: skip


def test_rungs_run_one_after_the_other_and_are_records_of_their_sweep(tmp_path):
    done = hpc_gpt("bench", "--ladder", "memory", "--row", "batch128,for-loop", *SMALL, "--json")
    assert done.code == 0, done.stderr
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


@pytest.mark.parametrize(
    ("words", "message", "hint"),
    [
        (["memory", "demo"], "--ladder and EXPERIMENT do not go together", "without EXPERIMENT"),
        (["memory", "--engines", "ddp"], "--ladder and --engines do not go together", "two commands"),
        (["memory", "--mbs", "1,2"], "--ladder and --mbs do not go together", "--set"),
        (["memory", "--peer", "a=b"], "--ladder and --peer do not go together", "two commands"),
        (["colab", "--row", "flsh"], "no row 'flsh'", "flash"),
        (["colab", "--steps", "0"], "--steps is 0", "above 0"),
        (["colab", "--set", "train.stepss=3"], "train.stepss", "help keys"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(tmp_path, words, message, hint):
    done = in_process("bench", "--smoke", "--ladder", *words)
    said, advice = error_of(done)
    assert done.code == 2
    assert message in said
    assert hint in advice
    assert not (tmp_path / "logs").exists()


def test_a_ladder_there_is_not():
    done = in_process("bench", "--ladder", "rope")
    assert done.code == 2
    assert "'colab', 'memory', 'mingpt'" in done.stderr
