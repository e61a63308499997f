"""Records of runs as measured steps, by which a profile is calibrated."""

import dataclasses
import json

import pytest

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.core.settings.cluster import load_profile
from hpc_gpt.core.settings.decide import resolve
from hpc_gpt.core.settings.experiment_file import load_experiment
from hpc_gpt.planner.measured_steps import read_measured_steps
from hpc_gpt.reader.runs.own_run import figures_asked

NAME = "jean-zay-v100-32g"
RECORD = Record(
    run="20261120-gpt2", engine="deepspeed-3d", gpus=16, nodes=4, device="v100-32g", tp=4, pp=4, dp=1, zero_stage=0,
    micro_batch=1, micro_batches=4, global_batch=4, seq=1024, hidden=6144, layers=40, heads=32, vocab=50688,
    recompute="full", dtype="fp16", step_s=1.4, memory_reserved_gib=[25.0, 23.0, 23.0, 24.0],
)  # fmt: skip


@pytest.fixture
def profile():
    return load_profile(NAME)


def rows(path, profile):
    return read_measured_steps(path, profile)[0]


def left_out(path, profile):
    return read_measured_steps(path, profile)[1]


def test_a_record_is_a_step_of_the_profiles_machine(tmp_path, profile):
    (path := tmp_path / "record.json").write_text(RECORD.to_json())
    (entry,) = rows(path, profile)
    training = entry.training
    assert entry.id == "20261120-gpt2"
    assert (training.tp, training.pp, training.dp, training.engine, training.micro_batches) == (
        4, 4, 1, "deepspeed-3d", 4,
    )  # fmt: skip
    assert (entry.step_s, entry.machine.gpus_per_node) == (1.4, 4)


def test_a_mixtures_record_has_ep_and_experts(tmp_path, profile):
    path = tmp_path / "record.json"
    experts = {"experts": 8, "experts_per_token": 2, "expert_ffn": 512}
    record = dataclasses.replace(RECORD, tp=2, pp=2, dp=4, ep=4, engine="megatron-lm", params=100, params_active=50)
    path.write_text(dataclasses.replace(record, settings={"model": experts, "layout": {"etp": 1}}).to_json())
    (entry,) = rows(path, profile)
    assert str(entry.training.layout) == "tp2-pp2-dp4-ep4-etp1"
    assert entry.training.shape.experts == 8
    path.write_text(record.to_json())
    assert "whose shape the record does not state" in left_out(path, profile)[0].reason


def test_the_switches_of_one_of_our_own_runs(tmp_path, profile):
    path = tmp_path / "record.json"
    engine = {"attention": "auto", "compile": "blocks", "partition": "layers", "activation_offload": True}
    settings = {"engine": engine, "model": {"tied": False}}
    path.write_text(dataclasses.replace(RECORD, settings=settings).to_json())
    (entry,) = rows(path, profile)
    training = entry.training
    assert training.flash
    assert training.compiled
    assert training.activations_on_host
    assert training.stage_layers is None
    assert not training.shape.tied
    path.write_text(dataclasses.replace(RECORD, settings=settings, attention_used="math").to_json())
    assert not rows(path, profile)[0].training.flash
    path.write_text(RECORD.to_json())
    assert not rows(path, profile)[0].training.flash  # a V100, and no word of it


def test_another_programs_record_is_predicted_as_the_nearest(tmp_path, profile):
    path = tmp_path / "record.json"
    for engine, stage, pp, expected in (("gpt-neox", 0, 4, "megatron-lm"), ("gpt-neox", 1, 4, "deepspeed-3d"),
                                        (None, 3, 1, "deepspeed-zero"), ("fsdp", 0, 1, "fsdp")):  # fmt: skip
        path.write_text(dataclasses.replace(RECORD, engine=engine, zero_stage=stage, pp=pp, gpus=4 * pp).to_json())
        assert [entry.training.engine for entry in rows(path, profile)] == [expected]
    path.write_text(dataclasses.replace(RECORD, engine="gpt-neox", zero_stage=2).to_json())
    assert "no engine shards gradients" in left_out(path, profile)[0].reason


def test_what_our_own_run_trained_is_what_its_settings_say(tmp_path, profile):
    """The training of a record is that of the resolved experiment, but for what no record states."""
    resolved = resolve(load_experiment("llama-tiny", {"train.dtype": "fp16"}), profile)
    settings = {"model": resolved.model.table()}
    record = dataclasses.replace(RECORD, dialect="hpc-gpt", **figures_asked(resolved), settings=settings)
    (path := tmp_path / "record.json").write_text(dataclasses.replace(record, dtype="fp16").to_json())
    (entry,) = rows(path, profile)
    assert entry.training.shape == dataclasses.replace(resolved.model, rope_scaling=None)
    assert hash(entry.training)  # the shortest step of each training counts
    assert entry.training.layout == resolved.layout
    assert entry.training.micro_batches == resolved.batch.micro_batches


def test_report_json_run_folders_and_the_logs_folder(tmp_path, profile):
    report = tmp_path / "report.json"
    report.write_text(json.dumps({"schema": 1, "records": [RECORD.to_tables(), {"run": "x"}, 3]}))
    assert len(rows(report, profile)) == 1
    (entry,) = left_out(report, profile)
    assert "missing" in entry.reason
    logs = tmp_path / "logs"
    for place in ("a", "b", "sweep/c"):
        (logs / place).mkdir(parents=True)
        (logs / place / "record.json").write_text(RECORD.to_json())
    assert (len(rows(logs, profile)), len(rows(logs / "a", profile))) == (3, 1)


def test_a_record_of_another_device_or_of_no_step_is_reported(tmp_path, profile):
    (path := tmp_path / "record.json").write_text(dataclasses.replace(RECORD, device="a100-80g").to_json())
    assert "device is a100-80g, but profile" in left_out(path, profile)[0].reason
    path.write_text(dataclasses.replace(RECORD, step_s=None).to_json())
    assert rows(path, profile)[0].step_s is None


def test_a_record_of_a_cpu_or_another_cluster_is_left_out(tmp_path, profile):
    """A foreign log that states no device is taken for the profile's."""
    ours = dataclasses.replace(RECORD, dialect="hpc-gpt")
    for name, record in (("same", ours), ("other", ours), ("cpu", dataclasses.replace(ours, device=None)),
                         ("foreign", dataclasses.replace(RECORD, dialect="megatron", device=None))):  # fmt: skip
        (run := tmp_path / "logs" / name).mkdir(parents=True)
        (run / "record.json").write_text(dataclasses.replace(record, run=name).to_json())
        cluster = "local" if name == "other" else NAME
        (run / "resolved.json").write_text(json.dumps({"cluster": {"name": cluster}}))
    measured, others = read_measured_steps(tmp_path / "logs", profile)
    assert [entry.id for entry in measured] == ["foreign", "same"]
    assert {entry.id: entry.reason for entry in others} == {
        "other": f"it ran on cluster 'local', not on {NAME}",
        "cpu": "it ran on a CPU, not on v100-32g",
    }
    (alone,) = left_out(tmp_path / "logs" / "other" / "record.json", profile)
    assert alone == others[1]


@pytest.mark.parametrize("text", ["", "3", "[]", "{}", '{"schema": 1}', '{"records": 3}', '{"rows": []}'])
def test_what_is_neither(tmp_path, profile, text):
    (path := tmp_path / "x.json").write_text(text)
    with pytest.raises(ConfigError) as raised:
        read_measured_steps(path, profile)
    assert raised.value.hint


def test_a_folder_without_records(tmp_path, profile):
    with pytest.raises(ConfigError, match=r"no record\.json"):
        read_measured_steps(tmp_path, profile)
