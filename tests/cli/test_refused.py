"""What is refused: one line and a hint, an exit code, nothing on stdout, and nothing is written.

A block of `refused/*.txt` has comments (`# why`), the words of a command (`$ `, first the variables of its environment)
and below them its exit code, its error and its hint. `< NAME` begins a file that is there for all later blocks, with
`| ` before each of its lines. No Slurm is there. What `render` refuses in experiments.txt, `submit` refuses in the same
words.

pytest tests/cli/test_refused.py --force-regen       after a change that is meant
"""

import os
import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import Done, error_of, in_process, without_slurm
from tests.conftest import REPOSITORY

FILES = sorted((Path(__file__).parent / "refused").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_refused_so(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here, tools = tmp_path / "here", without_slurm(tmp_path)
    here.mkdir()
    found = []
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        given = [line for line in block.split("\n") if line.startswith(("#", "<", "|", "$"))]
        write_files(given, here)
        before = sorted(here.rglob("*"))
        said = [said_of(line.removeprefix("$ "), here, tools) for line in given if line.startswith("$")]
        if file.stem == "experiments" and "\n$ render " in f"\n{block}":
            (command,) = [line for line in given if line.startswith("$ ")]
            submit = command.replace("$ render", "submit") + " --cluster generic-slurm" * ("--cluster" not in command)
            assert said_of(submit, here, tools).replace("hpc-gpt submit", "hpc-gpt render") == said[0]
        assert sorted(here.rglob("*")) == before, block
        assert not Path(os.environ["HPC_GPT_LOGS"]).exists(), block
        found.append("\n".join([*given, *said]))
    text = "\n\n".join(found) + "\n"
    if request.config.getoption("force_regen"):
        file.write_text(text, encoding="utf-8")
    # Block by block, so that each that differs is shown.
    assert text.split("\n\n") == file.read_text(encoding="utf-8").split("\n\n")


def write_files(given: list[str], folder: Path) -> None:
    path = None
    for line in given:
        if line.startswith("< "):
            path = folder / line[2:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("")
        elif line.startswith("|") and path is not None:
            with path.open("a") as file:
                file.write(line[2:] + "\n")


def said_of(command: str, folder: Path, tools: dict[str, str]) -> str:
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words if word.startswith("HPC_GPT_")) | tools
    environment["HPC_GPT_DATA"] = str(folder.parent / "data")
    words = [word for word in words if not word.startswith("HPC_GPT_")]
    done = in_process(*words, cwd=folder, environment=environment)
    assert (done.code > 0, done.stdout) == (True, ""), command
    printed = done.stderr.replace(str(folder.parent), "HERE").replace(str(REPOSITORY), "REPOSITORY")
    noted, _, error = printed.partition("Error: ")
    message, hint = error_of(Done(done.code, "", f"Error: {error}"))
    if re.fullmatch(r"hpc-gpt help keys \S+", hint):
        assert in_process(*hint.split()[1:]).code == 0, command
    return "\n".join([f"exit {done.code}", *noted.splitlines(), message, f"hint: {hint}"])
