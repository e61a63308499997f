"""Small files of a run: what a key cannot have is left out, whoever wrote it, and nothing else is."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpc_gpt.core.runs.stored import _KEYS, read_stored, read_stored_lines

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FILES = sorted(set(_KEYS) - {"metrics", "submissions", "cancelled"})


def check(given_tables, found, kinds):
    for key, kind in kinds.items():
        value = found.get(key)
        if value is None:
            assert key not in found or given_tables[key] is None
        else:
            check_value(value, kind)


def check_value(value, kind):
    if kind in (int, float):
        assert not isinstance(value, bool)
        assert math.isfinite(value)
        assert value >= 0
        float(value)
    elif kind in (str, bool, dict):
        assert type(value) is kind
    elif isinstance(kind, dict):
        for key in value.keys() & kind.keys() - {key for key in value if value[key] is None}:
            check_value(value[key], kind[key])
    elif isinstance(kind, list):
        for each in value:
            check_value(each, kind[0])
    else:
        assert kind.fullmatch(value)


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_value_of_a_listed_key_can_be_used_or_is_left_out(tmp_path, name, data):
    path = tmp_path / f"{name}.json"
    tables = {key: data.draw(VALUES, key) for key in (*_KEYS[name], "of_another_version")}
    path.write_text(json.dumps(tables))
    found = read_stored(path)
    check(tables, found, _KEYS[name])
    other = tables["of_another_version"]
    assert json.dumps(found["of_another_version"]) == json.dumps(other)


def test_sound_values_stay_as_they_are(tmp_path: Path) -> None:
    end = {"ended": "done", "cause": None, "step": 7, "time": 1.5e9, "requeue": False, "node": "n-1.site"}
    (tmp_path / "ended.json").write_text(json.dumps(end))
    assert read_stored(tmp_path / "ended.json") == end
    lines = tmp_path / "submissions.jsonl"
    lines.write_text(
        '{"job_id": 4711, "time": 3}\nhalf a li\n{"job_id": "../../x", "time": "now"}\n{"job_id": "12_3"}\n'
    )
    assert read_stored_lines(lines) == [{"job_id": "4711", "time": 3}, {}, {"job_id": "12_3"}]
    assert read_stored_lines(lines, first_bytes=40) == [{"job_id": "4711", "time": 3}]


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "3", '{"a": ' * 10_000])
def test_a_file_that_is_missing_or_no_object_is_empty(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "ended.json").write_text(text)
    assert read_stored(tmp_path / "ended.json") == {}


def test_an_object_inside_loses_only_the_keys_that_are_not_sound(tmp_path: Path) -> None:
    path = tmp_path / "predicted.json"
    path.write_text(
        '{"calibrated": 1, "step": {"step_s": "fast", "band": 0.2, "later": [1]}, "memory_gib": {"stages": '
        '[{"allocated": 3}, {"allocated": -1, "reserved": 4}]}}'
    )
    stages = [{"allocated": 3}, {"reserved": 4}]
    assert read_stored(path) == {"step": {"band": 0.2, "later": [1]}, "memory_gib": {"stages": stages}}
    path.write_text('{"memory_gib": {"stages": [3]}, "step": []}')
    assert read_stored(path) == {"memory_gib": {}}


# By the name of a file that this version or an earlier one writes: the keys that it may hold damaged.
WRITTEN = """
attempt: job_id slurm_cluster gpus started boot uptime
submissions: job_id slurm_cluster time folder attempts_before lost element clusters
ended: ended cause step time node code elapsed_s
exit: code seconds
next: ended attempt_ended cause why time node exclude saved_step pause_s begin retries elapsed_s
seen: step count
job: job_id time pid_start
left: state
trainer: resumed_step device attention_failed experts_by_loop
measured: skipped_shards
start: start_s start_parts
metrics: step step_s steps_planned time
loss: time
complete: step files data
sweep: id varied round
provenance: data_beside experiment_file versions init
resumed_from: path step branch
branch: path step
predicted: calibrated memory_gib memory_gib.stages step step.step_s step.band
preflight: findings
bench: bench records rows
rows: rounds rows
cancelled: user time
queue: words time
"""


@pytest.mark.parametrize("line", WRITTEN.strip().splitlines(), ids=lambda line: line.partition(":")[0])
def test_what_a_written_key_cannot_be_is_left_out(line: str, tmp_path: Path) -> None:
    name, keys = line.split(": ")
    for key in keys.split():
        tables = [[7]]
        for part in reversed(key.split(".")):
            tables = {part: tables}
        (tmp_path / f"{name}.json").write_text(json.dumps(tables))
        found = read_stored(tmp_path / f"{name}.json")
        for part in key.split(".")[:-1]:
            found = found[part]
        assert found == {}, key
