"""HPC_GPT_*: one that nothing reads is named, with the option that may be meant."""

import re
from pathlib import Path

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.cli.variables import PREFIX, variables_of
from hpc_gpt.core.slurm.environment import OWN_VARIABLES
from tests.cli.command import in_process, resolved_of
from tests.conftest import REPOSITORY

# No variables: the mark of a here-document, and what click makes of the command's name.
NO_VARIABLES = {"HPC_GPT_RESOLVED", "HPC_GPT_COMPLETE"}


def options_of(verb):
    command = cli.group.get_command(click.Context(cli.group), verb)
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def test_the_name_of_an_option_is_named_with_the_option():
    ours = {"HPC_GPT_TP": "4", "HPC_GPT_SET": "train.steps=7", "HPC_GPT_DRY_RUN": ""}
    done = in_process("render", "demo", environment=ours)
    assert done.stderr.splitlines()[:2] == [
        "nothing reads the variable HPC_GPT_SET; use --set",
        "nothing reads the variable HPC_GPT_TP; use --tp",
    ]
    assert resolved_of(done)["layout"]["tp"] == 2
    assert "nothing reads" not in in_process("status", environment=ours).stderr  # no option of it


def test_variables_that_are_read_are_named_if_an_error_is_theirs():
    assert "environment" not in in_process("render", "demo", environment={"HPC_GPT_CLUSTER": "local"}).stderr
    for name, verb in (("CLUSTER", ["demo"]), ("EXPERIMENT", [])):
        done = in_process("render", *verb, environment={f"HPC_GPT_{name}": "nosuch"})
        assert (done.code, done.stderr.splitlines()[0]) == (2, f"from the environment: HPC_GPT_{name}=nosuch")
    done = in_process("submit", "demo", "--cluster", "generic-slurm", environment={"HPC_GPT_YES": "1"})
    assert done.stderr.splitlines()[0] == "from the environment: HPC_GPT_YES=1"


@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_an_unread_variable_is_named_with_the_nearest_one(verb):
    lines = "nothing reads the variable HPC_GPT_LOG; did you mean HPC_GPT_LOGS?\n"
    unread = {"HPC_GPT_LOG": "1", "HPC_GPT_DRY_RUN": ""}
    unread |= {"HPC_GPT_CLUSTER": "generic-slurm"}  # without one, and without sbatch here, `submit` asks for that first
    done = in_process(verb, "nothing-of-that-name", environment=unread)  # which ends it before anything is done
    assert done.stderr.startswith(f"{lines}Error: no experiment 'nothing-of-that-name'")


def test_without_an_experiment_a_nearly_known_variable_is_named():
    said = in_process("status", environment={"HPC_GPT_LOG": "/x", "HPC_GPT_XYZZY": "1"}).stderr
    assert said.startswith("nothing reads the variable HPC_GPT_LOG; did you mean HPC_GPT_LOGS?\nno runs under ")


def test_what_it_refuses_nothing_for_is_rendered():
    strange = {"HPC_GPT_XYZZY": "1", "HPC_GPT_TEN\nSOR": "2"}
    done = in_process("render", "demo", environment=strange)
    assert resolved_of(done)["layout"]["tp"] == 2
    assert done.stderr.splitlines()[:2] == [
        "nothing reads the variable HPC_GPT_TEN\\nSOR; hpc-gpt submit --help lists the options",
        "nothing reads the variable HPC_GPT_XYZZY; hpc-gpt submit --help lists the options",
    ]


def test_what_our_own_scripts_jobs_and_tests_set_is_known():
    set_ = dict.fromkeys(OWN_VARIABLES, "1")
    set_ |= {"HPC_GPT_CLUSTER": "generic-slurm", "HPC_GPT_EXPERIMENT": "demo", "HPC_GPT_HOST": ""}
    assert in_process("render", environment=set_).stderr == "not predicted: profile generic-slurm names no device\n"
    options = {
        PREFIX + name for verb in ("render", "submit") for each in options_of(verb) for name in variables_of(each)
    }
    known = OWN_VARIABLES | NO_VARIABLES | options
    texts = [path for top in ("hpc_gpt", "templates", "tests", ".ci") for path in (REPOSITORY / top).rglob("*")]
    for path in texts:
        if path.is_file() and path.suffix in (".py", ".j2", ".toml", ".sh", "") and path.name != Path(__file__).name:
            named = set(re.findall(r"HPC_GPT_[A-Z][A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
            assert named <= known, path
