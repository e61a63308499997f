"""Records of our own run folders: every state a run can be in, and every file half there."""

import json
import os
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.core.errors import ConfigError
from hpc_gpt.core.runs.record import Record
from hpc_gpt.report.why import explain
from tests.made_runs import add_attempt, make_run, metrics_line, read_run, with_attempt


def test_shards_with_replicas_are_in_the_settings(logs):
    sizes = {"layout__gpus": 4, "layout__tp": 1, "layout__pp": 1, "layout__dp": 4, "layout__shard": 2}
    hybrid = make_run(logs, experiment="llama-tiny", engine__name="fsdp", engine__zero_stage=None, **sizes)
    assert read_run(hybrid).settings["layout"] == {"shard": 2}
    plain = make_run(logs, experiment="llama-tiny")
    assert "layout" not in read_run(plain).settings
    text = (plain.path / "resolved.json").read_text()
    assert '"shard"' not in text
    assert "gather_blocks" not in text


def test_the_zero_stage_is_the_one_that_ran(logs):
    run = make_run(logs, engine__zero_stage=0, train__dtype="fp32")
    record = read_run(run)
    assert (record.zero_stage, record.settings["engine"]["zero_stage"]) == (1, 0)
    assert "engine.zero_stage is 0, which runs as ZeRO 1" in record.flags
    # By version 0.4.
    (run.path / "ds_config.json").write_text('{"zero_optimization": {"stage": 0}}')
    assert read_run(run).zero_stage == 0


# --- states


# An hour, then a hundred minutes; an attempt with slow steps, or with rare lines, may be silent for longer.
@pytest.mark.parametrize(
    ("silent_s", "step_s", "settings", "ended"),
    [
        (3600, 5.0, {}, "unknown"),
        (3600, 870.0, {}, "running"),
        (6000, 60.0, {"train__log_every": 1}, "unknown"),
        (6000, 60.0, {"train__log_every": 100}, "running"),
    ],
)
def test_a_silent_attempt_is_unknown_unless_it_may_be_silent(logs, silent_s, step_s, settings, ended):
    attempt = add_attempt(run := make_run(logs, **settings), [metrics_line(1, step_s=step_s)], None)
    for path in (attempt.metrics, attempt.folder):
        os.utime(path, (time.time() - silent_s,) * 2)
    assert read_run(run).ended == ended


# --- what is half there


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(st.data())
def test_a_metrics_file_cut_anywhere_is_read_to_its_last_line(tmp_path_factory, data):
    run = make_run(tmp_path_factory.mktemp("cut"))
    whole = "".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 9))
    cut = data.draw(st.integers(0, len(whole)))
    add_attempt(run, [whole[:cut]], None)
    record = read_run(run)
    lines = whole[:cut].count("\n")
    assert (record.tokens_total or 0) // (32 * 128) in (lines, lines + 1)
    Record.from_tables(json.loads(record.to_json()))


def test_a_damaged_resolved_json_is_an_error(run):
    (run.path / "resolved.json").write_text("{")
    with pytest.raises(ConfigError):
        read_run(run)


def test_no_secret_gets_into_the_record_of_a_run(run):
    resolved = json.loads((run.path / "resolved.json").read_text())
    resolved["data"]["path"] = "https://me:abcd1234@host/tokens"
    (run.path / "resolved.json").write_text(json.dumps(resolved))
    add_attempt(run, [metrics_line(1)], ended="error", cause="no login with HF_TOKEN=abcd1234")
    record = read_run(run)
    assert record.cause == "no login with HF_TOKEN=[removed]"
    assert "abcd1234" not in record.to_json()


# --- mixtures of experts


def of_experts(step: int, **figures) -> dict:
    return metrics_line(step, **{"balance_loss": 1.25, "expert_load": 1.5, "experts_dead": 0, **figures})


def test_a_mixture_has_the_last_steps_balance_and_active_flops(logs):
    run = with_attempt(make_run(logs, experiment="moe-tiny"), [of_experts(1, experts_dead=3), of_experts(2)])
    record = read_run(run)
    assert (record.balance_loss, record.expert_load, record.experts_dead) == (1.25, 1.5, 0)
    shape = run.resolved().model
    assert (record.params, record.params_active) == (shape.params, shape.params_active)
    per_token = 6 * shape.multiplied + 12 * shape.layers * shape.hidden * shape.seq
    assert record.tflops_model == pytest.approx(per_token * record.tokens_per_s / record.gpus / 1e12)
    assert record.tflops_seed == pytest.approx(6 * shape.params_active * record.tokens_per_s / record.gpus / 1e12)
    dense = read_run(with_attempt(make_run(logs), 2))
    assert (dense.balance_loss, dense.expert_load, dense.experts_dead) == (None, None, None)


@pytest.mark.parametrize(
    ("loads", "flagged"),
    [([3.0] * 60, True), ([1.0] * 50 + [3.5] * 50, True), ([3.5] * 49, False), ([4.0] * 60 + [2.9], False)],
)
def test_an_expert_with_most_tokens_is_flagged(logs, loads, flagged):
    """With 2 of 8 experts a token at most 4; from 3 on, over the last 50 steps."""
    run = make_run(logs, experiment="moe-tiny")
    with_attempt(run, [of_experts(step, expert_load=load) for step, load in enumerate(loads, 1)])
    text = (
        "one of 8 experts of a layer takes most tokens: expert_load was at least 3 in the last 50 lines of steps, of at"
    )
    assert [flag for flag in read_run(run).flags if "experts" in flag] == [f"{text} most 4"] * flagged
    assert [note for note in explain(run.run_id, logs).notes if "experts" in note] == [f"{text} most 4"] * flagged


def test_experts_of_which_half_are_used_are_never_crowded(logs):
    """With 8 of 8 the load is always 1, with 4 of 8 at most 2."""
    for used, load in ((8, 1.0), (4, 1.9)):
        run = make_run(logs, experiment="moe-tiny", model__experts_per_token=used)
        with_attempt(run, [of_experts(step, expert_load=load) for step in range(1, 61)])
        assert not [flag for flag in read_run(run).flags if "experts" in flag]
