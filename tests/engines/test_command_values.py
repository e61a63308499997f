"""`[command.values]`: names of the user's own in the texts of a command, as rows of a sweep set them."""

import json
from pathlib import Path

import pytest

from tests.cli.command import hpc_gpt

FILE = """
name = "mine"
[engine]
name = "command"
[layout]
gpus = 1
[command]
run = 'echo "lr {lr}" name={name} ${HOME:+x} {{lr}} > {run}/said; touch "{run}/ran"'
workdir = "."
[command.values]
lr = 3e-4
name = "a b's"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.toml"
    path.write_text(FILE + '[rows]\n"low" = { command.values.lr = 1e-4 }\n"high" = { command.values.lr = 2 }\n')
    return path


def test_rows_set_them_and_the_program_gets_them_quoted(file: Path, tmp_path: Path) -> None:
    done = hpc_gpt(
        "submit",
        file,
        "--sweep",
        "--cluster",
        "local",
        cwd=tmp_path,
        environment={"HPC_GPT_LOGS": str(tmp_path / "logs")},
    )
    assert done.code == 0, done.stderr
    said = {path.parents[1].name: path.read_text() for path in (tmp_path / "logs").glob("mine-*/*/said")}
    assert said == {"mine-low": "lr 0.0001 name=a b's x {lr}\n", "mine-high": "lr 2 name=a b's x {lr}\n"}
    resolved = [
        json.loads(path.read_text())["command"] for path in (tmp_path / "logs").glob("mine-low/*/resolved.json")
    ]
    assert all("values" not in each and "lr 0.0001" in each["run"] and "{run}/ran" in each["run"] for each in resolved)
