"""`[command.values]`: names of the user's own in the texts of a command, as rows of a sweep set them."""

import json
from pathlib import Path

import pytest

from tests.cli.command import error_of, hpc_gpt, in_process

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
[rows]
low = { command.values.lr = 1e-4 }
high = { command.values.lr = 2 }
"""


def test_rows_set_them_and_the_program_gets_them_quoted(tmp_path: Path) -> None:
    (path := tmp_path / "mine.toml").write_text(FILE)
    logs = {"HPC_GPT_LOGS": str(tmp_path / "logs")}
    done = hpc_gpt("submit", path, "--sweep", "--cluster", "local", cwd=tmp_path, environment=logs)
    assert done.code == 0, done.stderr
    said = {path.parents[1].name: path.read_text() for path in (tmp_path / "logs").glob("mine-*/*/said")}
    assert said == {"mine-low": "lr 0.0001 name=a b's x {lr}\n", "mine-high": "lr 2 name=a b's x {lr}\n"}
    (resolved,) = (tmp_path / "logs").glob("mine-low/*/resolved.json")
    command = json.loads(resolved.read_text())["command"]
    assert "values" not in command
    assert all(words in command["run"] for words in ("lr 0.0001", "{run}/ran"))


def test_what_bash_reads_in_quotes_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, text = tmp_path / "mine.toml", FILE.partition("[rows]")[0]
    path.write_text(text.replace("name={name}", '"{name} x"').replace("a b's", "a $b"))
    message, hint = error_of(in_process("submit", path, "--cluster", "local", code=2))
    assert message.startswith(
        "{name} stands inside quotes or a here-document of [command], and its value 'a $b' has a $"
    )
    assert "give a list" in hint
    path.write_text(text)
    monkeypatch.setenv("HPC_GPT_LOGS", str(tmp_path / "it's"))
    assert error_of(in_process("submit", path, "--cluster", "local", code=2))[0].startswith(
        "{run} stands inside quotes"
    )
