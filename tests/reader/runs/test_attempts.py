"""metrics.jsonl as columns: what a line-by-line reading finds, whatever the lines hold."""

import json
import math
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_gpt.core.files import read_json, read_json_lines
from hpc_gpt.reader.runs import attempts as own_metrics
from hpc_gpt.reader.runs.attempts import KEYS, read_metrics, read_metrics_ends
from hpc_gpt.report.why import explain
from tests.made_runs import add_attempt, make_run, metrics_line

VALUES = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.just(10**400))
LINES = st.one_of(
    st.fixed_dictionaries({"step": st.integers(0, 6)}, optional={key: VALUES for key in KEYS if key != "step"}).map(
        json.dumps
    ),
    st.sampled_from(
        ["", "{", '{"step": 3', "[1]", '{"step": 1.5}', '{"step": true}', "nan", "}, {", '{"a": 1}, {"b": 2}']
    ),
    st.text(st.characters(exclude_characters="\n\r"), max_size=8),
)


def plainly(text):
    """{step: (line, values)} and the count of damaged lines, one line after the other."""
    found, damaged = {}, 0
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip(" \t\r\x0b\x0c"):  # what bytes call blank
            continue
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            values = None
        if isinstance(values, dict) and type(values.get("step")) is int:
            found[values["step"]] = (number, values)
        else:
            damaged += 1
    return found, damaged


@given(lines=st.lists(LINES, max_size=12), chunk=st.sampled_from([1, 64, 1 << 22]))
def test_all_lines_at_once_give_what_each_alone_does(tmp_path_factory, lines, chunk):
    path = tmp_path_factory.mktemp("metrics") / "metrics.jsonl"
    text = "\n".join(lines)
    path.write_text(text, encoding="utf-8", errors="replace")
    before, own_metrics._CHUNK = own_metrics._CHUNK, chunk
    try:
        metrics = read_metrics(path, 3)
    finally:
        own_metrics._CHUNK = before
    found, damaged = plainly(path.read_text(encoding="utf-8"))
    in_order = sorted(found, key=lambda step: found[step][0])  # a second stage begins with smaller numbers
    assert (metrics.damaged, metrics.steps["step"].tolist()) == (damaged, in_order)
    assert metrics.steps.line.tolist() == [found[step][0] for step in in_order]
    for key in KEYS:
        for step, value in zip(in_order, metrics.steps[KEYS[key]].tolist(), strict=True):
            given_value = found[step][1].get(key)
            if not isinstance(given_value, int | float):
                assert math.isnan(value)
            elif abs(given_value) < 1e300:
                assert value == float(given_value)


def test_the_highest_memory_of_each_stage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    stages = [[1.0, 5.0], [2.0, 4.0], [None, 9.0], None]
    path.write_text(
        "".join(json.dumps(metrics_line(i + 1, memory_allocated_gib=s)) + "\n" for i, s in enumerate(stages))
    )
    assert read_metrics(path, 1).peaks == {"memory_allocated_gib": [2.0, 5.0]}


def test_a_line_being_written_is_damaged_and_the_rest_stands(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(metrics_line(1)) + "\n" + json.dumps(metrics_line(2))[:40])
    metrics = read_metrics(path, 1)
    assert (len(metrics.steps), metrics.damaged) == (1, 1)
    assert metrics.steps.place(0) == "attempts/1/metrics.jsonl:1"


def fields_of(metrics):
    steps = metrics.steps
    columns = {key: steps[KEYS[key]].tobytes() for key in KEYS}
    return columns, steps.line.tolist(), steps.attempt.tolist(), metrics.peaks, metrics.damaged


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert len(read_metrics(tmp_path / "metrics.jsonl", 1).steps) == 0
    os.mkfifo(tmp_path / "ended.json")
    assert read_json(tmp_path / "ended.json") == {} == dict(read_json_lines(tmp_path / "ended.json"))


def test_a_longer_file_in_the_place_of_a_cached_one_is_read_anew(tmp_path):
    """A run that is trained again in its old folder: no old step may be reported as a new one."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(metrics_line(step)) + "\n" for step in range(1, 1001)))
    assert len(read_metrics(path, 1).steps) == 1000
    path.write_text("".join(json.dumps(metrics_line(step)) + "\n" for step in range(5001, 6501)))
    assert read_metrics(path, 1).steps["step"].tolist() == list(range(5001, 6501))


NAN = {"loss": float("nan")}


@pytest.mark.parametrize(
    ("last", "since"), [([{}], None), ([NAN, NAN], 9_999), ([NAN, {}], None), ([NAN] * 3_000, 7_001)]
)
def test_the_ends_say_what_all_lines_say_of_the_end(tmp_path, last, since):
    path = tmp_path / "metrics.jsonl"
    begin = 10_001 - len(last)
    lines = [metrics_line(step) for step in range(1, begin)]
    lines += [metrics_line(step, **values) for step, values in enumerate(last, begin)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole, ends = read_metrics(path, 1).steps, read_metrics_ends(path, 1).steps
    assert len(ends) < len(whole)
    for steps in (whole, ends):
        steps.mark_nan(always=True)
        row = steps.nan_since(1)
        assert (None if row is None else steps["step"][row]) == since
        assert [steps[name][place] for name in ("step", "at") for place in (0, -1)] == [
            whole[name][place] for name in ("step", "at") for place in (0, -1)
        ]


@pytest.mark.parametrize("text", ["", "{", '{"step": 1}', '{"step": 1}\n{"step": 2}\n{"st', "x\n" * 20_000])
def test_the_ends_of_short_and_of_damaged_files_are_all_lines(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(text)
    assert fields_of(read_metrics_ends(path, 1)) == fields_of(read_metrics(path, 1))


def test_why_and_status_of_a_long_run_read_its_ends_alone(tmp_path, monkeypatch):
    def lines_parsed(steps):
        run = make_run(tmp_path / str(steps))
        add_attempt(run, [metrics_line(step) for step in range(1, steps + 1)], "error", cause="rank 0: boom")
        parsed = []
        real = own_metrics._parsed
        with monkeypatch.context() as patch:
            patch.setattr(own_metrics, "_parsed", lambda lines: (parsed.extend(lines), real(lines))[1])
            assert explain(str(run.path), tmp_path).to_dict()["ended"] == "error"
        return len(parsed)

    assert lines_parsed(40_000) == lines_parsed(2_000) < 200
