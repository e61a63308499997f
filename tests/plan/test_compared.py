"""`python tests/benchmarks/plan.py --rows FILE`: published rows beside their predictions."""

import json

import pytest

from hpc_gpt.launcher.plan.step_time import predict_step
from tests.plan.published.compared import compare
from tests.plan.published.files import rows_of
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


def test_every_row_and_the_means_are_printed(rows_file, capsys):
    compare(rows_file, [], None, False, False)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert [line.split()[0] for line in lines[1:8]] == ["r1-1-64", "r2-2-16", "r4-4-4", "r8-1-8", "moe", "bare", "row"]
    assert "left out: MoE is not modelled (moe True)" in out
    assert "left out: hidden is missing" in out
    (means,) = [line for line in lines if line.startswith("made ")]
    assert means.split()[1:4] == ["4", "25.0%", "0.0%"]
    assert "3 of 7 rows left out; constants of data sheets" in err


def test_as_json_with_constants_of_other_rows(rows_file, clusters_file, capsys):
    compare(rows_file, [clusters_file], "ours", False, True)
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["schema"] == 1
    assert [entry["left_out"] is None for entry in found["rows"]] == [True] * 4 + [False] * 3
    assert {entry["calibration"] for entry in found["rows"][:4]} == {"ours"}
    assert all(abs(entry["step_error"]) < 0.15 for entry in found["rows"][:4])
    assert set(found["calibrations"]) == {"ours", "other"}
    assert found["scores"]["sources"][0]["time"]["mean"] < 0.15


def test_cross_validation_is_printed_too(clusters_file, capsys):
    compare(clusters_file, [], None, True, False)
    out = capsys.readouterr().out
    assert "mean absolute error fitted without the source" in out
    assert "mean absolute error fitted without the row, within its cluster" in out
