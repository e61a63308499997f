"""Records of one's own runs calibrate like rows."""

from __future__ import annotations

import dataclasses
import json

import pytest

from hpc_gpt.errors import ConfigError
from hpc_gpt.plan.row_files import read_any
from hpc_gpt.runs.record import Record
from hpc_gpt.settings.cluster import load_profile
from tests.plan.row_examples import row

NAME = "jean-zay-v100-32g"
RECORD = Record(
    run="20261120-gpt2", engine="deepspeed-3d", gpus=16, nodes=4, device="v100-32g", tp=4, pp=4, dp=1, zero_stage=0,
    micro_batch=1, micro_batches=4, global_batch=4, seq=1024, hidden=6144, layers=40, heads=32, vocab=50688,
    recompute="full", dtype="fp16", step_s=1.4, memory_reserved_gib=[25.0, 23.0, 23.0, 24.0],
)  # fmt: skip


@pytest.fixture
def profile():
    return load_profile(NAME)


def test_a_record_is_a_row_of_the_profiles_machine(tmp_path, profile):
    path = tmp_path / "record.json"
    path.write_text(RECORD.to_json())
    (entry,) = read_any(path, profile).rows
    training = entry.training
    assert (entry.id, entry.cluster) == ("20261120-gpt2", NAME)
    assert (training.tp, training.pp, training.dp, training.engine, training.micro_batches) == (
        4,
        4,
        1,
        "deepspeed-3d",
        4,
    )
    assert (entry.published.step_s, entry.published.memory_gib, entry.published.memory_kind) == (1.4, 25.0, "reserved")
    assert entry.machine.gpus_per_node == 4


def test_settings_tell_the_switches(tmp_path, profile):
    path = tmp_path / "record.json"
    settings = {"engine": {"sequence_parallel": True, "offload": "optimizer"}}
    path.write_text(dataclasses.replace(RECORD, settings=settings).to_json())
    (entry,) = read_any(path, profile).rows
    assert entry.training.sequence_parallel
    assert entry.training.offload == "optimizer"
    path.write_text(dataclasses.replace(RECORD, settings={"engine.sequence_parallel": True}).to_json())
    (entry,) = read_any(path, profile).rows
    assert entry.training.sequence_parallel


def test_the_switches_of_one_of_our_own_runs(tmp_path, profile):
    path = tmp_path / "record.json"
    engine = {"attention": "auto", "compile": "blocks", "partition": "layers", "activation_offload": True}
    settings = {"engine": engine, "model": {"tied": False}}
    path.write_text(dataclasses.replace(RECORD, settings=settings).to_json())
    (entry,) = read_any(path, profile).rows
    training = entry.training
    assert training.flash
    assert training.compiled
    assert training.activations_on_host
    assert training.stage_layers is None
    assert not training.shape.tied
    path.write_text(dataclasses.replace(RECORD, settings=settings, attention_used="math").to_json())
    assert not read_any(path, profile).rows[0].training.flash
    path.write_text(RECORD.to_json())
    assert not read_any(path, profile).rows[0].training.flash  # a V100, and no word of it


@pytest.mark.parametrize("dialect", ["hpc-gpt", "deepspeed"])
def test_one_of_our_own_runs_holds_what_our_engines_hold(tmp_path, profile, dialect):
    path = tmp_path / "record.json"
    record = dataclasses.replace(RECORD, dialect=dialect, settings={"train": {"optimizer_mode": "foreach"}})
    path.write_text(record.to_json())
    (entry,) = read_any(path, profile).rows
    assert (entry.training.bytes_rule is None) == (dialect == "hpc-gpt")
    assert entry.training.optimizer_mode == "foreach"


def test_report_json_run_folders_and_the_logs_folder(tmp_path, profile):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"schema": 1, "records": [RECORD.to_tables(), {"run": "x"}, 3]}))
    read = read_any(report, profile)
    assert (len(read.rows), len(read.left_out)) == (1, 1)
    assert "missing" in read.left_out[0].reason
    logs = tmp_path / "logs"
    for place in ("a", "b", "sweep/c"):
        (logs / place).mkdir(parents=True)
        (logs / place / "record.json").write_text(RECORD.to_json())
    assert len(read_any(logs, profile).rows) == 3
    assert len(read_any(logs / "a", profile).rows) == 1


def test_a_record_of_another_device_or_of_no_step_is_reported(tmp_path, profile):
    path = tmp_path / "record.json"
    path.write_text(dataclasses.replace(RECORD, device="a100-80g").to_json())
    assert "device is a100-80g, but profile" in read_any(path, profile).left_out[0].reason
    path.write_text(dataclasses.replace(RECORD, step_s=None).to_json())
    assert read_any(path, profile).rows[0].published.step_s is None


def test_a_record_of_a_cpu_or_another_cluster_is_left_out_by_name(tmp_path, profile):
    """A foreign log that states no device is taken for the profile's."""
    ours = dataclasses.replace(RECORD, dialect="hpc-gpt")
    for name, record in (("same", ours), ("other", ours), ("cpu", dataclasses.replace(ours, device=None)),
                         ("foreign", dataclasses.replace(RECORD, dialect="megatron", device=None))):  # fmt: skip
        run = tmp_path / "logs" / name
        run.mkdir(parents=True)
        (run / "record.json").write_text(dataclasses.replace(record, run=name).to_json())
        cluster = "local" if name == "other" else NAME
        (run / "resolved.json").write_text(json.dumps({"cluster": {"name": cluster}}))
    read = read_any(tmp_path / "logs", profile)
    assert [entry.id for entry in read.rows] == ["foreign", "same"]
    assert {entry.id: entry.reason for entry in read.left_out} == {
        "other": f"it ran on cluster 'local', not on {NAME}",
        "cpu": "it ran on a CPU, not on v100-32g",
    }
    (alone,) = read_any(tmp_path / "logs" / "other" / "record.json", profile).left_out
    assert alone == read.left_out[1]


def test_records_need_a_profile_and_rows_do_not(tmp_path):
    path = tmp_path / "record.json"
    path.write_text(RECORD.to_json())
    with pytest.raises(ConfigError, match="network between nodes"):
        read_any(path, None)
    path.write_text(json.dumps({"rows": [row()]}))
    assert len(read_any(path, None).rows) == 1


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"schema": 1}', '{"records": 3}'])
def test_what_is_neither(tmp_path, profile, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_any(path, profile)
    assert raised.value.hint


def test_a_folder_without_records(tmp_path, profile):
    with pytest.raises(ConfigError, match=r"no record\.json"):
        read_any(tmp_path, profile)
