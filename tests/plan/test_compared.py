"""`python tests/benchmarks/plan.py --rows FILE`: published rows beside their predictions."""

import json

from hpc_gpt.launcher.plan.step_time import predict_step
from tests.benchmarks.plan import compare
from tests.plan.published.rows import rows_of
from tests.plan.row_examples import row

SPLITS = [(1, 1, 64), (2, 2, 16), (4, 4, 4), (8, 1, 8)]


def made_rows(**fields):
    """Rows whose times are a third above what data sheets predict."""
    made = [row(id=f"r{tp}-{pp}-{dp}", tp=tp, pp=pp, dp=dp, **fields) for tp, pp, dp in SPLITS]
    for entry, read in zip(made, rows_of({"rows": made}, "rows").rows, strict=True):
        entry["sec_per_iter"] = 4 / 3 * predict_step(read.training, read.machine).step_s
    return made


def errors(capsys, *files):
    """What is printed, and what is said of the step times of source made."""
    compare(*files)
    out = capsys.readouterr().out
    (means,) = [line for line in out.partition("memory\n")[0].splitlines() if line.startswith("made ")]
    return out, means.split()[1:3]


def test_every_row_and_the_means_are_printed(tmp_path, capsys):
    rows, clusters = tmp_path / "rows.json", tmp_path / "clusters.json"
    rows.write_text(json.dumps({"rows": [*made_rows(), row(id="moe", moe=True), row(id="bare", hidden=None), 7]}))
    clusters.write_text(json.dumps({"clusters": {"ours": made_rows(), "other": made_rows(source="other")}}))
    out, means = errors(capsys, rows, [])
    printed = [line.split()[0] for line in out.splitlines()[1:8]]
    assert printed == ["r1-1-64", "r2-2-16", "r4-4-4", "r8-1-8", "moe", "bare", "row"]
    assert "left out: MoE is not modelled (moe True)" in out
    assert "left out: hidden is missing" in out
    assert "left out: 3 of 7 rows" in out
    assert "constants of data sheets" in out
    assert means == ["4", "25.0%"]
    # With constants of other rows.
    out, (count, mean) = errors(capsys, rows, [clusters])
    assert "constants of ours" in out
    assert (count, float(mean.rstrip("%")) < 15) == ("4", True)
