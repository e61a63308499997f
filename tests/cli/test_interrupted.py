"""Ctrl-C is a line and exit code 130, from the program's first line on."""

import os
import re
import signal
import subprocess

import pytest

from tests.conftest import REPOSITORY
from tests.programs import python

# Sends Ctrl-C from the import of a module: a finder asked for it before all others.
PROGRAM = """
import os, runpy, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
sys.argv[1:] = {words!r}
runpy.run_module("hpc_gpt", run_name="__main__")
"""
PLAN = ["plan", "--model", "gpt2", "--gpus", "8", "--cluster", "jean-zay-v100-32g"]


def interrupted(module: str, words: list[str]) -> subprocess.CompletedProcess[str]:
    return python("-c", PROGRAM.format(module=module, words=words), env={**os.environ, "PYTHONPATH": str(REPOSITORY)})


@pytest.mark.parametrize("module", ["hpc_gpt.cli", "hpc_gpt.core.output", "hpc_gpt.planner.search"])
def test_while_the_program_imports_it_is_a_line(module):
    done = interrupted(module, PLAN)
    assert (done.returncode, done.stdout, done.stderr.strip()) == (130, "", "interrupted")


def test_the_installed_command_begins_there_too():
    text = (REPOSITORY / "setup.cfg").read_text()
    assert re.search(r"^\s*hpc-gpt = hpc_gpt\.__main__:main$", text, re.M)


def test_an_end_of_its_own_keeps_its_code():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert interrupted("not_imported", ["plna"]).returncode == 2
    assert interrupted("not_imported", ["--version"]).returncode == 0
