"""One script that is submitted twice in one folder, with the same checkpoints: named before and after."""

import json
from pathlib import Path

import pytest

from hpc_gpt.core.files import logs_dir
from hpc_gpt.core.runs.run_folder import RunFolder
from tests.cli.command import in_process
from tests.waiting import wait_for

SCRIPT = """#!/bin/bash
#SBATCH --ntasks=1
mkdir -p out
last=$(ls -v out | tail -n 1) last=${last#step-} last=${last:-0}
for ((step = last + 1; step <= last + 6; step++)); do
  echo "step $step | loss 3.$step"
  echo $step >out/step-$step
done
until [ -e end ]; do sleep 0.1; done
"""
SUBMIT = ("submit", "--cluster", "local", "--checkpoints", "out/step-*", "job.sh")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job.sh").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "logs"))
    return tmp_path


def submitted(*arguments: str) -> RunFolder:
    """The run of a submission."""
    before = set(logs_dir().glob("*/*"))
    in_process(*SUBMIT, *arguments, code=0)
    (path,) = set(logs_dir().glob("*/*")) - before
    return RunFolder(path.resolve())


def state_of(run: RunFolder) -> tuple[str, str]:
    (row,) = json.loads(in_process("status", run.path, "--json").stdout)["runs"]
    return row["state"], row["cause"] or ""


def test_a_live_run_of_the_same_checkpoints_is_named(folder: Path) -> None:
    first = submitted("--seed=1")
    wait_for("its steps", lambda: first.attempt(1).last_metrics().get("step") == 6)
    for asked in (SUBMIT, ("submit", "--cluster", "local", "--checkpoints", f"{folder}/out/step-?", "job.sh")):
        refused = in_process(*asked, "--seed=2", code=1)
        assert f"run {first.run_id} is running, and its checkpoints are the same files: {folder}/out/step-" in (
            refused.stderr
        )
        assert "--force" in refused.stderr
    (folder / "end").touch()
    wait_for("its end", lambda: state_of(first)[0] == "done")
    assert "began after" not in state_of(first)[1]
    second = submitted("--seed=2")
    wait_for("its end", lambda: state_of(second)[0] == "done")
    note = f"its first start began after step 6: the checkpoints {folder}/out/step-* are of run {first.run_id}"
    assert note in state_of(second)[1]
    assert note in in_process("why", second.path).stdout.replace("\n", " ")
    (record,) = json.loads(in_process("report", second.path, "--json").stdout)["records"]
    assert note in record["flags"]
