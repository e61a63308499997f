"""HPC_GPT_*: any long option's variable is read; two that differ are refused; one that nothing reads is named."""

import re
from pathlib import Path

import click
import pytest

from hpc_gpt import cli
from hpc_gpt.cli.experiment_options import variables_of
from hpc_gpt.slurm.environment import OWN_VARIABLES
from tests.cli.command import in_process, resolved_of
from tests.conftest import REPOSITORY

SHORT, LONG = "HPC_GPT_TP", "HPC_GPT_TENSOR_MODEL_PARALLEL_SIZE"
# No variables: the mark of a here-document, and what click makes of the command's name.
NO_VARIABLES = {"HPC_GPT_RESOLVED", "HPC_GPT_COMPLETE"}


def options_of(verb):
    command = cli.group.get_command(click.Context(cli.group), verb)
    return [parameter for parameter in command.params if isinstance(parameter, click.Option)]


def test_the_long_name_is_read_like_the_short_one():
    assert resolved_of(in_process("render", "demo", environment={LONG: "1", "HPC_GPT_PP": "4"}))["layout"]["tp"] == 1
    both = {SHORT: "1", LONG: "01", "HPC_GPT_PIPELINE_MODEL_PARALLEL_SIZE": "4"}
    assert resolved_of(in_process("render", "demo", environment=both))["layout"] == {"tp": 1, "pp": 4, "dp": 1}
    done = in_process("render", "demo", environment={"HPC_GPT_MICRO_BATCH_SIZE": "-1"})
    assert done.code == 2
    # The error names the key; the line before it says where the value is from, in every verb.
    assert done.stderr.startswith(
        "from the environment: HPC_GPT_MICRO_BATCH_SIZE=-1\nError: micro_batch is -1, but must be at least 1\n"
    )


@pytest.mark.parametrize("verb", ["render", "submit"])
def test_every_long_option_has_its_variable(verb):
    for option in options_of(verb):
        if option.opts == ["--checkpoints"]:  # HPC_GPT_CHECKPOINTS is a folder, which a job's programs are given
            continue
        read = [option.envvar] if isinstance(option.envvar, str) else option.envvar or []
        assert sorted(variables_of(option.opts)) == sorted(read), option.opts


def test_an_option_that_is_no_key_is_named_too_and_a_name_if_nothing_has_it():
    ours = {"HPC_GPT_FORCE": "1", "HPC_GPT_UNTIL": "steps=9", "HPC_GPT_DRY_RUN": "1"}
    done = in_process("submit", "demo", "--cluster", "generic-slurm", environment=ours)
    named = done.stderr.splitlines()[0]
    assert named.startswith("from the environment: ")
    assert set(named.partition(": ")[2].split(", ")) == {f"{name}={text}" for name, text in ours.items()}
    assert "environment" not in in_process("render", "demo", environment={"HPC_GPT_CLUSTER": "local"}).stderr
    for name, verb in (("CLUSTER", ["demo"]), ("EXPERIMENT", [])):
        done = in_process("render", *verb, environment={f"HPC_GPT_{name}": "nosuch"})
        assert (done.code, done.stderr.splitlines()[0]) == (2, f"from the environment: HPC_GPT_{name}=nosuch")


def test_flags_and_set_by_variable_give_way_to_the_line():
    ours = {"HPC_GPT_SET": "train.steps=7 train.lr=0.5", "HPC_GPT_EXCLUSIVE": "1"}
    resolved = resolved_of(in_process("render", "demo", environment=ours))
    assert (resolved["train"]["steps"], resolved["train"]["lr"], resolved["job"]["exclusive"]) == (7, 0.5, True)
    assert resolved_of(in_process("render", "demo", "--set", "train.steps=8", environment=ours))["train"]["steps"] == 8


@pytest.mark.parametrize("verb", ["plan", "render", "submit", "rehearse", "bench"])
def test_one_that_nothing_reads_is_named_with_the_nearest_and_refuses_nothing(verb):
    lines = "nothing reads the variable HPC_GPT_LOG; did you mean HPC_GPT_LOGS?\n"
    unread = {"HPC_GPT_LOG": "1", "HPC_GPT_DRY_RUN": "", "HPC_GPT_ENGINES": "ddp"}
    unread |= {"HPC_GPT_CLUSTER": "generic-slurm"}  # without one, and without sbatch here, `submit` asks for that first
    done = in_process(verb, "nothing-of-that-name", environment=unread)  # which ends it before anything is done
    named = "from the environment: HPC_GPT_ENGINES=ddp\n" if verb == "bench" else ""
    assert done.stderr.startswith(f"{lines}{named}Error: no experiment 'nothing-of-that-name'")


def test_what_it_refuses_nothing_for_is_rendered():
    strange = {"HPC_GPT_XYZZY": "1", "HPC_GPT_TEN\nSOR": "2"}
    done = in_process("render", "demo", environment=strange)
    assert resolved_of(done)["layout"]["tp"] == 2
    assert done.stderr.splitlines()[:2] == [
        "nothing reads the variable HPC_GPT_TEN\\nSOR; hpc-gpt submit --help lists the options",
        "nothing reads the variable HPC_GPT_XYZZY; hpc-gpt submit --help lists the options",
    ]


def test_what_our_own_scripts_jobs_and_tests_set_is_known():
    assert in_process("render", "demo", environment=dict.fromkeys(OWN_VARIABLES, "1")).stderr == (
        "not predicted: profile generic-slurm names no device\n"
    )
    known = OWN_VARIABLES | {"HPC_GPT_EXPERIMENT"} | NO_VARIABLES
    known |= {
        name for verb in ("render", "submit") for option in options_of(verb) for name in variables_of(option.opts)
    }
    texts = [path for top in ("hpc_gpt", "templates", "tests", ".ci") for path in (REPOSITORY / top).rglob("*")]
    for path in texts:
        if path.is_file() and path.suffix in (".py", ".j2", ".toml", ".sh", "") and path.name != Path(__file__).name:
            named = set(re.findall(r"HPC_GPT_[A-Z][A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
            assert named <= known, path
