"""Words that people type first, and values that come from somewhere else than the command line."""

import pytest

from hpc_gpt import __version__
from tests.cli.command import in_process
from tests.made_runs import unsubmitted_run


@pytest.mark.parametrize("words", [("-V",), ("version",), ("--version",)])
def test_the_version(words):
    done = in_process(*words)
    assert (done.code, done.stdout) == (0, f"hpc-gpt {__version__}\n")


@pytest.mark.parametrize("verb", ["submit", "plan", "cancel"])
def test_help_of_a_verb(verb):
    assert in_process("help", verb).stdout == in_process(verb, "--help").stdout
    assert in_process("help", "engines").stdout.startswith("deepspeed-3d")


def test_a_key_that_is_set_twice_is_said():
    done = in_process("render", "demo", "--set", "train.steps=3", "--set", "train.lr=1e-3", "--set", "train.steps=4")
    assert "note: --set train.steps is given 2 times: train.steps=4 counts" in done.stderr
    assert "train.lr is given" not in done.stderr
    assert '"steps": 4' in done.stdout


@pytest.mark.parametrize("verb", ["cancel", "stop", "save", "requeue", "export", "why", "logs", "status"])
def test_the_empty_name_of_a_shells_unset_variable_is_no_run(verb):
    run = unsubmitted_run()
    done = in_process(verb, "")
    assert (done.code, done.stderr.splitlines()[0]) == (5, "Error: the name of a run is empty")
    assert not list(run.path.glob("cancelled.*"))
