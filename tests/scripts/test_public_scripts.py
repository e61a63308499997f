"""Job scripts in the manner of public ones, and what `hpc-gpt init --from` makes of them: experiment, profile, list.

pytest tests/scripts --force-regen       after a change that is meant
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pytest_regressions.file_regression import FileRegressionFixture

from tests.cli.command import Done, in_process

JOBS = Path(__file__).parent / "jobs"
EXPECTED = Path(__file__).parent / "expected"
NAMES = sorted(path.stem for path in JOBS.glob("*.slurm"))


def init(folder: Path, script: str, *options: str) -> Done:
    """`hpc-gpt init --from SCRIPT` in a folder with all scripts."""
    shutil.copytree(JOBS, folder, dirs_exist_ok=True)
    own = {"HOME": "/home/me", "USER": "me", "SCRATCH": "", "HPC_GPT_CLUSTER": ""}
    return in_process("init", "--from", script, *options, cwd=folder, environment=own)


def test_there_are_enough() -> None:
    assert len(NAMES) >= 14


@pytest.mark.parametrize("name", NAMES)
def test_a_script_becomes_an_experiment_a_profile_and_a_list(
    name: str, tmp_path: Path, file_regression: FileRegressionFixture
) -> None:
    done = init(tmp_path, f"{name}.slurm")
    assert done.code == 0, done.stderr
    assert done.stderr == f"next: hpc-gpt render {name}.toml --cluster {name}-cluster.toml\n"
    for file, text in (
        (f"{name}.txt", done.stdout),
        (f"{name}.toml", (tmp_path / f"{name}.toml").read_text()),
        (f"{name}-cluster.toml", (tmp_path / f"{name}-cluster.toml").read_text()),
    ):
        file_regression.check(text.replace(str(tmp_path), "/here"), fullpath=EXPECTED / file)


@pytest.mark.parametrize("name", NAMES)
def test_the_result_can_be_rendered(name: str, tmp_path: Path) -> None:
    init(tmp_path, f"{name}.slurm")
    done = in_process("render", f"{name}.toml", "--cluster", f"{name}-cluster.toml", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert "hf_" not in done.stdout
    assert "0123456789abcdef" not in done.stdout
