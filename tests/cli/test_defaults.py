"""Without EXPERIMENT: the default experiment, or with a model the defaults of every key. And --smoke runs here."""

import json
import os
import shlex
from pathlib import Path

import pytest

from hpc_gpt.core.settings.experiment import Train
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.launcher import submission
from tests.cli.command import in_process, planned, profile_of, resolved_of

JEAN_ZAY = ("--cluster", "jean-zay-v100-32g")
GPT2_DDP = ("--engine", "ddp", "--model", "gpt2", "--gpus", "8", "--pp", "1", "--tp", "1")
SIZES = ("--set", "model.hidden=64", "--set", "model.layers=2", "--set", "model.heads=2")


def test_with_a_model_no_setting_of_the_default_experiment_leaks():
    done = in_process("render", *GPT2_DDP, *JEAN_ZAY)
    resolved = resolved_of(done)
    plain = Train(dtype="fp16", save_minutes=30.0, keep_last=3)
    resolved["train"]["optimizer_mode"] = None
    assert resolved["train"] == json.loads(json.dumps(vars(plain)))
    assert (resolved["name"], resolved["batch"]["global_batch"]) == ("gpt2", 1024)
    assert resolved["job"]["signal_lead_s"] == 120  # the profile's
    assert done.stderr.splitlines()[0] == (
        "no EXPERIMENT: the defaults, not gpt2-meg-ds-3d's settings: engine ddp, fp16 as v100-32g has no bf16, "
        "batch 1024 as in plan, 1,000 steps, lr 0.0003"
    )


@pytest.mark.parametrize(
    ("arguments", "sizes", "why"),
    [
        (("--model", "gpt2", "--gpus", "4"), (1, 256, 1024), "batch 1024 as in plan, "),
        (("--model", "gpt2", "--gpus", "12", *JEAN_ZAY), None, "batch 1020 as in plan, "),
        (("--model", "gpt2", "--gpus", "2048"), (1, 1, 2048), "batch 2048, one sample for each of dp 2048, "),
        (("--model", "gpt2", "--tp", "2", "--cluster", "local"), (1, 2, 8), "batch 8, one sample a rank as they "),
        (("--model", "gpt2", "--gpus", "4", "--mbs", "2"), (2, 1, 8), "batch 8, 1,000 steps"),
    ],
)
def test_without_a_batch_it_is_the_one_that_plan_takes(arguments, sizes, why, monkeypatch):
    monkeypatch.setattr("hpc_gpt.core.machine.find_gpus.ask_gpus", lambda: ([], ""))
    done = in_process("render", *arguments)
    batch = resolved_of(done)["batch"]
    assert why in done.stderr.splitlines()[0]
    assert sizes is None or tuple(batch.values()) == sizes
    if "local" in arguments:
        monkeypatch.setattr("hpc_gpt.core.machine.find_gpus.ask_gpus", lambda: ([{"name": "NVIDIA H200"}], ""))
        assert resolved_of(in_process("render", *arguments))["batch"]["global_batch"] == 1024


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        (("gpt2", "--gpus", "8"), "ddp"),
        (("gpt2-xl", "--gpus", "16", "--mbs", "2", "--gbs", "64"), "ddp"),
        (("gpt2-xl", "--gpus", "16", "--gas", "1", "--engine", "fsdp"), "fsdp"),
        pytest.param(("48b", "--gpus", "64"), "deepspeed-3d", marks=pytest.mark.long),
        pytest.param(("llama3.1-8b", "--nodes", "2", "--set", "engine.recompute=full"), "fsdp", marks=pytest.mark.long),
    ],
)
def test_the_shortest_submit_is_plans_best(asked, engine):
    """One rule chooses engine, layout and settings for both, whatever is given."""
    asked = ("--cluster", "a100-80g-8", "--model", *asked)
    done = in_process("render", *asked)
    resolved = resolved_of(done)
    # With --gas alone plan compares micro-batches, and submit's rule takes one sample: they agree on that batch.
    batch = ("--gbs", resolved["batch"]["global_batch"]) if "--gas" in asked else ()
    best = planned(*asked, *batch)["candidates"][0]
    ours = {**resolved["layout"], **resolved["engine"], **resolved["batch"], "engine": resolved["engine"]["name"]}
    ours.setdefault("shard", None)
    names = ("engine", "tp", "pp", "dp", "shard", "recompute", "offload", "sequence_parallel", "sharded_optimizer",
             "zero_stage", "micro_batch", "micro_batches")  # fmt: skip
    assert {name: ours[name] for name in names} == {name: best[name] for name in names}
    assert ours["engine"] == engine
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("from plan: ")]
    assert (f"engine {engine}" in line) is ("--engine" not in asked)
    assert (f"micro-batch {best['micro_batch']}" in line) is ("--mbs" not in asked)


@pytest.mark.parametrize(
    ("asked", "engine"),
    [
        (("gpt2",), "ddp"),
        (("gpt2", "--tp", "2"), "deepspeed-3d"),
        (("gpt2", "--zero-stage", "3"), "deepspeed-zero"),
    ],
)
def test_without_a_device_the_simplest_engine_is_taken(asked, engine):
    done = in_process("render", "--cluster", "generic-slurm", "--model", *asked)
    assert resolved_of(done)["engine"]["name"] == engine
    assert "from plan" not in done.stderr


def test_sizes_are_a_model_and_gpus_are_no_longer_the_source():
    resolved = resolved_of(in_process("render", *SIZES))
    assert (resolved["name"], resolved["gpus"], resolved["engine"]["name"]) == ("2x64", 4, "ddp")
    assert resolved_of(in_process("render", "--set", "model.hidden=4096"))["gpus"] == 64


@pytest.mark.parametrize(
    ("profile", "given", "dtype"),
    [
        ('extends = "jean-zay-v100-32g"', (), "fp16"),
        ('extends = "jean-zay-v100-32g"', ("--set", "train.dtype=fp32"), "fp32"),
        ('extends = "generic-slurm"', (), "bf16"),
        ('device = "mine"\n[machine]\npeak_tflops = { fp32 = 10.0, fp16 = 80.0 }', (), "fp16"),
    ],
)
def test_fp16_is_taken_if_the_device_is_known_to_have_no_bf16(profile, given, dtype):
    profile_of("mine", profile)
    done = in_process("render", "--model", "gpt2", "--gpus", "1", "--cluster", "mine", *given)
    assert resolved_of(done)["train"]["dtype"] == dtype
    assert ("has no bf16" in done.stderr) is (dtype == "fp16")


def test_without_a_model_it_is_the_default_experiment():
    done = in_process("render", "--gpus", "64", "--pp", "16", "--engine", "deepspeed-3d", *JEAN_ZAY)
    assert done.stderr.startswith(
        "no EXPERIMENT: takes gpt2-meg-ds-3d --row 48b, tp4-pp16-dp1 on 64 GPUs of jean-zay-v100-32g\n"
    )
    assert (resolved_of(done)["train"]["lr"], resolved_of(done)["train"]["dtype"]) == (1.5e-4, "fp16")
    named = in_process("render", "gpt2-meg-ds-3d", "--model", "18b", *JEAN_ZAY)
    assert resolved_of(named)["train"]["lr"] == 1.5e-4
    assert "no EXPERIMENT" not in named.stderr


@pytest.mark.parametrize(
    ("words", "taken"),
    [
        (("one",), "takes one/own.toml"),
        (("rows.toml",), "takes row a, the first of 2 rows that can run; --row NAME takes another, --sweep all"),
        (("rows.toml", "--row", "b"), ""),
    ],
)
def test_a_file_and_a_row_that_nothing_names_are_named(words, taken, tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "one/own.toml").write_text('extends = "demo"\n')
    rows = '"a" = { train.lr = 1e-3 }\n"b" = { train.lr = 2e-3 }\n"c" = { impossible = "no such node" }\n'
    (tmp_path / "rows.toml").write_text(f'extends = "demo"\n[rows]\n{rows}')
    done = in_process("render", *words, "--cluster", "local", cwd=tmp_path, code=0)
    assert [line for line in done.stderr.splitlines() if line.startswith("takes")] == [taken] * bool(taken)


def test_the_largest_model_is_of_any_engine_and_next_keeps_it():
    done = in_process("plan", "--max-model", "--engine", "fsdp", "--gpus", "8", *JEAN_ZAY)
    words = shlex.split(done.stderr.removeprefix("next: "))
    assert words[words.index("--engine") + 1] == "fsdp"
    in_process(*words[1:], code=0)


def test_a_smoke_run_is_here_wherever_the_users_cluster_is():
    profile_of("mine", 'extends = "a100-80g-8"\n', default=True)
    done = in_process("submit", "gpt2-meg-ds-3d", "--smoke", "--dry-run", "--script")
    assert "would run: bash job.sh, for each of 4 ranks\n" in done.stderr
    assert resolved_of(done)["cluster"]["name"] == "local"
    there = in_process("render", "gpt2-meg-ds-3d", "--smoke", "--cluster", "mine")
    assert resolved_of(there)["cluster"]["name"] == "mine"
    # It is shown beside the real run, whose layout needs the user's own nodes.
    wide = in_process("submit", "gpt2-meg-ds-3d", "--smoke", "--dry-run", "--script", "--tp", "8", "--pp", "8")
    assert "tp8-pp8-dp1 on 64 GPUs  ->  tp2-pp2-dp1 on 4 GPUs" in wide.stderr


def test_a_run_of_the_defaults_says_so_in_its_folder(monkeypatch):
    def write(prepared, logs, parent, now):
        (run := submission.write_run(prepared, logs, {})).add_submission({"scheduler": "local", "job_id": None})
        return submission.SubmittedRun(run, run.resolved(), "7")

    monkeypatch.setattr("hpc_gpt.cli.submitting.submit_run", write)
    done = in_process("submit", *SIZES, "--gpus", "1", "--cluster", "local", code=0)
    dry = in_process("submit", *SIZES, "--gpus", "1", "--cluster", "local", "--dry-run", "--script")
    about_data = [line for line in done.stderr.splitlines() if line.startswith(("data: ", "note: the data have "))]
    assert len(about_data) == 2
    assert set(about_data) < set(dry.stderr.splitlines())
    (run,) = Path(os.environ["HPC_GPT_LOGS"]).glob("2x64/*/")
    assert (run / "experiment.toml").read_text().startswith("# No EXPERIMENT was named: the defaults")
    assert load_experiment(str(run / "experiment.toml")).model.hidden == 64
