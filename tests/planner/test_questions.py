"""The questions of questions.md get the answers that are written there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import in_process, profile_of

TEXT = Path(__file__).with_name("questions.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^### (\d+)\. .*?^    \$ hpc-gpt (.*?)\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL)
H200 = 'device = "h200"\nfabric = "infiniband 8x400G"\ngpus_per_node = 8\n'


def test_there_are_20():
    assert [int(number) for number, *_ in QUESTIONS] == list(range(1, 21))


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("number", "command", "rest"), QUESTIONS, ids=[number for number, *_ in QUESTIONS])
def test_a_question_is_answered_as_written(number, command, rest):
    if "PROFILE:h200" in command:
        profile_of("h200", H200)
        command = command.replace("PROFILE:", "")
    done = in_process(*shlex.split(command))
    code = re.search(r"^    exit (\d)$", rest, re.MULTILINE)
    assert done.code == (int(code[1]) if code else 0), done.stderr
    shows = re.findall(r"^    shows (.*)$", rest, re.MULTILINE)
    assert shows
    for expression in shows:
        assert re.search(expression, done.stdout + done.stderr), (number, expression)
