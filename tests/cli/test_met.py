"""What commands that a new user types are answered with: words that must stand there, and words that must not.

A block of `met.txt` has comments (`# why`), files, commands that go before and runs as a block of `refused/*.txt` has
them, and commands (`$ `, after `exit N` if that is not 2 for a refusal or 0 for an answer) with lines `+ words` that
each must be in what is printed and `- words` that must not. No Slurm is there. This file is changed by hand.
"""

import contextlib
import shlex
from pathlib import Path

import pytest

from tests.cli.command import in_process, without_slurm
from tests.cli.test_refused import made_run, write_files

BLOCKS = Path(__file__).with_name("met.txt").read_text(encoding="utf-8").strip().split("\n\n")


@pytest.mark.parametrize("block", BLOCKS, ids=[block.split("\n")[0].removeprefix("# ")[:60] for block in BLOCKS])
def test_it_is_answered_with_these_words(block: str, tmp_path: Path) -> None:
    here, tools = tmp_path / "here", without_slurm(tmp_path)
    here.mkdir()
    lines = block.split("\n")
    write_files([line for line in lines if line[0] in "<|"], here)
    with contextlib.chdir(here):
        ids = {name: made_run(words) for name, *words in (line[2:].split() for line in lines if line[0] == "&")}
    printed, command = "", ""
    for line in lines:
        kind, text = line[0], line[2:]
        if kind in "$!":
            code, _, words = text.partition(" ") if text[0].isdigit() else ("", "", text)
            command = words
            done = in_process(*(ids.get(word, word) for word in shlex.split(words)), cwd=here, environment=tools)
            printed = " ".join((done.stdout + done.stderr).split())
            assert kind == "$" or not done.code, printed
            assert not code or done.code == int(code), (command, done.code, printed)
        elif kind == "+":
            assert text in printed, (command, text, printed)
        elif kind == "-":
            assert text not in printed, (command, text, printed)
