"""The questions of questions.md get the answers that are written there."""

import re
import shlex
from pathlib import Path

import pytest

from tests.cli.command import in_process, profile_of

TEXT = Path(__file__).with_name("questions.md").read_text(encoding="utf-8")
QUESTIONS = re.findall(r"^### (\d+)\. .*?^    \$ hpc-gpt (.*?)\n(.*?)(?=^### |\Z)", TEXT, re.MULTILINE | re.DOTALL)
CLUSTERS = {
    "l40s": (8, "infiniband 2x200G"),
    "mi250x": (8, "slingshot 4x200G"),
    "mi300x": (8, "roce 8x400G"),
    "gh200": (4, "slingshot 4x200G"),
    "h200": (8, "infiniband 8x400G"),
    "a100-40g": (4, "ethernet 2x25G"),
    "h800": (8, "infiniband 8x400G"),
}


def test_there_are_49():
    assert [int(number) for number, *_ in QUESTIONS] == list(range(1, 50))


@pytest.mark.long(but="first")
@pytest.mark.parametrize(("number", "command", "rest"), QUESTIONS, ids=[number for number, *_ in QUESTIONS])
def test_a_question_is_answered_as_written(number, command, rest):
    for device, (gpus, fabric) in CLUSTERS.items():
        if f"PROFILE:{device}" in command:
            profile_of(device, f'device = "{device}"\nfabric = "{fabric}"\ngpus_per_node = {gpus}\n')
            command = command.replace("PROFILE:", "")
    done = in_process(*shlex.split(command))
    code = re.search(r"^    exit (\d)$", rest, re.MULTILINE)
    assert done.code == (int(code[1]) if code else 0), done.stderr
    shows = re.findall(r"^    shows (.*)$", rest, re.MULTILINE)
    assert shows
    for expression in shows:
        assert re.search(expression, done.stdout + done.stderr), (number, expression)
