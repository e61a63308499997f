"""`hpc-gpt plan --validate` and `--calibrate`, as a user has them."""

from __future__ import annotations

import json

import pytest

from hpc_gpt.files import config_dir
from hpc_gpt.plan.machine import machine_named
from hpc_gpt.plan.row_files import rows_of
from hpc_gpt.plan.step_time import predict_step
from hpc_gpt.settings.cluster import load_profile
from tests.cli.command import error_of, in_process
from tests.plan.row_examples import row

SPLITS = [(1, 1, 64), (2, 2, 16), (4, 4, 4), (8, 1, 8)]


def made_rows(**fields):
    """Rows whose times are a third above what data sheets predict."""
    made = [row(id=f"r{tp}-{pp}-{dp}", tp=tp, pp=pp, dp=dp, **fields) for tp, pp, dp in SPLITS]
    for entry, read in zip(made, rows_of({"rows": made}, "rows").rows, strict=True):
        entry["sec_per_iter"] = 4 / 3 * predict_step(read.training, read.machine).step_s
    return made


@pytest.fixture
def rows_file(tmp_path):
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"rows": [*made_rows(), row(id="moe", moe=True), row(id="bare", hidden=None), 7]}))
    return path


@pytest.fixture
def clusters_file(tmp_path):
    path = tmp_path / "clusters.json"
    path.write_text(json.dumps({"clusters": {"ours": made_rows(source="ours"), "other": made_rows(source="other")}}))
    return path


def files_of_config():
    return sorted(str(path) for path in config_dir().rglob("*"))


def test_validate_prints_every_row_and_the_means(own_folders, rows_file):
    done = in_process("plan", "--validate", rows_file)
    assert done.code == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:8]] == ["r1-1-64", "r2-2-16", "r4-4-4", "r8-1-8", "moe", "bare", "row"]
    assert "left out: MoE is not modelled (moe True)" in done.stdout
    assert "left out: hidden is missing" in done.stdout
    (means,) = [line for line in lines if line.startswith("made ")]
    assert means.split()[1:4] == ["4", "25.0%", "0.0%"]
    assert "3 of 7 rows left out; constants of data sheets" in done.stderr
    assert files_of_config() == []


def test_validate_as_json(own_folders, rows_file, clusters_file):
    done = in_process("plan", "--validate", rows_file, "--calibrate", clusters_file, "--calibration", "ours", "--json")
    assert done.code == 0, done.stderr
    found = json.loads(done.stdout, parse_constant=pytest.fail)
    assert found["schema"] == 1
    assert [entry["id"] for entry in found["rows"]] == [
        "r1-1-64",
        "r2-2-16",
        "r4-4-4",
        "r8-1-8",
        "moe",
        "bare",
        "row 7",
    ]
    assert [entry["left_out"] is None for entry in found["rows"]] == [True] * 4 + [False] * 3
    assert {entry["calibration"] for entry in found["rows"][:4]} == {"ours"}
    assert all(abs(entry["step_error"]) < 0.15 for entry in found["rows"][:4])
    assert set(found["calibrations"]) == {"ours", "other"}
    assert found["scores"]["sources"][0]["time"]["mean"] < 0.15
    assert files_of_config() == []


def test_cross_validation_is_printed_too(own_folders, clusters_file):
    done = in_process("plan", "--validate", clusters_file, "--cross-validate")
    assert done.code == 0, done.stderr
    assert "mean absolute error fitted without the source" in done.stdout
    assert "mean absolute error fitted without the row, within its cluster" in done.stdout


def test_calibrate_stores_in_the_users_profile(own_folders, clusters_file):
    done = in_process("plan", "--calibrate", clusters_file, "--cluster", "a100-80g-8", "--calibration", "ours")
    assert done.code == 0, done.stderr
    path = config_dir() / "clusters" / "a100-80g-8.toml"
    assert str(path) in done.stderr
    stored = load_profile("a100-80g-8").calibration
    assert set(stored.residuals) == {"r1-1-64", "r2-2-16", "r4-4-4", "r8-1-8"}
    assert stored.rows == 4
    assert "mean error over the 4 fitted step times" in done.stdout
    constants = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[:3]}
    assert constants["gemm"] == pytest.approx(stored.constants["gemm"], rel=1e-3)
    validated = in_process("plan", "--validate", clusters_file, "--calibration", "a100-80g-8", "--json")
    assert validated.code == 0, validated.stderr
    assert {entry["calibration"] for entry in json.loads(validated.stdout)["rows"]} == {"a100-80g-8"}


def test_the_users_default_profile_is_calibrated_where_none_is_named(own_folders, clusters_file):
    done = in_process("plan", "--calibrate", clusters_file)
    assert done.code == 2
    assert error_of(done)[1] == "name one with --cluster"
    config_dir().mkdir(parents=True, exist_ok=True)
    (config_dir() / "config.toml").write_text('cluster = "a100-80g-8"\n')
    done = in_process("plan", "--calibrate", clusters_file, "--calibration", "other")
    assert done.code == 0, done.stderr
    assert load_profile("a100-80g-8").calibration.rows == 4


def test_without_a_name_the_cluster_of_the_profiles_machine_counts(own_folders, tmp_path):
    path = tmp_path / "clusters.json"
    opa = {"fabric": "omni-path 4x100G", "source": "opa"}
    clusters = {"opa": made_rows(**opa), "ib": made_rows(), "v100": [row(device="v100-32g", gpus_per_node=4)]}
    path.write_text(json.dumps({"clusters": clusters}))
    done = in_process("plan", "--calibrate", path, "--cluster", "a100-80g-8")
    assert done.code == 0, done.stderr
    assert "together" not in done.stderr
    assert load_profile("a100-80g-8").calibration.rows == 4
    clusters["ib too"] = clusters["ib"]
    path.write_text(json.dumps({"clusters": clusters}))
    done = in_process("plan", "--calibrate", path, "--cluster", "a100-80g-8")
    assert done.code == 0, done.stderr
    assert "note: fitted to rows of ib, ib too together; --calibration NAME takes those of one" in done.stderr


def test_records_calibrate_too(own_folders, tmp_path):
    from hpc_gpt.runs.record import Record

    machine = machine_named("a100-80g", 8, "infiniband 8x200G")
    (read,) = rows_of({"rows": [row()]}, "rows").rows
    record = Record(
        run="20261120-mine", engine="deepspeed-3d", gpus=64, device=machine.device, tp=4, pp=4, dp=4, zero_stage=1,
        micro_batch=2, micro_batches=32, global_batch=256, seq=2048, hidden=4096, layers=32, heads=32, vocab=50688,
        recompute="full", dtype="bf16", step_s=1.2 * predict_step(read.training, read.machine).step_s,
    )  # fmt: skip
    run = tmp_path / "logs" / "20261120-mine"
    run.mkdir(parents=True)
    (run / "record.json").write_text(record.to_json())
    done = in_process("plan", "--calibrate", tmp_path / "logs", "--cluster", "a100-80g-8", "--json")
    assert done.code == 0, done.stderr
    assert list(json.loads(done.stdout)["calibration"]["residuals"]) == ["20261120-mine"]
    assert load_profile("a100-80g-8").calibration.rows == 1


def test_records_of_a_cpu_calibrate_no_gpus(own_folders, tmp_path, rows_file):
    run = tmp_path / "logs" / "20261120-here"
    run.mkdir(parents=True)
    (run / "record.json").write_text(json.dumps({"schema": 1, "run": run.name, "dialect": "hpc-gpt", "step_s": 0.3}))
    (run / "resolved.json").write_text(json.dumps({"cluster": {"name": "local"}}))
    left_out = f"left out: {run.name}: it ran on cluster 'local', not on a100-80g-8"
    done = in_process("plan", "--calibrate", tmp_path / "logs", "--cluster", "a100-80g-8")
    assert done.code == 2
    assert error_of(done)[0] == f"no row is of profile a100-80g-8: 8 a100-80g per node; {left_out}"
    assert files_of_config() == []
    done = in_process("plan", "--validate", rows_file, "--calibrate", tmp_path / "logs", "--cluster", "a100-80g-8")
    assert done.code == 0, done.stderr
    assert left_out in done.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [("{}", "neither rows nor clusters"), ("[", "no JSON"), ('{"rows": {"a": 1}}', "neither rows nor clusters")],
)
def test_a_file_of_neither_shape_is_one_line_and_a_hint(own_folders, tmp_path, text, words):
    path = tmp_path / "x.json"
    path.write_text(text)
    done = in_process("plan", "--validate", path)
    assert done.code == 2
    message, hint = error_of(done)
    assert words in message
    assert '"rows"' in hint
    assert not done.stdout


def test_what_calibrating_needs(own_folders, rows_file, clusters_file, tmp_path):
    done = in_process("plan", "--calibrate", clusters_file, "--cluster", "a100-80g-8", "--calibration", "none")
    assert done.code == 2
    assert "ours, other" in error_of(done)[1]
    done = in_process("plan", "--calibrate", rows_file, "--cluster", "jean-zay-v100-32g")
    assert done.code == 2
    assert "no row is of profile jean-zay-v100-32g: 4 v100-32g per node" in error_of(done)[0]
    still = tmp_path / "still.json"
    still.write_text(json.dumps({"rows": [row(sec_per_iter=None)]}))
    done = in_process("plan", "--calibrate", still, "--cluster", "a100-80g-8")
    assert done.code == 2
    assert "time of a step" in error_of(done)[0]
    done = in_process("plan", "--validate", rows_file, "--calibration", "a100-80g-8")
    assert done.code == 2
    assert "has no [calibration]" in error_of(done)[0]
    assert files_of_config() == []
