"""`hpc-gpt plan --calibrate`, as a user has it."""

import json
import re

import pytest

from hpc_gpt.core.engines.base.training import Training
from hpc_gpt.core.files import config_dir
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.model_shape import ModelShape
from hpc_gpt.planner.machine import machine_of
from hpc_gpt.planner.step_time import predict_step
from tests.cli.command import error_of, in_process

NAME = "a100-80g-8"
SHAPE = ModelShape(4096, 32, 32, vocab=50257, seq=2048, vocab_multiple=512)
SPLITS = [(1, 1, 64), (2, 2, 16), (4, 4, 4), (8, 1, 8)]


def record(tp, pp, dp, **changes):
    """A record whose step is a third longer than data sheets predict."""
    sizes = {"tp": tp, "pp": pp, "dp": dp, "micro_batch": 2, "micro_batches": 128 // dp, "recompute": "full"}
    training = Training(SHAPE, **sizes, dtype="bf16", engine="megatron-lm")
    step_s = 4 / 3 * predict_step(training, machine_of(load_profile(NAME))).step_s
    given = {
        **sizes, "run": f"r{tp}-{pp}-{dp}", "engine": "megatron-lm", "gpus": 64, "device": "a100-80g", "seq": 2048,
        "hidden": 4096, "layers": 32, "heads": 32, "vocab": 50257, "dtype": "bf16", "step_s": step_s, **changes,
    }  # fmt: skip
    return Record(**given)


@pytest.fixture
def logs(tmp_path, own_folders):
    for each in [record(*split) for split in SPLITS]:
        (tmp_path / "logs" / each.run).mkdir(parents=True)
        (tmp_path / "logs" / each.run / "record.json").write_text(each.to_json())
    return tmp_path / "logs"


def test_constants_are_stored_in_the_users_profile(logs):
    done = in_process("plan", "--calibrate", logs, "--cluster", NAME, code=0)
    path = config_dir() / "clusters" / f"{NAME}.toml"
    assert str(path) in done.stderr
    stored = load_profile(NAME).calibration
    assert set(stored.residuals) == {f"r{tp}-{pp}-{dp}" for tp, pp, dp in SPLITS}
    assert all(abs(residual) < 0.15 for residual in stored.residuals.values())  # 0.25 by data sheets
    constants, residuals = stored.constants, sorted(stored.residuals.items(), key=lambda each: -abs(each[1]))
    lines = [f"{name:<12} {value:.4g}" for name, value in constants.items()]
    lines += [f"{residual:+8.1%}  {name}" for name, residual in residuals]
    assert done.stdout.splitlines()[:-1] == lines
    assert re.fullmatch(r"mean error over the 4 fitted step times: \d+\.\d%", done.stdout.splitlines()[-1])


def test_as_json(logs):
    done = in_process("plan", "--calibrate", logs, "--cluster", NAME, "--json", code=0)
    assert len(json.loads(done.stdout)["calibration"]["residuals"]) == len(SPLITS)


def test_the_default_profile_is_calibrated_where_none_is_named(logs):
    assert error_of(in_process("plan", "--calibrate", logs, code=2))[1] == "name one with --cluster"
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "config.toml").write_text(f'cluster = "{NAME}"\n')
    in_process("plan", "--calibrate", logs, code=0)
    assert load_profile(NAME).calibration.rows == len(SPLITS)


def test_records_of_a_cpu_calibrate_no_gpus(own_folders, tmp_path):
    (run := tmp_path / "logs" / "20261120-here").mkdir(parents=True)
    (run / "record.json").write_text(json.dumps({"schema": 1, "run": run.name, "dialect": "hpc-gpt", "step_s": 0.3}))
    (run / "resolved.json").write_text(json.dumps({"cluster": {"name": "local"}}))
    done = in_process("plan", "--calibrate", tmp_path / "logs", "--cluster", NAME, code=2)
    assert f"left out: {run.name}: it ran on cluster 'local', not on {NAME}" in done.stderr
    assert "Error: no record has the time of a step on 8 a100-80g per node\n" in done.stderr
    assert not list(config_dir().rglob("*.toml"))
