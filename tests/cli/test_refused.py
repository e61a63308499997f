"""What is refused: one line and a hint, an exit code, nothing on stdout, and nothing is written.

A block of `refused/*.txt` has comments (`# why`), the words of commands (`$ `, first the variables of its environment)
and below each its error and its hint, for each of its faults, after `exit N` unless that is 2; below several commands
in a row what each of them is answered. `< NAME` begins a file that is there for all later blocks, with
`| ` before each of its lines. `! ` begins a command that succeeds before the others. `& NAME` is a run of that name in
this block, with the arguments of `a_run` and settings. No Slurm is there. What `render` refuses in experiments.txt,
`submit` refuses in the same words.

pytest tests/cli/test_refused.py --force-regen       after a change that is meant
"""

import contextlib
import re
import shlex
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hpc_gpt.core.files import logs_dir
from tests.cli.command import Done, error_of, in_process, without_slurm
from tests.conftest import REPOSITORY
from tests.made_runs import a_run

FILES = sorted((Path(__file__).parent / "refused").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_is_refused_so(file: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    here, tools = tmp_path / "here", without_slurm(tmp_path)
    here.mkdir()
    found = []
    for block in file.read_text(encoding="utf-8").strip().split("\n\n"):
        given = [line for line in block.split("\n") if line.startswith(("#", "<", "|", "!", "&", "$"))]
        write_files(given, here)
        with contextlib.chdir(here):
            ids = {name: made_run(words) for name, *words in (line[2:].split() for line in given if line[0] == "&")}
        for line in given:
            if line.startswith("! "):
                in_process(*shlex.split(line[2:]), cwd=here, environment=tools, code=0)
        before = all_files(here)
        commands = [line for line in given if line.startswith("$")]
        said = [said_of(line[2:], here, tools, ids) for line in commands]
        for command, words in zip(commands, said, strict=True):
            if file.stem == "experiments" and command.startswith("$ render "):
                submit = command.replace("$ render", "submit") + " --cluster generic-slurm" * (
                    "--cluster" not in command
                )
                assert said_of(submit, here, tools, ids).replace("hpc-gpt submit", "hpc-gpt render") == words
        assert all_files(here) == before, block
        assert ids or not logs_dir().exists(), block
        shutil.rmtree(logs_dir(), ignore_errors=True)
        about = [line for line in given if line not in commands]
        for at, (command, words) in enumerate(zip(commands, said, strict=True), 1):
            about += [command] if said[at : at + 1] == [words] else [command, words]
        found.append("\n".join(about))
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


def made_run(words: list[str]) -> str:
    """The id of a run with the arguments of `a_run`, as words KEY=VALUE."""
    given: dict[str, Any] = {}
    for key, value in (word.split("=", 1) for word in words):
        if key in ("saved", "damaged"):
            value = f"[{value}]"
        try:
            read = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            read = None if value == "none" else value
        given[key.replace(".", "__")] = read
    return a_run(**given).run_id


def all_files(folder: Path) -> list[tuple[Path, int]]:
    """What is in the folder, and the files of the runs; files with their times."""
    of_runs = [path for path in logs_dir().rglob("*") if path.is_file()]
    return sorted((path, path.stat().st_mtime_ns if path.is_file() else 0) for path in [*folder.rglob("*"), *of_runs])


def said_of(command: str, folder: Path, tools: dict[str, str], ids: dict[str, str]) -> str:
    command = re.sub(r"\b[A-Z]+\b", lambda name: ids.get(name[0], name[0]), command)
    words = shlex.split(command)
    environment = dict(word.split("=", 1) for word in words if word.startswith("HPC_GPT_")) | tools
    environment["HPC_GPT_DATA"] = str(folder.parent / "data")
    words = [word for word in words if not word.startswith("HPC_GPT_")]
    done = in_process(*words, cwd=folder, environment=environment)
    assert (done.code > 0, done.stdout) == (True, ""), command
    printed = done.stderr.replace(str(folder.parent), "HERE").replace(str(REPOSITORY), "REPOSITORY")
    for name, run_id in ids.items():
        printed = printed.replace(run_id, name)
    noted, _, error = printed.partition("Error: ")
    _, hint = error_of(Done(done.code, "", f"Error: {error}"))
    if re.fullmatch(r"hpc-gpt help keys \S+", hint):
        in_process(*hint.split()[1:], code=0)
    end = [] if done.code == 2 else [f"exit {done.code}"]
    lines = [line for line in error.splitlines() if line and not line.startswith("{")]
    return "\n".join([*end, *noted.splitlines(), *lines])
