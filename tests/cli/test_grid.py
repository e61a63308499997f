"""`submit --grid` as a command, and its runs in status, report and compare."""

import json
import re
import shlex

import pytest

from hpc_gpt.core.runs.find_runs import list_runs
from hpc_gpt.launcher.submission import SubmittedRun
from tests.cli.command import error_of, in_process, without_slurm
from tests.cli.test_sweep import TABLE
from tests.made_runs import with_attempt

GRID = ("--grid", "train.lr=1e-4,3e-4", "--grid", "layout.tp=1,2,3")


@pytest.fixture
def experiment(tmp_path):
    path = tmp_path / "exp.toml"
    path.write_text(TABLE.partition("[rows]")[0].replace('"ddp"', '"deepspeed-3d"').replace("gpus = 1", "gpus = 4"))
    return path


def test_rows_that_cannot_run_and_too_many_are_refused(experiment, tmp_path):
    asked = ("submit", experiment, *GRID, "--cluster", "a100-80g-8", "--dry-run")
    message, hint = error_of(in_process(*asked, environment=without_slurm(tmp_path)))
    assert message.startswith("rows 'lr1e-4-tp3', 'lr3e-4-tp3': layout tp3-pp1-dp1 needs 3 GPUs")
    assert hint.endswith("--skip-unfit submits the other 4")
    more = in_process(*asked, "--max-rows", "5", environment=without_slurm(tmp_path))
    assert (more.code, error_of(more)[1]) == (2, "--max-rows 6")


def test_another_batch_of_some_rows_is_named(tmp_path):
    """`docs/experiments.md` has the line."""
    tools = without_slurm(tmp_path)
    asked = ("submit", "demo", "--grid", "layout.tp=1,2", "--cluster", "local", "--dry-run")
    words = (
        "note: the rows also differ in the number of samples a step: 64 in tp1; 32 in tp2; --gbs 64 makes them equal"
    )
    assert words in in_process(*asked, environment=tools, code=0).stderr.splitlines()
    assert "differ" not in in_process(*asked, "--gbs", "64", environment=tools, code=0).stderr


def test_its_runs_are_a_sweep_whose_table_has_what_varies(tmp_path, monkeypatch):
    def train(run, row):
        return SubmittedRun(with_attempt(run, 3), row.resolved, "7")

    monkeypatch.setattr("hpc_gpt.cli.sweeping.start_queued", train)
    monkeypatch.setattr("hpc_gpt.cli.sweeping.wait_for", lambda run, interrupts: None)
    (table := tmp_path / "table.toml").write_text(TABLE)
    asked = ("submit", table, "--row", "good", "--grid", "train.lr=1e-4,3e-4", "--cluster", "local")
    done = in_process(*asked, cwd=tmp_path, code=0)
    page = json.loads(in_process("report", "--json").stdout)
    assert [(row["row"], row["varied"]) for row in page["rows"]] == [
        ("lr1e-4", {"train.lr": 1e-4}),
        ("lr3e-4", {"train.lr": 3e-4}),
    ]
    (command,) = re.findall("^next: hpc-gpt (.*)", done.stderr, re.MULTILINE)
    heading, *lines = in_process(*shlex.split(command)).stdout.splitlines()
    assert heading.split()[:2] == ["Row", "train.lr"]
    assert [line.split()[:2] for line in lines] == [["lr1e-4", "0.0001"], ["lr3e-4", "0.0003"]]
    runs = list_runs(tmp_path / "logs")
    assert len({run.sweep_id for run in runs}) == 1
    assert "  2 runs  " in in_process("status").stdout
    differ = in_process("compare", runs[0].path, runs[1].path).stdout.partition("settings that differ:")[2]
    assert [line.split()[0] for line in differ.splitlines()[1:]] == ["train.lr", "sweep.row"]
